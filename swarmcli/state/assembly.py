"""A state in the making: the place for it, and which chunks nobody has fetched yet. No network in here."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from pathlib import Path

from swarmcli.state.distant import AnyTensor
from swarmcli.state.slots import FileSlots, MemorySlots, Slots
from swarmcli.state.snapshot import ChunkLayout, StateOutline, digest_of_chunk
from swarmcli.tasks import Bell


class Assembly:
    """Fetchers take chunks, read them into their slots, and either mark them as arrived or put them back."""

    def __init__(self, layout: ChunkLayout, outline: StateOutline, spool: Path | None = None) -> None:
        """Makes room for it: in memory, or in a file in the directory `spool`. Raises ValueError if there is none."""
        self.layout, self.outline = layout, outline
        self._slots: Slots = MemorySlots(layout) if spool is None else FileSlots(layout, spool)
        self._open = deque(range(layout.chunks))  # nobody fetches these
        self._arrived: dict[int, bytes] = {}  # chunk → its digest
        self._changed = Bell()

    @property
    def complete(self) -> bool:
        return len(self._arrived) == self.layout.chunks

    @property
    def arrived(self) -> Mapping[int, bytes]:
        """The digests of the chunks that are there."""
        return self._arrived

    def take_nowait(self, most: int) -> range:
        """Up to `most` chunks to fetch, one behind the other; empty if others fetch all that are missing."""
        if not self._open:
            return range(0)
        first = last = self._open.popleft()
        while self._open and self._open[0] == last + 1 and last - first + 1 < most:
            last = self._open.popleft()
        return range(first, last + 1)

    async def take(self, most: int) -> range:
        """The same, but waits while others may still put chunks back; empty only when the state is complete."""
        while not self._open and not self.complete:
            await self._changed.wait()
        return self.take_nowait(most)

    def slot(self, chunk: int) -> memoryview:
        """Where the content of a chunk that was taken is to be written."""
        return self._slots.slot(chunk)

    def settle(self, chunk: int) -> bytes:
        """Keeps what the slot holds, and returns its SHA-256. For an executor. Raises OSError if there is no room."""
        digest = digest_of_chunk(self._slots.slot(chunk))
        self._slots.settle(chunk)
        return digest

    def add(self, chunk: int, digest: bytes) -> None:
        """A chunk that was taken is there, and what it should be."""
        self._arrived[chunk] = digest
        if self.complete:
            self._changed.ring()

    def put_back(self, chunks: Iterable[int]) -> None:
        """Chunks that were taken and did not come, or are not wanted as they came; nobody writes into their slots."""
        back = list(chunks)
        for chunk in back:
            self._arrived.pop(chunk, None)
            self._slots.drop(chunk)
        self._open = deque(sorted([*self._open, *back]))
        self._changed.ring()

    def tensors(self) -> dict[str, AnyTensor]:
        """For an executor. Raises CompressionError for what no codec makes, and OSError."""
        return self._slots.tensors()
