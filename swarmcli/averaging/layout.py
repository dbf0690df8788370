"""How a list of tensors is laid out as one vector, and how that vector is cut into parts.

    tensors    t0 (float32)   t1 (bfloat16)   t2 (float32)
    segments   |---- t0 ----- float32 ---- t2 ----|-- bfloat16: t1 --|  one per type
    parts      |  p0  |  p1  |  p2  |   p3   | p4 |   p5   |   p6    |  of at most part_size_bytes on the wire
    reducers   |----- member 0 -----|---------- member 2 -----------|  in proportion to their shares

Everyone computes the same plan from the tensors' types, the group's shares and the options that must agree; a hash
over all that is compared before data moves.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, groupby

import torch

from swarmcli.compression import CompressionBase, CompressionInfo, TensorDescriptor

_ALIGNMENT = 64  # bytes; each segment begins at a multiple of it


@dataclass(frozen=True, slots=True)
class Segment:
    """All tensors of one dtype, one behind the other."""

    dtype: torch.dtype
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
    """The shapes and types of the tensors that are averaged together."""

    descriptors: tuple[TensorDescriptor, ...]

    @classmethod
    def of(cls, tensors: Sequence[torch.Tensor]) -> Layout:
        """Raises ValueError for tensors that have no mean: everything but real floating point numbers."""
        for index, tensor in enumerate(tensors):
            if not tensor.is_floating_point():
                raise ValueError(f"tensor {index} is of type {tensor.dtype}; only floating point tensors are averaged")
        return cls(tuple(TensorDescriptor.of(tensor) for tensor in tensors))

    @cached_property
    def segments(self) -> tuple[Segment, ...]:
        by_dtype: dict[torch.dtype, list[int]] = {}
        for index, descriptor in enumerate(self.descriptors):
            by_dtype.setdefault(descriptor.dtype, []).append(index)
        segments: list[Segment] = []
        offset = 0
        for dtype, indices in by_dtype.items():
            starts = accumulate((self.descriptors[index].numel for index in indices), initial=0)
            segments.append(Segment(dtype, tuple(indices), tuple(starts), offset))
            offset = -(-segments[-1].end // _ALIGNMENT) * _ALIGNMENT
        return tuple(segments)

    @cached_property
    def schema_hash(self) -> bytes:
        """32 bytes; equal for equal shapes and types in equal order."""
        text = ";".join(f"{descriptor.dtype}{descriptor.shape}" for descriptor in self.descriptors)
        return hashlib.sha256(b"swarm schema" + text.encode()).digest()

    @property
    def numel(self) -> int:
        return sum(segment.numel for segment in self.segments)

    @property
    def nbytes(self) -> int:
        """Of flat memory that holds everything."""
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


@dataclass(frozen=True)
class Plan:
    """Who reduces which part. Parts are numbered along the vector, so each reducer's are consecutive."""

    layout: Layout
    codec: CompressionBase
    parts: tuple[Part, ...]
    fingerprint: bytes  # 32 bytes; members with unlike ones cannot average with each other

    @classmethod
    def make(cls, layout: Layout, shares: Sequence[float], codec: CompressionBase, part_size_bytes: int) -> Plan:
        """`shares`: one per member, not all zero."""
        parts = tuple(_cut(layout, shares, codec, part_size_bytes))
        terms = f"{codec.name};{part_size_bytes};{[float(share).hex() for share in shares]}"
        fingerprint = hashlib.sha256(b"swarm plan" + layout.schema_hash + terms.encode()).digest()
        return cls(layout, codec, parts, fingerprint)

    @cached_property
    def by_reducer(self) -> dict[int, tuple[Part, ...]]:
        """The parts of everyone who has any, in order."""
        return {reducer: tuple(parts) for reducer, parts in groupby(self.parts, key=lambda part: part.reducer)}


def _cut(layout: Layout, shares: Sequence[float], codec: CompressionBase, part_size_bytes: int) -> list[Part]:
    parts: list[Part] = []
    for reducer, begin, end in _ranges(layout.numel, shares):
        passed = 0  # elements in the segments before
        for segment in layout.segments:
            start, stop = max(begin - passed, 0), min(end - passed, segment.numel)
            most = _elements_per_part(segment.dtype, codec, part_size_bytes)
            for position in range(start, stop, most):
                parts.append(Part(len(parts), reducer, segment, position, min(position + most, stop)))
            passed += segment.numel
    return parts


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


def _elements_per_part(dtype: torch.dtype, codec: CompressionBase, part_size_bytes: int) -> int:
    info = CompressionInfo(TensorDescriptor((1,), dtype))
    return max(1, int(part_size_bytes / (dtype.itemsize * codec.estimate_compression_ratio(info))))
