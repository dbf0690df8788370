"""A stream of batches that are made while the device computes.

One thread makes them, since reading and tokenizing let go of the interpreter's lock while they work; images are decoded
and scaled by several more (see RowTask).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from swarmcli.training.task import Batch, BatchStream


class PrefetchedStream:
    """The same batches as `stream` gives, and the same positions; errors come when their batch is asked for."""

    def __init__(self, stream: BatchStream, ahead: int) -> None:
        """`ahead`: so many batches are made before anybody asks for them."""
        self._stream = stream
        self._position = stream.position()
        self._thread = ThreadPoolExecutor(1, "swarm data")
        self._made = deque(self._thread.submit(self._make) for _ in range(ahead))

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        batch, self._position = self._made[0].result()  # one that failed stays: the stream is at its end
        self._made.popleft()
        self._made.append(self._thread.submit(self._make))
        return batch

    def position(self) -> Mapping[str, Any]:
        """Where the stream is behind the last batch that was taken."""
        return self._position

    def close(self) -> None:
        """Makes no more batches."""
        self._thread.shutdown(cancel_futures=True)

    def _make(self) -> tuple[Batch, Mapping[str, Any]]:
        return next(self._stream), self._stream.position()
