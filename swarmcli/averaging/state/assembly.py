"""A state in the making: the memory for it, and which chunks nobody has fetched yet. No network in here."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping

import torch

from swarmcli.averaging.allreduce.lending import fresh_memory
from swarmcli.averaging.state.snapshot import ChunkLayout, StateOutline, digest_of_chunk
from swarmcli.averaging.tasks import Bell
from swarmcli.compression.base import tensor_memory


class Assembly:
    """Fetchers take chunks, read them into their slots, and either mark them as arrived or put them back."""

    def __init__(self, layout: ChunkLayout, outline: StateOutline) -> None:
        """Allocates the memory. Raises ValueError if there is not enough."""
        self.layout, self.outline = layout, outline
        try:
            self._memory = fresh_memory(layout.nbytes)
        except (RuntimeError, OSError) as error:
            raise ValueError(f"no memory for a state of {layout.nbytes} bytes") from error
        self._bytes = tensor_memory(self._memory)
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
        """Where the content of a chunk belongs."""
        begin, end = self.layout.bounds(chunk)
        return self._bytes[begin:end]

    def digest(self, chunk: int) -> bytes:
        """The SHA-256 of what its slot holds."""
        return digest_of_chunk(self.slot(chunk))

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
        self._open = deque(sorted([*self._open, *back]))
        self._changed.ring()

    def tensors(self) -> dict[str, torch.Tensor]:
        """Raises CompressionError for what no codec makes."""
        return self.layout.tensors(self._memory)
