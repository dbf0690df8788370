"""A state as it travels: named tensors in one flat memory, cut into chunks that can be checked one by one.

    memory   | tensor "a" |pad| tensor "b"           |pad| "c" |        each tensor begins at a multiple of 64 bytes
    chunks   |   0   |   1   |   2   |   3   |   4   |   5   |         of equal size, but for the last

The donor never builds that memory: it sends the pieces of its tensors. The downloader does, and reads chunks
straight into it. The manifest tells both the same layout, and the hash of every chunk.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any

import msgspec
import torch

from swarmcli.compression import TensorDescriptor, TensorHeader
from swarmcli.compression.base import dtype_name, tensor_memory
from swarmcli.errors import CompressionError
from swarmcli.network import wire

MAX_VERSION = 64
MAX_TENSORS = 1 << 18
MAX_NAME = 256
MAX_METADATA = 4 << 20  # bytes
MAX_MANIFEST = 16 << 20  # bytes

_ALIGNMENT = 64
_MIN_CHUNK, _USUAL_CHUNK, _MAX_CHUNK = 1 << 16, 1 << 20, 8 << 20  # bytes
_FEW_CHUNKS = 256  # so many at least, where that leaves them above the least size: little is fetched twice
_MAX_CHUNKS = 1 << 15
_HASH = 32


@dataclass(frozen=True)
class Snapshot:
    """A state that does not change any more. The tensors may lie on any device; they are read while others download.

    version   at most 64 bytes that tell states apart, b"" where nobody asks for a certain one
    metadata  whatever msgpack carries, at most MAX_METADATA bytes when encoded
    """

    version: bytes
    metadata: Any
    tensors: Mapping[str, torch.Tensor]


class TensorEntry(msgspec.Struct, frozen=True, array_like=True):
    """One tensor in a manifest."""

    name: Annotated[str, msgspec.Meta(max_length=MAX_NAME)]
    dtype: str
    shape: tuple[int, ...]


class Manifest(msgspec.Struct, frozen=True):
    """What a donor offers. `hashes` are the chunks' SHA-256, one behind the other."""

    version: Annotated[bytes, msgspec.Meta(max_length=MAX_VERSION)]
    metadata: Annotated[bytes, msgspec.Meta(max_length=MAX_METADATA)]
    tensors: Annotated[tuple[TensorEntry, ...], msgspec.Meta(max_length=MAX_TENSORS)]
    chunk_size: Annotated[int, msgspec.Meta(ge=1, le=_MAX_CHUNK)]
    hashes: Annotated[bytes, msgspec.Meta(max_length=_MAX_CHUNKS * _HASH)]


@dataclass(frozen=True)
class StateOutline:
    """What a manifest promises, before memory is allocated for it."""

    version: bytes
    metadata: Any
    descriptors: Mapping[str, TensorDescriptor]
    nbytes: int  # with the gaps between tensors


@dataclass(frozen=True)
class ChunkLayout:
    """Where tensors and chunks lie in flat memory."""

    descriptors: Mapping[str, TensorDescriptor]
    chunk_size: int

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """Where each tensor begins, and where the memory ends."""
        offsets = [0]
        for descriptor in self.descriptors.values():
            offsets.append(-(-(offsets[-1] + descriptor.nbytes) // _ALIGNMENT) * _ALIGNMENT)
        return tuple(offsets)

    @property
    def nbytes(self) -> int:
        return self.offsets[-1]

    @property
    def chunks(self) -> int:
        return -(-self.nbytes // self.chunk_size)

    def bounds(self, chunk: int) -> tuple[int, int]:
        """First byte of a chunk, and the one behind its last."""
        return chunk * self.chunk_size, min((chunk + 1) * self.chunk_size, self.nbytes)

    def tensors(self, memory: torch.Tensor) -> dict[str, torch.Tensor]:
        """Views of flat memory (uint8), by name."""
        views = {}
        for (name, descriptor), offset in zip(self.descriptors.items(), self.offsets, strict=False):
            flat = memory[offset : offset + descriptor.nbytes].view(descriptor.dtype)
            views[name] = flat.view(descriptor.shape)
        return views


class PinnedState:
    """A snapshot ready to be given out: laid out, hashed, and read chunk by chunk without copies."""

    def __init__(self, snapshot: Snapshot) -> None:
        """Hashes everything: two gigabytes a second. Raises ValueError for a state that cannot travel."""
        self.snapshot = snapshot
        descriptors = {name: TensorDescriptor.of(tensor) for name, tensor in snapshot.tensors.items()}
        self._pieces = [tensor_memory(tensor) for tensor in snapshot.tensors.values()]
        self.layout = ChunkLayout(descriptors, _chunk_size(sum(len(piece) for piece in self._pieces)))
        hashes = b"".join(self._hash(chunk) for chunk in range(self.layout.chunks))
        self.manifest = _encode_manifest(snapshot, descriptors, self.layout.chunk_size, hashes)

    def chunk(self, chunk: int) -> list[memoryview]:
        """The pieces of a chunk, in order."""
        begin, end = self.layout.bounds(chunk)
        return list(self._between(begin, end))

    def _hash(self, chunk: int) -> bytes:
        digest = hashlib.sha256()
        for piece in self.chunk(chunk):
            digest.update(piece)
        return digest.digest()

    def _between(self, begin: int, end: int) -> Iterator[memoryview]:
        offsets = self.layout.offsets
        index = bisect_right(offsets, begin) - 1
        while begin < end:
            piece, stop = self._pieces[index], min(end, offsets[index + 1])
            inside = piece[begin - offsets[index] : stop - offsets[index]]
            if inside:
                yield inside
            if (gap := stop - begin - len(inside)) > 0:
                yield memoryview(bytes(gap))
            index, begin = index + 1, stop


def read_manifest(data: bytes | memoryview, max_bytes: int) -> tuple[Manifest, ChunkLayout, StateOutline]:
    """Decodes and checks a manifest of another peer. Raises ValueError; allocates nothing of what it promises."""
    try:
        manifest = wire.decode(Manifest, data)
        metadata = wire.decode(Any, manifest.metadata)
        descriptors = {
            entry.name: TensorHeader("", entry.dtype, entry.shape).descriptor() for entry in manifest.tensors
        }
    except (msgspec.DecodeError, CompressionError) as error:
        raise ValueError(f"unreadable manifest: {error}") from None
    if len(descriptors) != len(manifest.tensors):
        raise ValueError("a manifest that names a tensor twice")
    layout = ChunkLayout(descriptors, manifest.chunk_size)
    if layout.nbytes > max_bytes:
        raise ValueError(f"a state of {layout.nbytes} bytes, at most {max_bytes} are accepted")
    if len(manifest.hashes) != layout.chunks * _HASH:
        raise ValueError(f"a manifest with {len(manifest.hashes)} bytes of hashes for {layout.chunks} chunks")
    return manifest, layout, StateOutline(manifest.version, metadata, descriptors, layout.nbytes)


def chunk_is_intact(manifest: Manifest, chunk: int, content: memoryview) -> bool:
    return hashlib.sha256(content).digest() == manifest.hashes[chunk * _HASH : (chunk + 1) * _HASH]


def _chunk_size(nbytes: int) -> int:
    """The same for equal states everywhere."""
    size = _MIN_CHUNK
    while (size < _USUAL_CHUNK and nbytes > size * _FEW_CHUNKS) or (size < _MAX_CHUNK and nbytes > size * _MAX_CHUNKS):
        size *= 2
    return size


def _encode_manifest(
    snapshot: Snapshot, descriptors: Mapping[str, TensorDescriptor], chunk_size: int, hashes: bytes
) -> bytes:
    metadata = wire.encode(snapshot.metadata)
    entries = tuple(TensorEntry(name, dtype_name(each.dtype), each.shape) for name, each in descriptors.items())
    manifest = wire.encode(Manifest(snapshot.version, metadata, entries, chunk_size, hashes))
    if len(snapshot.version) > MAX_VERSION or len(metadata) > MAX_METADATA or len(manifest) > MAX_MANIFEST:
        raise ValueError(
            f"a state with {len(metadata)} bytes of metadata and {len(entries)} tensors is too large to be described"
        )
    return manifest
