"""A peer's stream of data across the restarts of its process: a small file remembers where it was."""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections import deque
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from swarmcli.training.task import Batch, BatchStream, Task

logger = logging.getLogger(__name__)

STREAM = "stream.json"  # in a home; an earlier version also put it beside the model in a checkpoint


class RememberedStream:
    """Micro-batches of one task, from where the process before was when it last called `remember`.

    The position belongs to one stream, and so to one peer (and one rank of its site): another one's file is not
    followed. If the file is torn, or of other data, the stream begins at its beginning, and a warning says so.
    """

    def __init__(self, task: Task, seed: int, file: Path | None = None, ahead: int = 0) -> None:
        """`seed`: the stream's (see `stream_seed`). Without a file nothing is remembered. `ahead`: how many batches are
        made before they are asked for. Raises DataError."""
        self._seed, self._file = seed, file
        self._written = True  # whether the last try to write the file succeeded
        position: Mapping[str, Any] | None = None
        self._starts = 0  # starts of this stream before this one
        if file is not None:
            try:
                self._starts, position = _read(file, seed) or (0, None)
            except ValueError as error:
                _warn(file, error)
                # a random number, so that dropout differs from earlier starts'
                self._starts = int.from_bytes(os.urandom(4), "big")
        self._batches: BatchStream
        try:
            self._batches = task.batches(seed, position)
        except ValueError as error:
            assert file is not None
            _warn(file, error)
            self._batches = task.batches(seed, None)
        self._prefetched = PrefetchedStream(self._batches, ahead) if ahead else None
        self._batches = self._prefetched or self._batches
        self.remember()

    @property
    def dropout_seed(self) -> int:
        """The seed of torch's random numbers: another one at each start, or a peer would draw the same dropout
        again."""
        digest = hashlib.sha256(f"swarm dropout {self._seed} {self._starts}".encode()).digest()
        return int.from_bytes(digest[:8], "big") >> 1

    def next(self) -> Batch | None:
        """The next micro-batch; None when the data has ended."""
        return next(self._batches, None)

    def close(self) -> None:
        """Remembers where the stream is, and makes no more batches."""
        self.remember()
        if self._prefetched is not None:
            self._prefetched.close()

    def remember(self) -> None:
        """Writes down where the stream is. If the disk is full, a warning says so, and training goes on.

        The file is replaced whole. It is not flushed: a file that a crash of the machine has torn is noticed, and read
        as none.
        """
        if self._file is None:
            return
        content = json.dumps([self._seed, self._starts + 1, self._batches.position()])
        temporary = self._file.with_suffix(".writing")
        try:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            temporary.write_text(json.dumps({"stream": content, "sha256": _digest(content)}), encoding="utf-8")
            temporary.replace(self._file)
            self._written = True
        except OSError as error:
            if self._written:  # warns once, and not after every epoch while the disk stays full
                self._written = False
                logger.warning(
                    "this peer's place in its data was not written to %s: %s; make room there, or it begins its "
                    "data anew at its next start",
                    self._file,
                    error.strerror,
                )


class PrefetchedStream:
    """Gives the same batches and positions as `stream`, but makes them while the device computes; an error comes when
    its batch is asked for.

    One thread makes them, since reading and tokenizing release the interpreter's lock while they work; several more
    decode and scale images (see RowTask).
    """

    def __init__(self, stream: BatchStream, ahead: int) -> None:
        """`ahead`: how many batches are made before anybody asks for them."""
        self._stream = stream
        self._position = stream.position()
        self._thread = ThreadPoolExecutor(1, "swarm data")
        self._made = deque(self._thread.submit(self._make) for _ in range(ahead))

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        batch, self._position = self._made[0].result()  # a batch that failed stays first: the stream is at its end
        self._made.popleft()
        self._made.append(self._thread.submit(self._make))
        return batch

    def position(self) -> Mapping[str, Any]:
        """Where the stream is after the last batch that was taken."""
        return self._position

    def close(self) -> None:
        """Makes no more batches."""
        self._thread.shutdown(cancel_futures=True)

    def _make(self) -> tuple[Batch, Mapping[str, Any]]:
        return next(self._stream), self._stream.position()


def _read(file: Path, seed: int) -> tuple[int, Mapping[str, Any]] | None:
    """Returns the number of starts before, and the position; None if there is no such file, or it is of another peer's
    stream.

    Raises ValueError for what `remember` did not write.
    """
    try:
        with file.open("rb") as stream:
            data = stream.read(16 << 20)  # the longest sequence that a recipe allows is a million tokens
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ValueError(f"it cannot be read: {error.strerror}") from error
    try:
        whole = json.loads(data)
        content = whole["stream"]
        if whole["sha256"] != _digest(content):
            raise ValueError("it is not what was written")
        stream_seed, starts, position = json.loads(content)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError("it is damaged") from error
    return (starts, position) if stream_seed == seed else None


def _digest(content: str) -> str:
    return hashlib.sha256(content.encode()).hexdigest()


def _warn(file: Path, error: Exception) -> None:
    logger.warning("the stream of data begins at its beginning: %s is of no use: %s", file, error)
