"""Who of a group has drifted away from the others, by everyone's sketches. No input or output here.

Every member of a group holds the same list of sketches and has to come to the same verdict, on whatever processor it
runs: so only operations that IEEE 754 rounds correctly are used, one after the other in a fixed order.

A sketch is a claim. What a member can do with a false one is bounded: others download from it only if more than half
of the members agree with it, and a group without such a majority averages its states at most (see `RepairPace`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from swarmcli.network.identity import PeerID
from swarmcli.optim.state.sketch import BUCKETS, Sketch

TOLERANCE = 1e-3  # of the length of the parameters; rounding on unlike processors stays far below it
MOST_CENTRES = 512  # members among which the centre is sought, the first of the group; the work grows with the square
LONGEST_PAUSE = 64  # epochs between two repairs of which the first was of no use


@dataclass(frozen=True)
class Verdict:
    """What the members of a group do about the distances between their states.

    distances   of each member that told a sketch from the centre, relative to the usual length; infinite where a
                sketch is not finite
    cluster     who is within the tolerance of the centre
    strays      who has to download the state from the cluster, which is a majority of the finite ones
    average     there is no majority: all average their states
    centre, scale   the sketch in the middle, and the usual length; None if no sketch was finite
    """

    distances: Mapping[PeerID, float]
    cluster: tuple[PeerID, ...] = ()
    strays: tuple[PeerID, ...] = ()
    average: bool = False
    centre: Sketch | None = None
    scale: float = 0.0

    def distance(self, sketch: Sketch) -> float:
        """From the centre, of any sketch, whether it was told to the group or not."""
        if self.centre is None or not sketch.is_finite:
            return math.inf
        return _relative(sketch.distance(self.centre), self.scale)


def judge(sketches: Mapping[PeerID, Sketch], tolerance: float = TOLERANCE) -> Verdict:
    """The verdict of a group, whose members have these sketches, in the order of the group.

    The centre is the member that most others are close to (its medoid, within the tolerance). The tolerance is
    relative to the median length, so that nobody can stretch it.
    """
    finite = [peer for peer, sketch in sketches.items() if sketch.is_finite]
    if not finite:
        return Verdict(dict.fromkeys(sketches, math.inf))
    values = np.array([sketches[peer].values for peer in finite], np.float64)  # (members, BUCKETS)
    lengths = np.sort(_lengths(values))
    scale = float(lengths[(len(lengths) - 1) // 2])
    centre, far = _distances_from_centre(values, tolerance * scale)
    measured = dict(zip(finite, (_relative(distance, scale) for distance in far.tolist()), strict=True))
    distances = {peer: measured.get(peer, math.inf) for peer in sketches}
    cluster = tuple(peer for peer in finite if distances[peer] <= tolerance)
    outside = tuple(peer for peer in sketches if distances[peer] > tolerance)
    majority = 2 * len(cluster) > len(finite)
    strays = outside if majority else ()
    return Verdict(distances, cluster, strays, not majority, sketches[finite[centre]], scale)


def _distances_from_centre(values: np.ndarray, reach: float) -> tuple[int, np.ndarray]:
    """The candidate with most members within reach (of several, the one closest to those), and (members,): how far
    each is from it."""
    candidates = values[:MOST_CENTRES]
    table = np.stack([_lengths(values - centre) for centre in candidates])  # (candidates, members)
    near = table <= reach
    counts = near.sum(1).tolist()
    spreads = [math.fsum(row[close].tolist()) for row, close in zip(table, near, strict=True)]
    best = min(range(len(candidates)), key=lambda index: (-counts[index], spreads[index], index))
    return best, table[best]


def _lengths(rows: np.ndarray) -> np.ndarray:
    """(rows,): Euclidean. Bucket by bucket, for a sum along an axis has another order on another processor."""
    total = np.zeros(len(rows))
    for bucket in range(BUCKETS):
        total += rows[:, bucket] * rows[:, bucket]
    return np.sqrt(total)


def _relative(distance: float, scale: float) -> float:
    if distance == 0:
        return 0.0
    return distance / scale if scale > 0 else math.inf


class RepairPace:
    """How often a peer repairs its state: at once, but ever more rarely while that is of no use.

    So members that lie, about their own sketch or as leaders about those of others, cost a bounded number of downloads
    and state rounds: those that turn out to have moved nothing delay the next one, twice as long each time.
    """

    def __init__(self) -> None:
        self._useless = 0  # repairs, less those that were forgiven
        self._next = 0  # the epoch from which on the next repair is due
        self._calm = 0  # epochs in which the members agreed

    def found_close(self) -> None:
        """The members agree."""
        self._calm += 1
        if self._calm % LONGEST_PAUSE == 0:
            self._useless = max(0, self._useless - 1)

    def is_pausing(self, epoch: int) -> bool:
        """Whether it is too early for the next repair."""
        return epoch < self._next

    def is_due(self, epoch: int) -> bool:
        """Whether to repair in this epoch, in which the members do not agree; counts as a useless repair if so."""
        if self.is_pausing(epoch):
            return False
        self._next = epoch + min(1 << self._useless, LONGEST_PAUSE)
        self._useless += 1
        return True

    def was_of_use(self) -> None:
        """The last repair has moved the state."""
        self._useless = max(0, self._useless - 1)
        self._next = 0
