"""Which peers' parameters have drifted away from the others': by sketches that are told in the groups that end epochs.

    epoch ends ─ look ─▶ sketch ─ signed ─▶ the group of the next epoch ─ its round begins ─▶ compare with the median

A sketch is a claim. The median of an element lies between values of honest members as long as these are more than half,
and every sketch is signed by its member, so a leader can neither invent sketches nor alter them: it can only leave some
out, and then fewer than half are close to the median and nobody downloads.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import torch

from swarmcli.events import DriftMeasured, PeerRefused
from swarmcli.network import wire
from swarmcli.network.identity import PeerID, verify
from swarmcli.optim.state.replica import Replica

if TYPE_CHECKING:
    from swarmcli.dht import DHTNode


BUCKETS = 64
SKETCH_BYTES = 4 * BUCKETS
_ROW = 64 * BUCKETS  # elements
_ROWS = 16  # with signs of their own, then the same again
_SLAB = _ROWS * _ROW  # elements that are taken at a time: half a megabyte in float64 stays in the cache


@dataclass(frozen=True, slots=True)
class Sketch:
    """`values` (BUCKETS,), as they travel: float32, since what is compared differs by a thousandth or more."""

    values: tuple[float, ...]

    def __post_init__(self) -> None:
        if len(self.values) != BUCKETS:
            raise ValueError(f"a sketch has {BUCKETS} values, got {len(self.values)}")

    @classmethod
    def from_bytes(cls, data: bytes) -> Sketch:
        """Raises ValueError for another number of bytes."""
        if len(data) != SKETCH_BYTES:
            raise ValueError(f"a sketch has {SKETCH_BYTES} bytes, got {len(data)}")
        return cls(tuple(np.frombuffer(data, "<f4").tolist()))

    def to_bytes(self) -> bytes:
        """BUCKETS times float32, little endian."""
        return np.asarray(self.values, "<f4").tobytes()

    @property
    def is_finite(self) -> bool:
        return all(map(math.isfinite, self.values))

    @property
    def norm(self) -> float:
        """An estimate of the length of what was sketched."""
        return _length(self.values)

    def distance(self, other: Sketch) -> float:
        """An estimate of the distance between what was sketched here and there, with one seed."""
        return _length(here - there for here, there in zip(self.values, other.values, strict=True))


def _length(values: Iterable[float]) -> float:
    """Euclidean. One rounded operation after the other: the order within a library's sums, and whether it fuses a
    product with a sum, differ between processors, and all members of a group have to find the same distances."""
    total = 0.0
    for value in values:
        total += value * value
    return math.sqrt(total)


class Sketcher:
    """Sketches lists of tensors. Only sketches of one seed and of tensors in the same order compare.

    A signed count-sketch (Charikar, Chen, Farach-Colton 2002, "Finding frequent items in data streams"): element i is
    added with a random sign to a random one of 64 buckets. It is linear, so sketch(a) - sketch(b) = sketch(a - b), and
    the expected square of its length is that of the vector. With 64 buckets the length is off by a tenth, usually.

    One random draw per element would cost more than everything else, so the draws are shared and still pairwise
    independent: a row of 4096 neighbours has fixed signs, 16 rows of them, and lies over the buckets in order; each
    row has a sign and a first bucket of its own. Signs and buckets follow from the seed by SHAKE-256, equally
    everywhere.
    """

    def __init__(self, seed: bytes) -> None:
        self._seed = seed
        bits = np.unpackbits(np.frombuffer(self._draw(b"signs", _SLAB // 8), np.uint8))
        self._signs = torch.from_numpy(1.0 - 2.0 * bits).view(_ROWS, _ROW // BUCKETS, BUCKETS)

    @torch.no_grad()
    def sketch(self, tensors: Sequence[torch.Tensor]) -> Sketch:
        """Takes floating-point tensors on any device; sums are taken in float64. Not finite where a tensor is not."""
        sums = torch.zeros(BUCKETS, dtype=torch.float64)
        for index, tensor in enumerate(tensors):
            rows = self._rows(tensor.detach().reshape(-1))
            self._scatter(rows, self._draw(index.to_bytes(4, "big"), len(rows)), sums)
        with np.errstate(over="ignore"):  # a sum beyond float32 is as good as infinite
            return Sketch(tuple(sums.numpy().astype("<f4").tolist()))

    def _rows(self, flat: torch.Tensor) -> torch.Tensor:
        """(rows, BUCKETS): each row of elements with its signs, summed by bucket but not yet turned to its own."""
        signs = self._signs.to(flat.device)
        rows = torch.empty(math.ceil(flat.numel() / _ROW), BUCKETS, dtype=torch.float64, device=flat.device)
        slab = torch.empty(_SLAB, dtype=torch.float64, device=flat.device)
        for row, start in zip(range(0, len(rows), _ROWS), range(0, flat.numel(), _SLAB), strict=True):
            piece = flat[start : start + _SLAB]
            count = math.ceil(len(piece) / _ROW)
            slab[: len(piece)].copy_(piece)
            slab[len(piece) : count * _ROW].zero_()
            part = slab[: count * _ROW].view(count, _ROW // BUCKETS, BUCKETS)
            torch.sum(part.mul_(signs[:count]), 1, out=rows[row : row + count])
        return rows.cpu()

    @staticmethod
    def _scatter(rows: torch.Tensor, draws: bytes, sums: torch.Tensor) -> None:
        drawn = torch.frombuffer(bytearray(draws), dtype=torch.uint8).long() if draws else torch.empty(0).long()
        signed = rows * (1 - (drawn & BUCKETS) // (BUCKETS // 2))[:, None]
        buckets = (torch.arange(BUCKETS) + drawn[:, None]) % BUCKETS
        sums.scatter_add_(0, buckets.reshape(-1), signed.reshape(-1))

    def _draw(self, purpose: bytes, count: int) -> bytes:
        return hashlib.shake_256(b"swarm sketch" + self._seed + purpose).digest(count)


_PURPOSE = "sketch"


@dataclass(frozen=True, slots=True)
class DriftOptions:
    """How much sketches tell. All peers of a run have the same: the members of a group have to find the same."""

    tellers: int = 64  # of a larger group only so many tell: each sketch goes to every member
    each_epoch: int = 1 << 25  # elements; larger states are sketched every second, third … epoch: 1.5 ms per million
    most: float = 1e9  # a distance further away than this, or not a number at all, is reported so


DRIFT = DriftOptions()


@dataclass(frozen=True)
class Comparison:
    """The finding of a group's members when they compare their sketches with the median of all.

    distances   of each member that told a sketch from the median, relative to its length; infinite where a sketch is
                not finite
    agree       more than half of the expected members are close to the median
    strays      who has to download the state: who is not close while the others agree, and who is not finite
    disagree    all have told, and they do not agree: all average their states
    median      None if no sketch is finite
    """

    distances: Mapping[PeerID, float]
    agree: bool = False
    strays: tuple[PeerID, ...] = ()
    disagree: bool = False
    median: Sketch | None = None


def compare(sketches: Mapping[PeerID, Sketch], expected: int, tolerance: float) -> Comparison:
    """Compares the sketches of a group in which so many members are expected to tell one.

    Every member of a group computes this from the same list and has to find the same, on whatever processor it runs. So
    only operations that IEEE 754 rounds correctly are used, one after the other in a fixed order.
    """
    values = [sketch.values for sketch in sketches.values() if sketch.is_finite]
    if not values:
        return Comparison(dict.fromkeys(sketches, math.inf))
    median = Sketch(tuple(np.median(np.array(values, np.float64), axis=0).tolist()))  # (members, BUCKETS) to (BUCKETS,)
    distances = {peer: distance(sketch, median) for peer, sketch in sketches.items()}
    broken = len(sketches) - len(values)  # a member that is not finite knows it, and has no say
    close = sum(far <= tolerance for far in distances.values())
    agree = 2 * close > expected - broken
    # One that is not finite has nothing to bring into an average, so it downloads in any case.
    strays = tuple(p for p, sketch in sketches.items() if not sketch.is_finite or (agree and distances[p] > tolerance))
    return Comparison(distances, agree, strays, not agree and len(sketches) >= expected, median)


def distance(sketch: Sketch, median: Sketch) -> float:
    """How far the sketched tensors are from the median, relative to the median's length."""
    if not sketch.is_finite:
        return math.inf
    far, length = sketch.distance(median), median.norm
    return far / length if length > 0 else math.inf if far > 0 else 0.0


class MemberNote(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True, frozen=True):
    """A member's word about itself to its group: a stranger's words, handed on by the group's leader.

    Only what is not as usual travels.
    """

    epoch: int
    sketch: bytes = b""  # of its parameters; empty: it tells none
    signature: bytes = b""  # of the sketch and the lineage, by this member
    several: bool = False  # it counts more peers than one group may hold
    apart: bool = False  # its state is another than that of others at the same position, see TrainingState.apart


def read_told(gathered: Iterable[bytes]) -> Iterator[MemberNote]:
    """Decodes what members told, in the order of the group; leaves out those that told nothing readable."""
    for data in gathered:
        try:
            yield wire.decode(MemberNote, data)
        except msgspec.DecodeError:
            continue


def are_several(told: Collection[MemberNote]) -> bool:
    """Whether several groups end this epoch, so that its lineage only counts epochs: by at least half of the members.

    A newcomer is the first to count itself, so of two it is the one that counts more who knows better.
    """
    return bool(told) and 2 * sum(each.several for each in told) >= len(told)


def are_apart(told: Collection[MemberNote]) -> bool:
    """Whether the members hold unlike states: by more than half of them, so that no single one can make it so."""
    return 2 * sum(each.apart for each in told) > len(told)


class DriftMonitor:
    """Sketches one peer's state, and compares it with what the members of its groups tell."""

    def __init__(self, node: DHTNode, run_id: str, replica: Replica, tolerance: float) -> None:
        self.drift: float | None = None  # of this peer, as last measured, relative to the length of the parameters
        self._identity = node.endpoint.identity
        self._events = node.endpoint.events
        self._replica = replica
        self._tolerance = tolerance
        self._sketcher = Sketcher(run_id.encode())
        self._sketch: Sketch | None = None  # of the state at the present position
        self._tells = False  # a newcomer only listens: it does not know yet how large the group is

    def note_members(self, members: Iterable[PeerID]) -> None:
        """Hears who ended this epoch, in the order of the group. The first of them tell a sketch to the next group."""
        self._tells = self._identity.peer_id in list(members)[: DRIFT.tellers]

    async def look(self) -> None:
        """Sketches the state, for the group that opens next; a very large one not in every epoch."""
        state = self._replica.state
        buffers = [tensor for tensor in state.extra_tensors if tensor.is_floating_point()]
        watched: list[torch.Tensor] = [*state.trained, *state.shared.values(), *buffers]
        period = 1 + sum(tensor.numel() for tensor in watched) // DRIFT.each_epoch
        self._sketch = None
        if state.position.epoch % period == 0:
            self._sketch = await self._replica.change(partial(self._sketcher.sketch, watched))

    def drop(self) -> None:
        """The state is another one than the last look has seen."""
        self._sketch = None

    @property
    def told(self) -> MemberNote | None:
        """Tells the members of the next group about this peer's state; None: nothing."""
        if self._sketch is None or not self._tells:
            return None
        data, position = self._sketch.to_bytes(), self._replica.position
        # The lineage is signed too, so nobody can show a sketch of another epoch as one of this.
        return MemberNote(position.epoch, data, self._identity.sign(_PURPOSE, position.lineage, data))

    def compare(self, gathered: Mapping[PeerID, bytes]) -> Comparison | None:
        """Compares what the members of a group with a state told, its leader first; None if this peer has no sketch
        itself, if nobody else told one, or if the leader left out or altered what this peer told."""
        if self._sketch is None:
            return None
        sketches = self._read(gathered)
        own = sketches.get(self._identity.peer_id)
        if self._tells and (own is None or own.to_bytes() != self._sketch.to_bytes()):
            leader = next(iter(gathered), self._identity.peer_id)
            self._refuse(leader, "it leads a group without the sketch that this peer told")
            return None
        if not sketches.keys() - {self._identity.peer_id}:
            return None
        found = compare(sketches, min(DRIFT.tellers, len(gathered)), self._tolerance)
        self.drift = min(self._distance(found), DRIFT.most)
        self._events.emit(
            DriftMeasured(
                epoch=self._replica.position.epoch,
                distance=self.drift,
                distances={peer.text: min(far, DRIFT.most) for peer, far in found.distances.items()},
                strays=tuple(peer.text for peer in found.strays),
                averages=found.disagree,
            )
        )
        return found

    def is_stray(self, found: Comparison) -> bool:
        """Whether this peer has to download the state. One that told no sketch measures itself all the same."""
        if self._sketch is None or found.median is None:
            return False
        return not self._sketch.is_finite or (found.agree and self._distance(found) > self._tolerance)

    def _distance(self, found: Comparison) -> float:
        assert self._sketch is not None
        return math.inf if found.median is None else distance(self._sketch, found.median)

    def _read(self, gathered: Mapping[PeerID, bytes]) -> dict[PeerID, Sketch]:
        """The sketches of this epoch that their members have signed."""
        position = self._replica.position
        sketches: dict[PeerID, Sketch] = {}
        refused = 0
        for peer, data in gathered.items():
            # More than so many tell nothing honest, and a signature takes 0.1 ms to check, here on the event loop.
            if len(sketches) + refused == DRIFT.tellers:
                break
            try:
                told = wire.decode(MemberNote, data) if data else None
                if told is None or told.epoch != position.epoch or not told.sketch:
                    continue
                sketch = Sketch.from_bytes(told.sketch)
                if not verify(peer, _PURPOSE, told.signature, position.lineage, told.sketch):
                    raise ValueError("a sketch without this member's signature")
                sketches[peer] = sketch
            except (msgspec.DecodeError, ValueError) as error:
                refused += 1
                self._refuse(peer, str(error))
        return sketches

    def _refuse(self, peer: PeerID, reason: str) -> None:
        self._events.emit(PeerRefused(peer.text, reason, what="sketch"))
