"""A state in the making: the memory for it, and which chunks nobody has fetched yet. No network in here."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

import torch

from swarmcli.averaging.snapshot import ChunkLayout, Manifest, StateOutline, chunk_is_intact
from swarmcli.averaging.tasks import Bell
from swarmcli.compression.base import tensor_memory


class Assembly:
    """Fetchers take chunks, read them into their slots, and either mark them as arrived or put them back."""

    def __init__(self, manifest: Manifest, layout: ChunkLayout, outline: StateOutline) -> None:
        """Allocates the memory. Raises ValueError if there is not enough."""
        self.outline = outline
        self._manifest, self._layout = manifest, layout
        try:
            self._memory = torch.empty(layout.nbytes, dtype=torch.uint8)
        except RuntimeError as error:
            raise ValueError(f"no memory for a state of {layout.nbytes} bytes") from error
        self._bytes = tensor_memory(self._memory)
        self._open = deque(range(layout.chunks))  # nobody fetches these
        self._missing = layout.chunks
        self._changed = Bell()

    @property
    def complete(self) -> bool:
        return not self._missing

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
        while not self._open and self._missing:
            await self._changed.wait()
        return self.take_nowait(most)

    def slot(self, chunk: int) -> memoryview:
        """Where the content of a chunk belongs."""
        begin, end = self._layout.bounds(chunk)
        return self._bytes[begin:end]

    def is_intact(self, chunk: int) -> bool:
        """Whether its slot holds what the manifest names."""
        return chunk_is_intact(self._manifest, chunk, self.slot(chunk))

    def arrived(self) -> None:
        """One of the chunks that were taken is there and intact."""
        self._missing -= 1
        if not self._missing:
            self._changed.ring()

    def put_back(self, chunks: Iterable[int]) -> None:
        """Chunks that were taken and did not come; nobody writes into their slots any more."""
        self._open = deque(sorted([*self._open, *chunks]))
        self._changed.ring()

    def tensors(self) -> dict[str, torch.Tensor]:
        return self._layout.tensors(self._memory)
