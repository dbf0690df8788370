"""Whether this peer's parameters have drifted away from its mates': a sketch of them is in everybody's report.

    epoch ends ─ look ─▶ sketch ─ in the signed report ─▶ read by all ─ compared with their own of the same lineage

A sketch is a claim. This peer compares it with its own sketch of the same lineage, so it matters little of which epoch
a report is. In each element the median of these differences lies between values of honest members while these are more
than half, so fewer liars send nobody away.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

import numpy as np
import torch

from swarmcli.events import DriftMeasured, Events
from swarmcli.network.identity import PeerID
from swarmcli.optim.state.lineage import LINEAGE_BYTES
from swarmcli.optim.state.replica import Replica

BUCKETS = 16  # a distance is usually off by a fifth then: the ones that matter are orders of magnitude larger
SKETCH_BYTES = 4 * BUCKETS
_ROW = 4096  # elements
_ROWS = 16  # this many rows have signs of their own, which then repeat
_SLAB = _ROWS * _ROW  # elements that are sketched at a time: half a megabyte in float64 stays in the cache


Sketch: TypeAlias = np.ndarray  # (BUCKETS,) float32, as it travels: sketches that matter differ by a thousandth or more


def distance(one: Sketch, other: Sketch) -> float:
    """An estimate of the distance between what was sketched. Both sketches have one seed."""
    return math.dist(one.tolist(), other.tolist())


class Sketcher:
    """Sketches lists of tensors. Only sketches of one seed and of tensors in the same order compare.

    A signed count-sketch (Charikar, Chen, Farach-Colton 2002, "Finding frequent items in data streams"): element i is
    added with a random sign to a random one of the buckets. It is linear, so sketch(a) - sketch(b) = sketch(a - b), and
    the expected square of its length is that of the vector.

    One random draw per element would cost more than everything else, so elements share draws that are still pairwise
    independent. A row of 4096 neighbors lies over the buckets in order, with signs that repeat after 16 rows; each row
    also has a sign and a first bucket of its own. Signs and buckets follow from the seed by SHAKE-256, so they are
    equal everywhere.
    """

    def __init__(self, seed: bytes) -> None:
        self._seed = seed
        bits = np.unpackbits(np.frombuffer(self._draw(b"signs", _SLAB // 8), np.uint8))
        self._signs = torch.from_numpy(1.0 - 2.0 * bits).view(_ROWS, _ROW // BUCKETS, BUCKETS)

    @torch.no_grad()
    def sketch(self, tensors: Sequence[torch.Tensor]) -> Sketch:
        """Returns the sketch, (BUCKETS,) float32, of floating-point tensors on any device; it adds up in float64. The
        sketch is not finite if a tensor is not."""
        sums = torch.zeros(BUCKETS, dtype=torch.float64)
        for index, tensor in enumerate(tensors):
            rows = self._rows(tensor.detach().reshape(-1))
            self._scatter(rows, self._draw(index.to_bytes(4, "big"), len(rows)), sums)
        with np.errstate(over="ignore"):  # a sum beyond float32 may become infinite
            return sums.numpy().astype("<f4")

    def _rows(self, flat: torch.Tensor) -> torch.Tensor:
        """(rows, BUCKETS): each row of elements with the repeating signs, summed by bucket, without the sign and the
        first bucket of its own."""
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


TOLD_BYTES = LINEAGE_BYTES + SKETCH_BYTES  # in a report: the lineage that was sketched, and the sketch
EACH_EPOCH = 1 << 25  # elements; larger states are sketched every second, third … epoch: 1.5 ms per million
KEPT = 256  # own sketches, so that reports can be compared some seconds later even if epochs are short
FURTHEST = 1e9  # a larger distance, or one that is no number, is reported as this


@dataclass(frozen=True)
class Comparison:
    """How far each member with a sketch is from the median, relative to the norm of this peer's parameters.

    strays   members that have to download the state: those that are not close to the median, if more than half are;
             otherwise those that are not close to the member with the smallest id
    """

    distances: Mapping[PeerID, float]
    strays: frozenset[PeerID] = frozenset()


def compare(differences: Mapping[PeerID, Sketch], length: float, expected: int, tolerance: float) -> Comparison:
    """Compares members by the differences of their sketches from this peer's own, whose norm is `length`. `expected`:
    how many members there are, this peer among them. `tolerance`: the relative distance that counts as close.

    A member whose sketch is not finite knows it, has to download in any case, and has no say.
    """
    finite = {peer: sketch for peer, sketch in differences.items() if np.isfinite(sketch).all()}
    if not finite:
        return Comparison(dict.fromkeys(differences, math.inf))
    broken = differences.keys() - finite.keys()

    def far_from(middle: Sketch) -> dict[PeerID, float]:
        return {peer: relative(distance(sketch, middle), length) for peer, sketch in finite.items()}

    distances = far_from(np.median(np.stack([*finite.values()]).astype(np.float64), axis=0))
    measured = distances | dict.fromkeys(broken, math.inf)
    if 2 * sum(far <= tolerance for far in distances.values()) <= expected - len(broken):
        if len(differences) < expected:
            return Comparison(measured, frozenset(broken))  # members without a sketch so far may decide it
        distances = far_from(finite[min(finite)])
    return Comparison(measured, frozenset(broken) | {peer for peer, far in distances.items() if far > tolerance})


def relative(far: float, length: float) -> float:
    """A distance as a fraction of `length`."""
    return far / length if length > 0 else math.inf if far > 0 else 0.0


class DriftMonitor:
    """Sketches one peer's state, and compares it with what its mates report."""

    def __init__(self, own_id: PeerID, events: Events, run_id: str, replica: Replica, tolerance: float) -> None:
        self.drift: float | None = None  # of this peer, as last measured, relative to the norm of its parameters
        self._own_id, self._events, self._replica, self._tolerance = own_id, events, replica, tolerance
        self._sketcher = Sketcher(run_id.encode())
        self._kept: dict[bytes, Sketch] = {}  # lineage → sketch of this peer's state there, the latest last
        self._strays = frozenset[PeerID]()  # of the last comparison

    async def look(self) -> None:
        """Sketches the state for the next report; a very large one not in every epoch."""
        state = self._replica.state
        buffers = [tensor for tensor in state.extra_tensors if tensor.is_floating_point()]
        watched: list[torch.Tensor] = [*state.trained, *state.shared.values(), *buffers]
        period = 1 + sum(tensor.numel() for tensor in watched) // EACH_EPOCH
        if state.position.epoch % period == 0:
            lineage = state.position.lineage
            self._kept.pop(lineage, None)
            self._kept[lineage] = await self._replica.change(partial(self._sketcher.sketch, watched))
            if len(self._kept) > KEPT:
                del self._kept[next(iter(self._kept))]

    def drop(self) -> None:
        """Drops all sketches: the state has been replaced."""
        self._kept.clear()

    @property
    def told(self) -> bytes:
        """What the report has: the latest lineage with a sketch, and that; b"" before the first look."""
        if not self._kept:
            return b""
        lineage, sketch = next(reversed(self._kept.items()))
        return lineage + sketch.tobytes()

    def strays(self, reported: Mapping[PeerID, bytes], epoch: int) -> bool:
        """Compares this peer's state with what its mates last reported, and returns whether it has to download theirs.
        `reported`: all mates, with b"" for one without a sketch. Emits DriftMeasured if there is anything to
        compare."""
        if not self._kept:
            return False
        latest = next(reversed(self._kept.values()))
        differences = {self._own_id: _away(latest, latest)}
        for peer, told in reported.items():
            if len(told) == TOLD_BYTES and (own := self._kept.get(told[:LINEAGE_BYTES])) is not None:
                differences[peer] = _away(np.frombuffer(told, "<f4", offset=LINEAGE_BYTES), own)
        if len(differences) == 1:
            return False
        found = compare(differences, float(np.linalg.norm(latest)), 1 + len(reported), self._tolerance)
        fresh, self._strays = found.strays - self._strays, found.strays
        self.drift = min(found.distances[self._own_id], FURTHEST)
        self._events.emit(
            DriftMeasured(
                epoch=epoch,
                distance=self.drift,
                distances={peer.text: min(far, FURTHEST) for peer, far in found.distances.items()},
                strays=tuple(peer.text for peer in sorted(fresh)),
            )
        )
        return self._own_id in found.strays


def _away(sketch: Sketch, own: Sketch) -> Sketch:
    """The difference of two sketches; zeros if this peer's own is not finite and the other one is."""
    return sketch - own if np.isfinite(own).all() else 0 * sketch
