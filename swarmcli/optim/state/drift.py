"""Which peers' parameters have drifted away from the others': by sketches that are told in the groups that end epochs.

    epoch ends ─ look ─▶ sketch ─ signed ─▶ the group of the next epoch ─ its round begins ─▶ compare with the median

A sketch is a claim. The median of an element lies between values of honest members as long as these are more than half,
and every sketch is signed by its member, so a leader can neither invent sketches nor alter them: it can only leave some
out, and then fewer than half are close to the median and nobody downloads.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import torch

from swarmcli.events import DriftMeasured, PeerRefused
from swarmcli.network import wire
from swarmcli.network.identity import PeerID, verify
from swarmcli.optim.epoch.group import Told
from swarmcli.optim.state.replica import Replica
from swarmcli.optim.state.sketch import Sketch, Sketcher

if TYPE_CHECKING:
    from swarmcli.dht import DHTNode

TOLERANCE = 1e-3  # of the length of the parameters; rounding on unlike processors stays far below it
TELLERS = 64  # of a larger group only so many tell: each sketch goes to every member
SKETCHED_EACH_EPOCH = 1 << 25  # elements; larger states are sketched every second, third … epoch: 1.5 ms per million
MOST_DRIFT = 1e9  # what is further away than this, or not a number at all, is reported so
_PURPOSE = "sketch"


@dataclass(frozen=True)
class Comparison:
    """What the members of a group find when they compare their sketches with the median of all.

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


def compare(sketches: Mapping[PeerID, Sketch], expected: int, tolerance: float = TOLERANCE) -> Comparison:
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
    """Of what was sketched from the median, relative to the median's length."""
    if not sketch.is_finite:
        return math.inf
    far, length = sketch.distance(median), median.norm
    return far / length if length > 0 else math.inf if far > 0 else 0.0


class DriftMonitor:
    """Sketches one peer's state, and compares it with what the members of its groups tell."""

    def __init__(self, node: DHTNode, run_id: str, replica: Replica, tolerance: float) -> None:
        self.drift: float | None = None  # of this peer, as last measured, relative to the length of the parameters
        self._identity = node.endpoint.identity
        self._events = node.endpoint.events
        self._replica = replica
        self._tolerance = tolerance
        self._sketcher = Sketcher(run_id.encode())
        self._sketch: Sketch | None = None  # of the state at the present standing
        self._tells = False  # a newcomer only listens: it does not know yet how large the group is

    def note_members(self, members: Iterable[PeerID]) -> None:
        """Of the group that ended this epoch, in its order. The first of them tell a sketch to the next group."""
        self._tells = self._identity.peer_id in list(members)[:TELLERS]

    async def look(self) -> None:
        """Sketches the state, for the group that opens next; a very large one not in every epoch."""
        state = self._replica.state
        watched: list[torch.Tensor] = [*state.parameters, *state.shared.values()]
        period = 1 + sum(tensor.numel() for tensor in watched) // SKETCHED_EACH_EPOCH
        self._sketch = None
        if state.epoch % period == 0:
            self._sketch = await self._replica.change(partial(self._sketcher.sketch, watched))

    def drop(self) -> None:
        """The state is another one than the last look has seen."""
        self._sketch = None

    @property
    def told(self) -> Told | None:
        """What the members of the next group are to know about this peer's state; None: nothing."""
        if self._sketch is None or not self._tells:
            return None
        data, standing = self._sketch.to_bytes(), self._replica.standing
        # The lineage is signed too, so nobody can show a sketch of another epoch as one of this.
        return Told(standing.epoch, data, self._identity.sign(_PURPOSE, standing.lineage, data))

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
        found = compare(sketches, min(TELLERS, len(gathered)), self._tolerance)
        self.drift = min(self._distance(found), MOST_DRIFT)
        self._events.emit(
            DriftMeasured(
                epoch=self._replica.standing.epoch,
                distance=self.drift,
                distances={peer.text: min(far, MOST_DRIFT) for peer, far in found.distances.items()},
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
        standing = self._replica.standing
        sketches: dict[PeerID, Sketch] = {}
        refused = 0
        for peer, data in gathered.items():
            # More than so many tell nothing honest, and a signature takes 0.1 ms to check, here on the event loop.
            if len(sketches) + refused == TELLERS:
                break
            try:
                told = wire.decode(Told, data) if data else None
                if told is None or told.epoch != standing.epoch or not told.sketch:
                    continue
                sketch = Sketch.from_bytes(told.sketch)
                if not verify(peer, _PURPOSE, told.signature, standing.lineage, told.sketch):
                    raise ValueError("a sketch without this member's signature")
                sketches[peer] = sketch
            except (msgspec.DecodeError, ValueError) as error:
                refused += 1
                self._refuse(peer, str(error))
        return sketches

    def _refuse(self, peer: PeerID, reason: str) -> None:
        self._events.emit(PeerRefused(peer.text, reason, what="sketch"))
