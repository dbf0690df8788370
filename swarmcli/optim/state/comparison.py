"""How this peer's parameters compare with the others': sketches are told in the groups that end the epochs.

    epoch ends ─ look ─▶ sketch ─ gathered ─▶ the standing group ─ its round begins ─▶ judge ─▶ one verdict for all

A sketch takes 256 bytes, which go to every member. So in a large group only about 64 members tell theirs, others in
every epoch; everyone measures himself against those.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING

import msgspec
import torch

from swarmcli.events import DriftMeasured, Events, PeerRefused
from swarmcli.network import wire
from swarmcli.network.identity import PeerID
from swarmcli.optim.epoch.group import Told, read_told
from swarmcli.optim.state.drift import Verdict, judge
from swarmcli.optim.state.replica import Replica
from swarmcli.optim.state.sketch import Sketch, Sketcher

if TYPE_CHECKING:
    from swarmcli.dht import DHTNode

TELLERS = 64  # members of a group that tell their sketches, on average
SKETCHED_EACH_EPOCH = 1 << 25  # elements; larger states are sketched every second, third … epoch: 1.5 ms per million
MOST_DRIFT = 1e9  # what is further away than this, or not a number at all, is reported so


class Comparison:
    """One peer's part in it."""

    def __init__(self, node: DHTNode, run_id: str, replica: Replica, tolerance: float) -> None:
        self.drift: float | None = None  # of this peer, as last measured, relative to the length of the parameters
        self.members = 0  # of the last group; 0: not known, then this peer listens before it tells
        self._node = node
        self._replica = replica
        self._tolerance = tolerance
        self._sketcher = Sketcher(run_id.encode())
        self._sketch: Sketch | None = None  # of the state at the present standing

    async def look(self) -> None:
        """Sketches the state, for the group that opens next; a very large one not in every epoch."""
        period = 1 + sum(tensor.numel() for tensor in self._watched) // SKETCHED_EACH_EPOCH
        self._sketch = await self.sketch() if self._replica.standing.epoch % period == 0 else None

    async def sketch(self) -> Sketch:
        """Of the state at this moment; the trainer leaves it alone meanwhile."""
        return await self._replica.change(partial(self._sketcher.sketch, self._watched))

    def has_moved(self, before: Sketch, after: Sketch) -> bool:
        """Whether the states of two sketches are further apart than the tolerance."""
        return not (before.is_finite and before.distance(after) <= self._tolerance * before.norm)

    @property
    def _watched(self) -> list[torch.Tensor]:
        state = self._replica.state
        return [*state.parameters, *state.shared.values()]

    def drop(self) -> None:
        """The state is another one than the last look has seen."""
        self._sketch = None

    @property
    def gathered(self) -> Told | None:
        """What the members of the next group are to know about this peer's state; None: nothing."""
        if self._sketch is None or not self._tells:
            return None
        return Told(self._replica.standing.epoch, self._sketch.to_bytes())

    @property
    def _tells(self) -> bool:
        if not self.members:
            return False
        drawn = hashlib.sha256(b"swarm tells" + self._node.peer_id + self._replica.standing.lineage).digest()
        return int.from_bytes(drawn[:8]) * self.members < TELLERS << 64

    def judge(self, gathered: Mapping[PeerID, bytes]) -> Verdict | None:
        """The verdict on what members of a group told, its leader first: everyone who comes to one comes to the same.

        None if this peer has nothing to compare, or with nobody, or if the leader has altered what it told.
        """
        events = self._node.endpoint.events
        epoch = self._replica.standing.epoch
        own = self._node.peer_id
        if gathered.get(own) and not self._is_told_in(gathered[own]):
            leader = next(iter(gathered))
            events.emit(PeerRefused(leader.text, "it leads a group with another sketch than this peer told", "sketch"))
            return None
        verdict = judge_group(gathered, epoch, self._tolerance, events)
        if verdict is None or self._sketch is None:
            return None
        self.drift = min(self._distance(verdict, self._sketch), MOST_DRIFT)
        events.emit(
            DriftMeasured(
                epoch=epoch,
                distance=self.drift,
                distances={peer.text: min(far, MOST_DRIFT) for peer, far in verdict.distances.items()},
                strays=tuple(peer.text for peer in verdict.strays),
                averages=verdict.average,
            )
        )
        return verdict

    def _is_told_in(self, data: bytes) -> bool:
        """Whether the leader handed on the sketch that this peer told."""
        own = self.gathered or Told(self._replica.standing.epoch)
        return any((own.epoch, own.sketch) == (told.epoch, told.sketch) for told in read_told([data]))

    def is_astray(self, verdict: Verdict) -> bool:
        """Whether this peer has to take over the state of the majority that the verdict names."""
        if verdict.average or not verdict.cluster or self._sketch is None:
            return False
        return self._distance(verdict, self._sketch) > self._tolerance

    def _distance(self, verdict: Verdict, sketch: Sketch) -> float:
        told = verdict.distances.get(self._node.peer_id)
        return verdict.distance(sketch) if told is None else told


def judge_group(gathered: Mapping[PeerID, bytes], epoch: int, tolerance: float, events: Events) -> Verdict | None:
    """The verdict on what members told about their states at this epoch; None if fewer than two told anything."""
    told = {peer: _read(peer, data, epoch, events) for peer, data in gathered.items() if data}
    sketches = {peer: sketch for peer, sketch in told.items() if sketch is not None}
    return judge(sketches, tolerance) if len(sketches) > 1 else None


def _read(peer: PeerID, data: bytes, epoch: int, events: Events) -> Sketch | None:
    """None for one of another epoch, and for what is no sketch."""
    try:
        told = wire.decode(Told, data)
        return Sketch.from_bytes(told.sketch) if told.epoch == epoch and told.sketch else None
    except (msgspec.DecodeError, ValueError) as error:
        events.emit(PeerRefused(peer.text, str(error), what="sketch"))
        return None
