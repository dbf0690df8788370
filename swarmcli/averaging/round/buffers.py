"""The memory of a round at one member: the tensors that it brings, and the averages that it holds beside them."""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch

from swarmcli.averaging.audit.signed import averages_root
from swarmcli.averaging.config import MIN_WEIGHT
from swarmcli.averaging.consensus.messages import DIGEST_BYTES, MAX_PARTS
from swarmcli.averaging.round.plan import Layout, Part, Plan
from swarmcli.averaging.round.signed import SignedLists
from swarmcli.compression import CompressionBase, NoCompression, TensorMessage

_PIECE = 1 << 18  # elements
NOTHING = bytes(DIGEST_BYTES)  # stands for the digest of a part that is not there


class Inputs:
    """A member's own tensors as one vector, their weight, and the samples in them (None: as many as they weigh).

    They are read in place, and copied only if they are not plain memory. With a `base`, tensors in host memory, the
    vector is their difference from it, computed part by part.
    """

    def __init__(
        self,
        tensors: Sequence[torch.Tensor],
        weight: float = 1.0,
        base: Sequence[torch.Tensor] | None = None,
        samples: float | None = None,
    ) -> None:
        self.weight, self.samples = weight, samples
        self.note = ""  # why the weight is zero, if that needs an explanation
        self._flat = [tensor.detach().cpu().contiguous().reshape(-1) for tensor in tensors]
        self._base = None if base is None else [tensor.reshape(-1) for tensor in base]

    def each(self) -> Iterator[torch.Tensor]:
        """The vector in flat pieces: whole tensors, or, where each takes memory of its own, no more than a few MiB."""
        for index, flat in enumerate(self._flat):
            length = max(1, flat.numel()) if self._base is None else _PIECE
            for begin in range(0, flat.numel(), length):
                yield self._piece(index, begin, min(begin + length, flat.numel()))

    def _piece(self, index: int, begin: int, end: int) -> torch.Tensor:
        piece = self._flat[index][begin:end]
        return piece if self._base is None else piece - self._base[index][begin:end]

    def part(self, part: Part) -> torch.Tensor:
        """A flat tensor: a view if the part lies within one tensor and there is no base, otherwise a copy."""
        starts, tensors = part.segment.starts, part.segment.tensors
        pieces = []
        place, position = bisect_right(starts, part.start) - 1, part.start
        while position < part.stop:
            end = min(part.stop, starts[place + 1])
            if end > position:
                pieces.append(self._piece(tensors[place], position - starts[place], end - starts[place]))
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
        """Views in the shapes of the inputs."""
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

    senders, weights   member indices and their weights, of members whose part arrived whole; behind all weights the
                       samples of each, where one has told others: so the digest covers both
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
    """What a round's average holds of one member: its weight and samples, as far as its tensors arrived.

    share   of all elements, those of parts that hold the member's; 1: all of them
    """

    weight: float
    samples: float
    share: float


def contributions_to(averages: Sequence[Average]) -> dict[int, Counted]:
    """The contribution of each member, by index, to the average of all these parts.

    Reducers may cap a weight unlike, if a member died before all of them had heard its own; and one may lie. So the
    lower median over the parts counts.
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
        """`results` is where the averages lie; None: an auxiliary."""
        self.plan, self.results = plan, results
        self.signed: SignedLists | None = None  # of the try under way, or the last one
        self._averages: dict[int, Average] = {}

    def put(self, averages: Iterable[Average]) -> None:
        """These averages are here now, in the place of others of the same parts."""
        for average in averages:
            self._averages[average.part.index] = average

    def drop(self, parts: Iterable[int]) -> None:
        """The memory of these parts is about to be written."""
        for index in parts:
            self._averages.pop(index, None)

    def get(self, index: int) -> Average | None:
        return self._averages.get(index)

    @property
    def averages(self) -> Sequence[Average]:
        """The averages in the order of the parts."""
        return [self._averages[index] for index in sorted(self._averages)]

    def lacking(self, target: bytes) -> dict[Part, bytes]:
        """The parts whose average here is not the one that `target` names, or is missing, with the named digest.
        `target`: 32 bytes for each part, zeros for one that does not matter."""
        wanted = {part: digest_at(target, part.index) for part in self.plan.parts}
        return {part: digest for part, digest in wanted.items() if digest not in (NOTHING, self._digest_of(part))}

    @property
    def digest(self) -> bytes | None:
        """The digest of the whole result. None if parts are missing here, or if only some parts have senders."""
        if len(self._averages) < len(self.plan.parts):
            return None
        if len({bool(average.senders) for average in self._averages.values()}) > 1:
            return None
        return result_digest(b"".join(average.digest for average in self.averages))

    @property
    def digests(self) -> bytes:
        """The digests of all parts, one behind the other; empty for a plan of more parts than fit into a message."""
        if len(self.plan.parts) > MAX_PARTS:
            return b""
        return b"".join(map(self._digest_of, self.plan.parts))

    def _digest_of(self, part: Part) -> bytes:
        return self._averages[part.index].digest if part.index in self._averages else NOTHING

    def content(self, index: int) -> TensorMessage | None:
        """A held average, decoded; None if it has no senders."""
        average = self._averages[index]
        if not average.senders:
            return None
        if self.results is not None:
            return NoCompression().compress(self.results.part(average.part))
        return None if average.message is None else plain(average.part.average_codec, average.message)


def plain(codec: CompressionBase, message: TensorMessage, values: torch.Tensor | None = None) -> TensorMessage:
    """The same average without its codec. `values`: the average after decoding, if that is at hand."""
    if isinstance(codec, NoCompression):
        return message
    return NoCompression().compress(codec.extract(message) if values is None else values)


def root_of(averages: Sequence[Average]) -> bytes:
    """The root of a reducer's averages, which it signs."""
    return averages_root(b"".join(each.digest for each in averages), b"".join(each.inputs for each in averages))


def result_digest(digests: bytes) -> bytes:
    """SHA-256 over the digests of all parts, which lie one behind the other in their order."""
    return hashlib.sha256(b"swarm result" + digests).digest()


def digest_at(digests: bytes, part: int) -> bytes:
    """The digest of one part in a table; NOTHING also where the table is too short."""
    return digests[part * DIGEST_BYTES : (part + 1) * DIGEST_BYTES] or NOTHING


def common_digests(tables: Sequence[bytes], parts: int) -> bytes:
    """For each part the digest that most hold (honest reducers give everyone the same), or zeros.

    A digest that a third of the members or less claim, or one alone, counts as held by nobody: those may all lie, and a
    try in which no member can give a copy is lost. To send and add such a part again costs little. Tables of another
    length tell nothing. Empty for a plan of more parts than fit into a message.
    """
    if parts > MAX_PARTS:
        return b""
    least = max(2, len(tables) // 3 + 1)
    common = bytearray()
    for part in range(parts):
        claims = (digest_at(table, part) for table in tables if len(table) == parts * DIGEST_BYTES)
        counts = Counter(digest for digest in claims if digest != NOTHING)
        digest = min(counts, key=lambda digest: (-counts[digest], digest), default=NOTHING)
        common += digest if counts[digest] >= least else NOTHING
    return bytes(common)


def unless_missing(held: bytes, before: bytes, tables: Sequence[bytes]) -> bytes:
    """`held` with zeros for parts that were to be copied `before` and that more than a third of the tables still lack.

    Fewer may lie. If all others hold an average, an honest member could have given a copy, and will: so one false
    digest does not make the group send and add everything again.
    """
    few = (len(tables) - 1) // 3
    missing = list[int]()
    for part in range(len(held) // DIGEST_BYTES):
        digest = digest_at(held, part)
        lacking = sum(digest_at(table, part) != digest for table in tables)
        if digest == digest_at(before, part) and lacking > few:
            missing.append(part)
    return without(held, missing)


def without(held: bytes, parts: Iterable[int]) -> bytes:
    """`held` with zeros for these parts."""
    kept = bytearray(held)
    for part in parts:
        if (part + 1) * DIGEST_BYTES <= len(kept):
            kept[part * DIGEST_BYTES : (part + 1) * DIGEST_BYTES] = NOTHING
    return bytes(kept)
