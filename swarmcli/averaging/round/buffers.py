"""The memory of a round at one member: the tensors that it brings, and the averages that it holds beside them."""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch

from swarmcli.averaging.audit.signed import averages_root
from swarmcli.averaging.certificate import DIGEST_BYTES
from swarmcli.averaging.config import MIN_WEIGHT
from swarmcli.averaging.round.plan import Layout, Part, Plan
from swarmcli.averaging.round.signed import SignedLists
from swarmcli.compression import CompressionBase, NoCompression, TensorMessage


class Inputs:
    """A member's own tensors as one vector, their weight, and the samples behind them (None: equal to the weight).

    The tensors are read in place, and copied only if they are not contiguous host memory.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], weight: float = 1.0, samples: float | None = None) -> None:
        self.weight, self.samples = weight, samples
        self.note = ""  # why the weight is zero, if that needs an explanation
        self._flat = [tensor.detach().cpu().contiguous().reshape(-1) for tensor in tensors]

    def each(self) -> Iterator[torch.Tensor]:
        """The vector in flat pieces: each tensor that is not empty."""
        return (flat for flat in self._flat if flat.numel())

    def part(self, part: Part) -> torch.Tensor:
        """A flat tensor: a view if the part lies within one tensor, otherwise a copy."""
        starts, tensors = part.segment.starts, part.segment.tensors
        pieces = []
        place, position = bisect_right(starts, part.start) - 1, part.start
        while position < part.stop:
            end = min(part.stop, starts[place + 1])
            if end > position:
                pieces.append(self._flat[tensors[place]][position - starts[place] : end - starts[place]])
            place, position = place + 1, end
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)


class Results:
    """Memory for all averages, beside the inputs."""

    def __init__(self, layout: Layout, memory: torch.Tensor) -> None:
        """`memory`: (layout.nbytes,) of uint8, with any content."""
        self._layout = layout
        # A piece of no bytes may have strides that cannot be viewed as another type.
        self._segments = [
            memory[each.offset : each.end].view(each.dtype) if each.numel else torch.zeros(0, dtype=each.dtype)
            for each in layout.segments
        ]

    def part(self, part: Part) -> torch.Tensor:
        """The flat tensor that a part occupies."""
        return self._segments[part.segment.index][part.start : part.stop]

    def tensors(self) -> list[torch.Tensor]:
        """Views of the memory, in the order and shapes of the inputs."""
        views: dict[int, torch.Tensor] = {}
        for segment in self._layout.segments:
            flat = self._segments[segment.index]
            for index, (start, stop) in zip(segment.tensors, pairwise(segment.starts), strict=True):
                views[index] = flat[start:stop].view(self._layout.descriptors[index].shape)
        return [views[index] for index in range(len(views))]

    def release(self) -> None:
        """Lets go of the memory; nothing is read or written here any more."""
        self._segments.clear()


@dataclass(frozen=True, slots=True)
class Average:
    """The outcome of one part.

    senders, weights   indices of the members whose part arrived whole, and their weights; if one of them has named
                       samples, the samples of each follow after all weights: so the digest covers both
    message            the encoded average, at its reducer; None if the weights of all senders are zero
    digest             32 bytes over senders, weights and the average after decoding
    inputs             in audited runs: 32 bytes over its inputs, as its reducer says
    """

    part: Part
    senders: tuple[int, ...]
    weights: tuple[float, ...]
    message: TensorMessage | None
    digest: bytes
    inputs: bytes = b""

    @property
    def numel(self) -> int:
        return self.part.stop - self.part.start


@dataclass(frozen=True, slots=True)
class Counted:
    """What counts of one member in a round's average: its weight and samples, times `share`.

    share   of all elements those in parts that hold the member's tensors, 0 to 1
    """

    weight: float
    samples: float
    share: float


def contributions_to(averages: Sequence[Average]) -> dict[int, Counted]:
    """What counts of each member, by index, in the average of all these parts.

    Reducers may cap a weight differently, if a member died before all of them had heard its own; and one may lie. So
    the lower median over the parts counts.
    """
    named, everything = defaultdict[int, list[tuple[float, float, int]]](list), sum(each.numel for each in averages)
    for average in averages:
        samples = average.weights[len(average.senders) :] or average.weights
        for sender, weight, count in zip(average.senders, average.weights, samples, strict=False):
            named[sender].append((weight, count, average.numel))
    found = dict[int, Counted]()
    for sender, parts in sorted(named.items()):
        weights, counts, elements = zip(*parts, strict=True)
        share = sum(elements) / everything
        weight, count = (sorted(each)[(len(each) - 1) // 2] * share for each in (weights, counts))
        found[sender] = Counted(max(weight, MIN_WEIGHT), max(count, MIN_WEIGHT), share)
    return found


class Holdings:
    """The averages of a round's result that one member holds.

    An auxiliary has no memory for them, and holds only those that it reduced.
    """

    def __init__(self, plan: Plan, results: Results | None) -> None:
        """`results`: the memory of the averages; None: an auxiliary."""
        self.plan, self.results = plan, results
        self.signed: SignedLists | None = None  # the reducers' signatures
        self._averages: dict[int, Average] = {}

    def put(self, averages: Iterable[Average]) -> None:
        """Adds averages; each replaces an earlier one of its part."""
        for average in averages:
            self._averages[average.part.index] = average

    def drop(self, parts: Iterable[int]) -> None:
        """Forgets the averages of these parts, whose memory is about to be written."""
        for index in parts:
            self._averages.pop(index, None)

    def get(self, part: Part) -> Average | None:
        return self._averages.get(part.index)

    @property
    def averages(self) -> Sequence[Average]:
        """The averages in the order of the parts."""
        return [self._averages[index] for index in sorted(self._averages)]

    def unlike(self, digests: bytes) -> list[Part]:
        """The parts whose average is missing here, or has another digest than `digests` (32 bytes each) names."""
        own = self.tables[0]
        return [part for part in self.plan.parts if digest_at(own, part) != digest_at(digests, part)]

    @property
    def digest(self) -> bytes | None:
        """The digest of the whole result. None if parts are missing here, or if only some parts have senders."""
        if len(self._averages) < len(self.plan.parts):
            return None
        if len({bool(average.senders) for average in self._averages.values()}) > 1:
            return None
        return result_digest(b"".join(average.digest for average in self.averages))

    @property
    def tables(self) -> tuple[bytes, bytes]:
        """The digests of all parts, zeros for those that are not here, and in audited runs the hashes of the inputs of
        those that are."""
        held = (self._averages.get(part.index) for part in self.plan.parts)
        digests = b"".join(bytes(DIGEST_BYTES) if each is None else each.digest for each in held)
        return digests, b"".join(each.inputs for each in self.averages)


def plain(codec: CompressionBase, message: TensorMessage, values: torch.Tensor | None) -> TensorMessage:
    """The same average without its codec. `values`: the decoded average, if somebody has it."""
    if isinstance(codec, NoCompression):
        return message
    return NoCompression().compress(codec.extract(message) if values is None else values)


def root_of(averages: Sequence[Average]) -> bytes:
    """The root of a reducer's averages, which it signs."""
    return averages_root(b"".join(each.digest for each in averages), b"".join(each.inputs for each in averages))


def root_of_tables(parts: Sequence[Part], digests: bytes, inputs: bytes) -> bytes:
    """The same for these parts, from the `tables` of all parts, see `Holdings`."""
    return averages_root(*(b"".join(digest_at(table, part) for part in parts) for table in (digests, inputs)))


def result_digest(digests: bytes) -> bytes:
    """SHA-256 over the concatenated digests of all parts, in their order."""
    return hashlib.sha256(b"swarm result" + digests).digest()


def digest_at(table: bytes, part: Part) -> bytes:
    """One part's entry in a table; shorter, or empty, if the table is too short."""
    return table[part.index * DIGEST_BYTES : (part.index + 1) * DIGEST_BYTES]
