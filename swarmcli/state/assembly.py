"""A state that is being downloaded: which of its chunks have come, which have been asked for, and where they lie.

The manifest names the hashes of all chunks, so a chunk counts if it has its hash, whichever donor gave it, and the
result is the state of that manifest to the last bit.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from swarmcli.compression import NoCompression, TensorDescriptor, TensorMessage, extract
from swarmcli.compression.base import tensor_memory
from swarmcli.memory import fresh_memory, unwritten
from swarmcli.network import PeerID
from swarmcli.state.distant import AnyTensor, DistantTensor, loaded, pieces
from swarmcli.state.snapshot import Snapshot, StateOutline, TensorEntry, digest_of_chunk, state_root
from swarmcli.state.unnamed_file import UnnamedFile

TOUCHED = 512 << 20  # bytes of a state, at most, for which physical memory is taken before its first chunk has come


@dataclass(frozen=True)
class DownloadedState:
    """A whole state.

    contents  its tensors by name. They share one memory: copy those that should outlive the others. If the state was
              put together in a file, they lie there
    donors    the peers that gave something of it
    received  bytes of its chunks that came, those included that had to be fetched again
    exact     every bit as the donor has it; False where tensors travelled with a lossy codec
    root      32 bytes: equal for equal states
    digests   of all chunks
    """

    version: bytes
    metadata: Any
    contents: Mapping[str, AnyTensor]
    donors: tuple[PeerID, ...]
    received: int
    exact: bool
    root: bytes
    digests: tuple[bytes, ...] = field(repr=False)

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """All of it in memory."""
        here = self.contents.items()
        return {name: tensor if isinstance(tensor, torch.Tensor) else loaded(tensor) for name, tensor in here}

    def snapshot(self) -> Snapshot:
        """A snapshot for other newcomers; only of an exact state."""
        return Snapshot(self.version, self.metadata, self.contents, digests=self.digests)


class Assembly:
    """Visits take chunks, fetch them into slots, and note them or put them back. One visit at a time has a chunk.

    The place is memory or, with `spool`, an unnamed file in that directory; then only the chunks that are on their way
    are in memory.
    """

    def __init__(self, manifest: bytes, outline: StateOutline, spool: Path | None = None) -> None:
        """Takes the place for the whole state. Raises OSError if there is no room."""
        self.manifest, self.outline, self._spool = manifest, outline, spool
        layout = self.layout = outline.layout
        self.received = 0  # bytes of chunks
        self.givers: dict[int, PeerID] = {}  # chunk that is here → who gave it
        self._file, self._memory = self._take_place(layout.nbytes)
        self._bytes = tensor_memory(self._memory)
        self._open = deque(range(layout.chunks))  # chunks that no visit has taken

    def _take_place(self, nbytes: int) -> tuple[UnnamedFile | None, torch.Tensor]:
        try:
            if self._spool is None:
                return None, fresh_memory(nbytes, touched=TOUCHED)
            file = UnnamedFile(self._spool)
            file.resize(nbytes)
            return file, torch.empty(0, dtype=torch.uint8)
        except (RuntimeError, OSError) as error:
            raise OSError(f"no room for a state of {nbytes} bytes: {error}") from error

    @property
    def in_file(self) -> bool:
        return self._file is not None

    @property
    def complete(self) -> bool:
        return len(self.givers) == self.layout.chunks

    @property
    def donors(self) -> tuple[PeerID, ...]:
        """The peers that gave what is here."""
        return tuple(dict.fromkeys(self.givers.values()))

    def slot(self, chunk: int) -> memoryview:
        """Memory into which a visit writes a chunk: its place in the state, or with a file memory of its own."""
        begin, end = self.layout.bounds(chunk)
        return unwritten(end - begin) if self._file is not None else self._bytes[begin:end]

    def take(self, most: int) -> range:
        """Takes up to `most` consecutive chunks that no donor has been asked for; an empty range: there are none."""
        if not self._open:
            return range(0)
        first = last = self._open.popleft()
        while self._open and self._open[0] == last + 1 and last - first + 1 < most:
            last = self._open.popleft()
        return range(first, last + 1)

    def put_back(self, taken: Iterable[int]) -> None:
        """Others may take these chunks: the donor that was asked for them will not give them, and nothing more is
        written to their slots."""
        self._open = deque(sorted([*self._open, *taken]))

    def is_true(self, chunk: int, content: memoryview) -> bool:
        """Whether the content of a slot is the chunk, by its hash; if it is, it is kept. For an executor; several
        threads may call it at once.

        Raises OSError if there is no room.
        """
        if digest_of_chunk(content) != self.outline.digests[chunk]:
            return False
        if self._file is not None:
            self._file.write(self.layout.bounds(chunk)[0], content)
        return True

    def note(self, chunk: int, giver: PeerID) -> None:
        """The chunk is in its place."""
        self.givers[chunk] = giver

    def finish(self) -> DownloadedState:
        """The complete state, once no visit is left. For an executor. Raises CompressionError for bytes that no codec
        makes, and OSError."""
        outline = self.outline
        return DownloadedState(
            outline.version,
            outline.metadata,
            dict(self.layout.tensors(self._memory)) if self._file is None else self._tensors_of(self._file),
            self.donors,
            self.received,
            outline.exact,
            state_root(self.manifest),
            outline.digests,
        )

    def _tensors_of(self, file: UnnamedFile) -> dict[str, AnyTensor]:
        """The tensors in a file; encoded ones are decoded one at a time, into another file."""
        assert self._spool is not None
        tensors: dict[str, AnyTensor] = {}
        decoded, end = UnnamedFile(self._spool), 0
        for entry, offset in zip(self.layout.entries, self.layout.offsets, strict=False):
            descriptor = entry.header.descriptor()
            if entry.codec == NoCompression.name:
                tensor = FileTensor(descriptor, file, offset)
                _check_booleans(tensor)
            else:
                content = extract(TensorMessage(entry.header, (file.read(offset, entry.nbytes),)))
                decoded.resize(end + descriptor.nbytes)
                decoded.write(end, tensor_memory(content))
                tensor = FileTensor(descriptor, decoded, end)
                end += descriptor.nbytes
            tensors[entry.name] = tensor
        return tensors


class FileTensor(DistantTensor):
    """A tensor in a file that is gone with the last of its tensors."""

    def __init__(self, descriptor: TensorDescriptor, file: UnnamedFile, offset: int) -> None:
        super().__init__(descriptor)
        self._file, self._offset = file, offset

    def read(self, begin: int, end: int) -> memoryview:
        return self._file.read(self._offset + begin, end - begin)


def _check_booleans(tensor: FileTensor) -> None:
    """Raises CompressionError for booleans with bytes other than 0 and 1; other types may have any bytes."""
    if tensor.dtype is torch.bool:
        header = TensorEntry.of("", tensor).header
        for begin, end in pieces(tensor.nbytes):
            extract(TensorMessage(type(header)(header.codec, header.dtype, (end - begin,)), (tensor.read(begin, end),)))
