"""Where a state is put together: in memory, or in a file when it is too large for this process.

A chunk is received into its slot and then settled. In memory both are the same place; of a file only the chunks that
are being received are in memory.
"""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

import torch

from swarmcli.compression import NoCompression, TensorDescriptor, TensorMessage, extract
from swarmcli.compression.base import tensor_memory
from swarmcli.memory import fresh_memory
from swarmcli.state.distant import AnyTensor, DistantTensor, pieces
from swarmcli.state.snapshot import ChunkLayout, TensorEntry
from swarmcli.state.unnamed_file import UnnamedFile


class Slots(Protocol):
    """For the chunks of one layout. All but `slot` and `drop` may take long, and are for an executor."""

    def slot(self, chunk: int) -> memoryview:
        """Where the content of a chunk belongs until it is settled."""

    def settle(self, chunk: int) -> None:
        """Keeps what the slot holds; for several threads at once. Raises OSError if there is no room."""

    def drop(self, chunk: int) -> None:
        """Nobody will settle this chunk as it is."""

    def tensors(self) -> dict[str, AnyTensor]:
        """Raises CompressionError for what no codec makes, and OSError."""


class MemorySlots:
    """The whole state in one flat memory."""

    def __init__(self, layout: ChunkLayout) -> None:
        """Raises ValueError if there is not enough."""
        self._layout = layout
        try:
            self._memory = fresh_memory(layout.nbytes)
        except (RuntimeError, OSError) as error:
            raise ValueError(f"no memory for a state of {layout.nbytes} bytes") from error
        self._bytes = tensor_memory(self._memory)

    def slot(self, chunk: int) -> memoryview:
        begin, end = self._layout.bounds(chunk)
        return self._bytes[begin:end]

    def settle(self, chunk: int) -> None:
        """It is where it belongs."""

    def drop(self, chunk: int) -> None:
        """There is nothing to give back."""

    def tensors(self) -> dict[str, AnyTensor]:
        return dict(self._layout.tensors(self._memory))


class FileSlots:
    """The state in an unnamed file, as its chunks lie one behind the other."""

    def __init__(self, layout: ChunkLayout, directory: Path) -> None:
        """Raises ValueError if there is no room for it."""
        self._layout, self._directory = layout, directory
        try:
            self._file = UnnamedFile(directory)
            self._file.resize(layout.nbytes)
        except OSError as error:
            raise ValueError(f"no room for a state of {layout.nbytes} bytes: {error}") from error
        self._coming: dict[int, memoryview] = {}

    def slot(self, chunk: int) -> memoryview:
        if chunk not in self._coming:
            begin, end = self._layout.bounds(chunk)
            self._coming[chunk] = memoryview(bytearray(end - begin))
        return self._coming[chunk]

    def settle(self, chunk: int) -> None:
        self._file.write(self._layout.bounds(chunk)[0], self._coming.pop(chunk))

    def drop(self, chunk: int) -> None:
        self._coming.pop(chunk, None)

    def tensors(self) -> dict[str, AnyTensor]:
        """What a codec made is decoded one tensor at a time, into another file."""
        places = zip(self._layout.entries, self._layout.offsets, strict=False)
        decoded: UnnamedFile | None = None
        end, tensors = 0, dict[str, AnyTensor]()
        for entry, offset in places:
            descriptor = entry.header.descriptor()
            if entry.codec == NoCompression.name:
                tensor = FileTensor(descriptor, self._file, offset)
                _check(tensor)
            else:
                decoded = decoded or UnnamedFile(self._directory)
                decoded.resize(end + descriptor.nbytes)
                decoded.write(end, tensor_memory(self._extract(entry, offset)))
                tensor = FileTensor(descriptor, decoded, end)
                end += descriptor.nbytes
            tensors[entry.name] = tensor
        return tensors

    def _extract(self, entry: TensorEntry, offset: int) -> torch.Tensor:
        return extract(TensorMessage(entry.header, (self._file.read(offset, entry.nbytes),)))


class FileTensor(DistantTensor):
    """Lies in a file, which is gone with the last of its tensors."""

    def __init__(self, descriptor: TensorDescriptor, file: UnnamedFile, offset: int) -> None:
        super().__init__(descriptor)
        self._file, self._offset = file, offset

    def read(self, begin: int, end: int) -> memoryview:
        return self._file.read(self._offset + begin, end - begin)


def _check(tensor: FileTensor) -> None:
    """Raises CompressionError for booleans that are none; of other types every byte will do."""
    if tensor.dtype is not torch.bool:
        return
    header = TensorEntry.of("", tensor).header
    for begin, end in pieces(tensor.nbytes):
        part = TensorMessage(type(header)(header.codec, header.dtype, (end - begin,)), (tensor.read(begin, end),))
        extract(part)
