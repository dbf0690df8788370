"""A stream of batches that are made while the device computes.

One thread makes them, since reading and tokenizing let go of the interpreter's lock while they work; images are decoded
and scaled by several more (see RowTask). They end with their process, however that ends: there is nothing that could be
left behind.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

from swarmcli.training.task import Batch, BatchStream


class PrefetchedStream:
    """The same batches as `stream` gives, and the same positions; errors come when their batch is asked for."""

    def __init__(self, stream: BatchStream, ahead: int) -> None:
        """`ahead`: so many batches are made before anybody asks for them."""
        self._stream = stream
        self._ahead = ahead
        self._position = stream.position()
        self._made: deque[tuple[Batch, Mapping[str, Any]] | Exception] = deque()
        self._change = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._make, name="swarm data", daemon=True)
        self._thread.start()

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        with self._change:
            self._change.wait_for(lambda: self._made or self._closed)
            if not self._made:
                raise StopIteration
            made = self._made[0]
            if isinstance(made, Exception):
                raise made  # it stays: the stream is at its end
            self._made.popleft()
            self._change.notify_all()
            batch, self._position = made
            return batch

    def position(self) -> Mapping[str, Any]:
        """Where the stream is behind the last batch that was taken."""
        return self._position

    def close(self) -> None:
        """Makes no more batches."""
        with self._change:
            self._closed = True
            self._change.notify_all()
        self._thread.join()

    def _make(self) -> None:
        while True:
            made: tuple[Batch, Mapping[str, Any]] | Exception
            try:
                made = next(self._stream), self._stream.position()
            except Exception as error:
                made = error
            with self._change:
                self._made.append(made)
                self._change.notify_all()
                self._change.wait_for(lambda: len(self._made) < self._ahead or self._closed)
                if self._closed or isinstance(made, Exception):
                    return
