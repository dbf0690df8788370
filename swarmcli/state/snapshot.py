"""A state as it travels: named tensors in one flat memory, cut into chunks that can be checked one by one.

    memory   | tensor "a" |pad| tensor "b"           |pad| "c" |        each tensor begins at a multiple of 64 bytes
    chunks   |   0   |   1   |   2   |   3   |   4   |   5   |         of equal size, but for the last

Only the downloader builds that memory; the donor hashes the pieces of its tensors once, and sends them. The manifest
gives both the same layout and the hashes of all chunks, so its own hash, the *root*, stands for the whole state: two
states are equal if their roots are. If a codec changes the tensors, the memory holds what the codec made of them.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property
from typing import Annotated, Any

import msgspec
import torch
from blake3 import blake3

from swarmcli.compression import (
    CompressionBase,
    CompressionInfo,
    NoCompression,
    TensorDescriptor,
    TensorHeader,
    TensorMessage,
    TensorRole,
    codec_named,
    extract,
)
from swarmcli.compression.base import dtype_name, tensor_memory
from swarmcli.errors import CompressionError
from swarmcli.memory import fresh_memory
from swarmcli.network import wire
from swarmcli.state.distant import AnyTensor, DistantTensor

MAX_VERSION = 64
MAX_TENSORS = 1 << 18
MAX_NAME = 256
MAX_METADATA = 4 << 20  # bytes
MAX_MANIFEST = 16 << 20  # bytes
DIGEST_BYTES = 32  # BLAKE3

_ALIGNMENT = 64
_MIN_CHUNK, _USUAL_CHUNK, _MAX_CHUNK = 1 << 16, 1 << 20, 8 << 20  # bytes
_FEW_CHUNKS = 256  # of a state, above which they grow to the usual size: small ones cost little if fetched twice
_MAX_CHUNKS = 1 << 15
_HASHERS = 2  # threads: the newcomer waits for the manifest
_HASHED_ALONE = 8 << 20  # bytes, up to which one thread is done before others would have begun


@dataclass(frozen=True)
class Snapshot:
    """A state that does not change any more. The tensors may lie on any device, or elsewhere (DistantTensor); they are
    read while others download.

    version   at most 64 bytes that tell states apart; b"" if nobody asks for a certain one
    metadata  whatever msgpack carries, at most MAX_METADATA bytes when encoded
    codec     how the tensors travel; with a lossy one the copy is not bit-identical. Distant tensors travel as they
              are: a codec would need all of one at once, and they are read in pieces
    roles     by name, what the tensors are, for codecs that care
    digests   the hashes of all chunks, if they are known already
    """

    version: bytes
    metadata: Any
    tensors: Mapping[str, AnyTensor]
    codec: CompressionBase = NoCompression()  # noqa: RUF009  # codecs have no state
    roles: Mapping[str, TensorRole] = field(default_factory=dict)
    digests: Sequence[bytes] = ()

    def encode(self, name: str) -> tuple[TensorEntry, memoryview | DistantTensor]:
        """One tensor as it travels: unchanged if it holds NaN or infinity (as masks do) and the codec refuses them."""
        tensor, role = self.tensors[name], self.roles.get(name, TensorRole.UNSPECIFIED)
        if isinstance(tensor, DistantTensor):
            return TensorEntry.of(name, tensor), tensor
        key = int(name) if name.isdecimal() else name
        try:
            message = self.codec.compress(tensor, CompressionInfo.of(tensor, key, role))
        except CompressionError:
            message = NoCompression().compress(tensor)
        header, pieces = message.header, [memoryview(piece).cast("B") for piece in message.payload]
        content = pieces[0] if len(pieces) == 1 else memoryview(b"".join(pieces))  # a codec's several parts are small
        return TensorEntry(name, header.codec, header.dtype, header.shape, len(content)), content


class TensorEntry(msgspec.Struct, frozen=True, array_like=True):
    """One tensor in a manifest; `nbytes` is its size as the codec made it."""

    name: Annotated[str, msgspec.Meta(max_length=MAX_NAME)]
    codec: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: Annotated[int, msgspec.Meta(ge=0)]

    @classmethod
    def of(cls, name: str, tensor: AnyTensor) -> TensorEntry:
        """The entry of a tensor that travels as it is."""
        return cls(name, NoCompression.name, dtype_name(tensor.dtype), tuple(tensor.shape), tensor.nbytes)

    @property
    def header(self) -> TensorHeader:
        return TensorHeader(self.codec, self.dtype, self.shape)


class Manifest(msgspec.Struct, frozen=True):
    """The description of a state, which a donor sends before the first chunk."""

    version: Annotated[bytes, msgspec.Meta(max_length=MAX_VERSION)]
    metadata: Annotated[bytes, msgspec.Meta(max_length=MAX_METADATA)]
    tensors: Annotated[tuple[TensorEntry, ...], msgspec.Meta(max_length=MAX_TENSORS)]
    chunk_size: Annotated[int, msgspec.Meta(ge=1, le=_MAX_CHUNK)]
    digests: Annotated[bytes, msgspec.Meta(max_length=MAX_MANIFEST)]  # DIGEST_BYTES for each chunk


@dataclass(frozen=True)
class ChunkLayout:
    """Where tensors and chunks lie in flat memory."""

    entries: tuple[TensorEntry, ...]
    chunk_size: int

    @classmethod
    def of(cls, tensors: Mapping[str, torch.Tensor]) -> ChunkLayout:
        """The layout of tensors as they are."""
        entries = tuple(TensorEntry.of(name, each) for name, each in tensors.items())
        return cls(entries, _chunk_size(sum(entry.nbytes for entry in entries)))

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """Where each tensor begins, and where the memory ends."""
        offsets = [0]
        for entry in self.entries:
            offsets.append(-(-(offsets[-1] + entry.nbytes) // _ALIGNMENT) * _ALIGNMENT)
        return tuple(offsets)

    @property
    def nbytes(self) -> int:
        return self.offsets[-1]

    @property
    def chunks(self) -> int:
        return -(-self.nbytes // self.chunk_size)

    def bounds(self, chunk: int) -> tuple[int, int]:
        """First byte of a chunk, and the one after its last."""
        return chunk * self.chunk_size, min((chunk + 1) * self.chunk_size, self.nbytes)

    def tensors(self, memory: torch.Tensor) -> dict[str, torch.Tensor]:
        """The tensors in flat memory (uint8), by name: views of it unless they have to be decoded.

        Raises CompressionError for bytes that no codec makes.
        """
        return {
            entry.name: extract(TensorMessage(entry.header, (tensor_memory(memory[offset : offset + entry.nbytes]),)))
            for entry, offset in zip(self.entries, self.offsets, strict=False)
        }


@dataclass(frozen=True)
class StateOutline:
    """The contents of a manifest, before memory is allocated for them."""

    version: bytes
    metadata: Any
    descriptors: Mapping[str, TensorDescriptor]
    layout: ChunkLayout
    digests: tuple[bytes, ...]  # of all chunks
    exact: bool  # every bit as the donor has it; False with a lossy codec


class PinnedState:
    """A snapshot ready to be sent: laid out, hashed, and read chunk by chunk without copies."""

    def __init__(self, snapshot: Snapshot) -> None:
        """Encodes the tensors, if the codec changes them, and hashes all chunks (gigabytes per second) unless the
        snapshot has their hashes. To be called beside the loop.

        Raises ValueError for a state that is too large to be described, and what DistantTensor.read raises.
        """
        self.snapshot = snapshot
        encoded = [snapshot.encode(name) for name in snapshot.tensors]
        self._contents = [content for _, content in encoded]
        entries = tuple(entry for entry, _ in encoded)
        self.layout = ChunkLayout(entries, _chunk_size(sum(entry.nbytes for entry in entries)))
        self.digests = tuple(snapshot.digests) or self._hash()
        self.manifest = _encode_manifest(snapshot, self.layout, self.digests)

    @property
    def root(self) -> bytes:
        return state_root(self.manifest)

    def is_distant(self, chunk: int) -> bool:
        """Whether something of a chunk lies elsewhere, so that reading it blocks (DistantTensor.read)."""
        begin, end = self.layout.bounds(chunk)
        first, last = self._tensor_at(begin), bisect_left(self.layout.offsets, end)
        return any(isinstance(content, DistantTensor) for content in self._contents[first:last])

    def chunk(self, chunk: int) -> list[memoryview]:
        """The pieces of a chunk, in order. Thread-safe. May block, see `is_distant`."""
        begin, end = self.layout.bounds(chunk)
        offsets, index = self.layout.offsets, self._tensor_at(begin)
        pieces = []
        while begin < end:
            content, stop = self._contents[index], min(end, offsets[index + 1])
            first, last = begin - offsets[index], min(stop - offsets[index], content.nbytes)
            if first < last:
                pieces.append(content[first:last] if isinstance(content, memoryview) else content.read(first, last))
            if (gap := stop - max(begin, offsets[index] + content.nbytes)) > 0:
                pieces.append(memoryview(bytes(gap)))
            index, begin = index + 1, stop
        return pieces

    def _hash(self) -> tuple[bytes, ...]:
        def digest(chunk: int) -> bytes:
            return digest_of_chunk(*self.chunk(chunk))

        chunks = range(self.layout.chunks)
        distant = any(isinstance(content, DistantTensor) for content in self._contents)
        if distant or self.layout.nbytes <= _HASHED_ALONE:
            return tuple(map(digest, chunks))
        with ThreadPoolExecutor(_HASHERS) as threads:
            return tuple(threads.map(digest, chunks))

    def _tensor_at(self, place: int) -> int:
        return bisect_right(self.layout.offsets, place) - 1


def read_manifest(data: bytes | memoryview, max_bytes: int) -> StateOutline:
    """Decodes and checks a manifest of another peer. Raises ValueError. Allocates no memory for the state."""
    try:
        manifest = wire.decode(Manifest, data)
        metadata = wire.decode(Any, manifest.metadata)
        descriptors = {entry.name: _descriptor(entry) for entry in manifest.tensors}
    except (msgspec.DecodeError, CompressionError) as error:
        raise ValueError(f"unreadable manifest: {error}") from None
    if len(descriptors) != len(manifest.tensors):
        raise ValueError("a manifest that names a tensor twice")
    layout = ChunkLayout(manifest.tensors, manifest.chunk_size)
    nbytes = max(layout.nbytes, sum(descriptor.nbytes for descriptor in descriptors.values()))
    if nbytes > max_bytes:
        raise ValueError(f"a state of {nbytes} bytes, at most {max_bytes} are accepted")
    if layout.chunks > _MAX_CHUNKS and layout.chunk_size < _MAX_CHUNK:
        raise ValueError(f"a state in {layout.chunks} chunks, at most {_MAX_CHUNKS} are accepted")
    digests = tuple(manifest.digests[i : i + DIGEST_BYTES] for i in range(0, len(manifest.digests), DIGEST_BYTES))
    if len(manifest.digests) != layout.chunks * DIGEST_BYTES:
        raise ValueError(f"a state in {layout.chunks} chunks, with hashes of {len(digests)}")
    exact = all(entry.codec == NoCompression.name for entry in manifest.tensors)
    return StateOutline(manifest.version, metadata, descriptors, layout, digests, exact)


@torch.no_grad()
def copied(tensors: Mapping[str, torch.Tensor], memory: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
    """Copies of tensors in host memory, for a snapshot. `memory`: where to put them, `ChunkLayout.nbytes` of uint8 with
    any content; None: fresh memory."""
    layout = ChunkLayout.of(tensors)
    if memory is None:
        memory = fresh_memory(layout.nbytes)
    for entry, offset in zip(layout.entries, layout.offsets, strict=False):
        if entry.dtype == "bool":  # `layout.tensors` refuses booleans with bytes other than 0 and 1
            memory[offset : offset + entry.nbytes] = 0
    copies = layout.tensors(memory)
    for name, tensor in tensors.items():
        copies[name].copy_(tensor)
    return copies


def copies_of(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """The same for tensors without names, in the same order."""
    return list(copied({str(index): tensor for index, tensor in enumerate(tensors)}).values())


def digest_of_chunk(*pieces: memoryview) -> bytes:
    """BLAKE3, 32 bytes: with SHA-256 a download spends more time on hashing than on encryption."""
    digest = blake3()
    for piece in pieces:
        digest.update(piece)
    return digest.digest()


def state_root(manifest: bytes) -> bytes:
    """32 bytes: equal for equal states."""
    return digest_of_chunk(memoryview(manifest))


def _descriptor(entry: TensorEntry) -> TensorDescriptor:
    """The descriptor of a tensor. Raises CompressionError if the tensor does not fit its size."""
    descriptor = entry.header.descriptor()
    if entry.nbytes != codec_named(entry.codec).payload_bound(descriptor):
        raise CompressionError(f"tensor {entry.name[:40]!r} in {entry.nbytes} bytes")
    return descriptor


def _chunk_size(nbytes: int) -> int:
    """Bytes in a chunk of a state of `nbytes`: depends on nothing else, so equal states have equal chunks."""
    size = _MIN_CHUNK
    while (size < _USUAL_CHUNK and nbytes > size * _FEW_CHUNKS) or (size < _MAX_CHUNK and nbytes > size * _MAX_CHUNKS):
        size *= 2
    return size


def _encode_manifest(snapshot: Snapshot, layout: ChunkLayout, digests: Sequence[bytes]) -> bytes:
    metadata = wire.encode(snapshot.metadata)
    described = Manifest(snapshot.version, metadata, layout.entries, layout.chunk_size, b"".join(digests))
    manifest = wire.encode(described)
    if len(snapshot.version) > MAX_VERSION or len(metadata) > MAX_METADATA or len(manifest) > MAX_MANIFEST:
        raise ValueError(
            f"a state with {len(metadata)} bytes of metadata and {len(layout.entries)} tensors "
            "is too large to be described"
        )
    return manifest
