"""How a list of tensors is laid out as one vector, and how that vector is cut into parts.

    tensors    t0 (float32)   t1 (bfloat16)   t2 (float32)
    segments   |---- t0 ----- float32 ---- t2 ----|-- bfloat16: t1 --|  one per type and codec
    parts      |  p0  |  p1  |  p2  |   p3   | p4 |   p5   |   p6    |  of at most part_size_bytes on the wire
    reducers   |----- member 0 -----|---------- member 2 -----------|  in proportion to their shares

If the error of a codec depends on the content of its message, parts end where tensors end: the numbers of a small layer
do not lose their digits to a large neighbour. If a codec encodes chunks of a tensor together, parts end between chunks.
Averages may travel with another codec than senders' parts; a part is small enough for both.

All members compute the same plan from the tensors' types and codecs, the group's shares and the options that must
agree; they compare a hash over it before data moves.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise

import torch

from swarmcli.compression import CompressionBase, CompressionInfo, NoCompression, TensorDescriptor

_ALIGNMENT = 64  # bytes; each segment begins at a multiple of it
# A reducer sends its last average after the last part has come: with n parts a round on a slow line takes longer by
# 1/n. So parts are larger than _SMALL bytes only if a reducer still has _ENOUGH of them.
_SMALL, _ENOUGH = 512 << 10, 16


@dataclass(frozen=True, slots=True)
class Segment:
    """All tensors of one dtype that travel with one codec, concatenated."""

    index: int
    dtype: torch.dtype
    codec: CompressionBase  # of what members send; averages travel with its `of_averages`
    tensors: tuple[int, ...]  # their indices
    starts: tuple[int, ...]  # where each tensor begins, in elements of this segment, and where the last one ends
    offset: int  # of the segment in flat memory, in bytes

    @property
    def numel(self) -> int:
        return self.starts[-1]

    @property
    def end(self) -> int:
        return self.offset + self.numel * self.dtype.itemsize


@dataclass(frozen=True)
class Layout:
    """The shapes and types of the tensors that are averaged together, and the codec that each travels with."""

    descriptors: tuple[TensorDescriptor, ...]
    codecs: tuple[CompressionBase, ...]

    @classmethod
    def of(
        cls,
        tensors: Sequence[torch.Tensor],
        compression: CompressionBase | None = None,
        infos: Sequence[CompressionInfo] | None = None,
    ) -> Layout:
        """`infos`: key and role of each tensor, by which `compression` may choose its codec; None: indices and no
        roles.

        Raises ValueError for tensors that have no mean (everything but real floating point numbers), for infos of
        other tensors, and for a tensor that `compression` has no codec for.
        """
        for index, tensor in enumerate(tensors):
            if not tensor.is_floating_point():
                raise ValueError(f"tensor {index} is of type {tensor.dtype}; only floating point tensors are averaged")
        descriptors = tuple(TensorDescriptor.of(tensor) for tensor in tensors)
        if infos is None:
            infos = [CompressionInfo(descriptor, index) for index, descriptor in enumerate(descriptors)]
        if tuple(info.descriptor for info in infos) != descriptors:
            raise ValueError("tensor_infos: expected one for each averaged tensor, with its shape and type")
        codec = NoCompression() if compression is None else compression
        return cls(descriptors, tuple(codec.codec_for(info) for info in infos))

    @cached_property
    def segments(self) -> tuple[Segment, ...]:
        alike: dict[tuple[torch.dtype, str], list[int]] = {}
        for index, (descriptor, codec) in enumerate(zip(self.descriptors, self.codecs, strict=True)):
            alike.setdefault((descriptor.dtype, codec.description), []).append(index)
        segments: list[Segment] = []
        offset = 0
        for (dtype, _), indices in alike.items():
            starts = accumulate((self.descriptors[index].numel for index in indices), initial=0)
            codec = self.codecs[indices[0]]
            segments.append(Segment(len(segments), dtype, codec, tuple(indices), tuple(starts), offset))
            offset = -(-segments[-1].end // _ALIGNMENT) * _ALIGNMENT
        return tuple(segments)

    @cached_property
    def schema_hash(self) -> bytes:
        """32 bytes; equal for equal shapes and types in equal order."""
        text = ";".join(f"{descriptor.dtype}{descriptor.shape}" for descriptor in self.descriptors)
        return hashlib.sha256(b"swarm schema" + text.encode()).digest()

    @cached_property
    def codecs_hash(self) -> bytes:
        """32 bytes; equal if all tensors travel with equal codecs."""
        text = ";".join(map(_both_ways, self.codecs))
        return hashlib.sha256(b"swarm codecs" + text.encode()).digest()

    @property
    def numel(self) -> int:
        return sum(segment.numel for segment in self.segments)

    @property
    def wire_bytes(self) -> int:
        """Most bytes of all tensors on the wire, in the direction that takes more."""
        return sum(_larger_bound(codec, each) for each, codec in zip(self.descriptors, self.codecs, strict=True))

    def back(self, senders: int) -> float:
        """Most bytes of averages for each byte that one of `senders` senders brings."""
        brought, averages = self._both_directions(senders)
        return averages / max(1, brought)

    def round_bytes(self, senders: int) -> int:
        """Bytes that a member without reducing work sends or receives in a round of `senders` senders: the larger."""
        return max(self._both_directions(senders))

    def _both_directions(self, senders: int) -> tuple[int, int]:
        pairs = list(zip(self.descriptors, self.codecs, strict=True))
        brought = sum(codec.payload_bound(each) for each, codec in pairs)
        return brought, sum(codec.average_bound(each, senders) for each, codec in pairs)

    @property
    def nbytes(self) -> int:
        """Bytes of flat memory that holds all tensors."""
        return self.segments[-1].end if self.segments else 0


@dataclass(frozen=True, slots=True)
class Part:
    """Elements `start` to `stop - 1` of a segment, reduced by the member with index `reducer`."""

    index: int
    reducer: int
    segment: Segment
    start: int
    stop: int

    @property
    def descriptor(self) -> TensorDescriptor:
        return TensorDescriptor((self.stop - self.start,), self.segment.dtype)

    @property
    def codec(self) -> CompressionBase:
        return self.segment.codec

    @property
    def average_codec(self) -> CompressionBase:
        return self.segment.codec.of_averages

    @property
    def payload_bound(self) -> int:
        """Most bytes of payload in a message with a member's values of this part."""
        return self.codec.payload_bound(self.descriptor)

    @property
    def average_bound(self) -> int:
        """Most bytes of payload in a message with the average of this part."""
        return self.average_codec.payload_bound(self.descriptor)


@dataclass(frozen=True)
class Plan:
    """The parts and their reducers. Parts are numbered along the vector, so each reducer's are consecutive."""

    layout: Layout
    parts: tuple[Part, ...]
    fingerprint: bytes  # 32 bytes; members with different ones cannot average with each other

    @classmethod
    def make(cls, layout: Layout, shares: Sequence[float], part_size_bytes: int) -> Plan:
        """`shares`: one per member, not all zero. `part_size_bytes`: most bytes of a part on the wire."""
        parts = tuple(_cut(layout, shares, _part_size(layout, shares, part_size_bytes)))
        terms = f"{part_size_bytes};{[float(share).hex() for share in shares]}"
        fingerprint = hashlib.sha256(b"swarm plan" + layout.schema_hash + layout.codecs_hash + terms.encode()).digest()
        return cls(layout, parts, fingerprint)

    def part(self, index: int) -> Part | None:
        """The part with this index; None: there is no such part."""
        return self.parts[index] if 0 <= index < len(self.parts) else None

    @cached_property
    def by_reducer(self) -> dict[int, tuple[Part, ...]]:
        """Reducer → its parts, in order."""
        parts: dict[int, list[Part]] = {}
        for part in self.parts:
            parts.setdefault(part.reducer, []).append(part)
        return {reducer: tuple(of_one) for reducer, of_one in parts.items()}


def compression_term(compression: CompressionBase, layout: Layout) -> str:
    """The codec with its parameters, in at most 200 characters: peers compare it before they form a group.

    If tensors travel with several codecs, a hash over all of them follows.
    """
    description = compression.description
    if {codec.description for codec in layout.codecs} <= {description} and len(description) <= 200:
        return description
    return f"{description[:180]} {layout.codecs_hash.hex()[:16]}"


def _part_size(layout: Layout, shares: Sequence[float], most: int) -> int:
    """Most bytes of a part on the wire. Larger parts mean fewer messages, and each message has its own cost."""
    even = layout.wire_bytes / sum(share > 0 for share in shares)
    while most > _SMALL and even < _ENOUGH * most:
        most = max(_SMALL, most // 2)
    return most


def _cut(layout: Layout, shares: Sequence[float], part_size_bytes: int) -> list[Part]:
    most = [_elements_per_part(segment, part_size_bytes) for segment in layout.segments]
    parts: list[Part] = []
    for reducer, begin, end in _ranges(layout.numel, shares):
        passed = 0  # elements in the segments before
        for segment in layout.segments:
            start, stop = (_between_chunks(segment, position - passed) for position in (begin, end))
            for first, last in _stretches(segment, start, stop):
                for position in range(first, last, most[segment.index]):
                    end_of_part = min(position + most[segment.index], last)
                    parts.append(Part(len(parts), reducer, segment, position, end_of_part))
            passed += segment.numel
    return parts


def _stretches(segment: Segment, start: int, stop: int) -> Iterator[tuple[int, int]]:
    """Divides elements `start` to `stop - 1` into the stretches (first, last + 1) beyond which no part may go."""
    if start >= stop:
        return
    between: tuple[int, ...] = ()
    if segment.codec.by_content:
        between = segment.starts[bisect_right(segment.starts, start) : bisect_left(segment.starts, stop)]
    yield from ((first, last) for first, last in pairwise((start, *between, stop)) if first < last)


def _between_chunks(segment: Segment, position: int) -> int:
    """The last place up to `position` where the segment may be cut."""
    if not 0 < position < segment.numel:
        return min(max(position, 0), segment.numel)
    start = segment.starts[bisect_right(segment.starts, position) - 1]
    return position - (position - start) % segment.codec.chunk


def _ranges(numel: int, shares: Sequence[float]) -> list[tuple[int, int, int]]:
    """(reducer, begin, end) over the whole vector, in proportion to the shares."""
    total, passed, begin, ranges = sum(shares), 0.0, 0, []
    last = max(index for index, share in enumerate(shares) if share > 0)
    for index, share in enumerate(shares):
        passed += share
        end = numel if index == last else min(numel, round(numel * (passed / total)))
        if end > begin:
            ranges.append((index, begin, end))
            begin = end
    return ranges


def _elements_per_part(segment: Segment, part_size_bytes: int) -> int:
    """Most elements of a payload of `part_size_bytes`, in whole chunks, and at least one chunk."""
    fits, too_many = 1, 2 * part_size_bytes + 1  # no average takes less than half a byte for each
    while too_many - fits > 1:
        middle = (fits + too_many) // 2
        if _larger_bound(segment.codec, TensorDescriptor((middle,), segment.dtype)) <= part_size_bytes:
            fits = middle
        else:
            too_many = middle
    return max(fits - fits % segment.codec.chunk, segment.codec.chunk)


def _larger_bound(codec: CompressionBase, descriptor: TensorDescriptor) -> int:
    return max(codec.payload_bound(descriptor), codec.of_averages.payload_bound(descriptor))


def _both_ways(codec: CompressionBase) -> str:
    averages = codec.of_averages
    return codec.description if averages is codec else f"{codec.description} {averages.description}"
