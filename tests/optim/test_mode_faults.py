"""Every way to train under every fault: equal bits, and no sample counted twice or lost in silence.

A mode is a row of MODES, a fault a row of FAULTS. Each swarm trains while the fault happens, and is looked at when all
that are left stand at one epoch and rest.
"""

from __future__ import annotations

import asyncio
import itertools
import re
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from swarmcli.dht import DHTNode
from swarmcli.events import EpochAdvanced, EpochCredited, Noticed, RoundsReplayed, StateDownloaded
from swarmcli.network.identity import PeerID
from swarmcli.optim import Outer
from swarmcli.optim.arguments import averager_config
from swarmcli.optim.config import OptimizerConfig, PeerContext, PeerDescription
from swarmcli.optim.core import OptimizerCore
from swarmcli.optim.modes.base import Timing, Trained
from swarmcli.optim.modes.gradients import Mode
from swarmcli.optim.modes.low_rank import PowerEF, PowerSGD
from swarmcli.optim.modes.outer import OuterSteps, SparseOuterSteps
from swarmcli.optim.modes.sparse import Sparse
from tests.optim.optim_swarm import Swarm, record, until
from tests.simulation import within
from tests.suites import soak

ROWS, COLUMNS = 48, 96  # of the matrix that is learned: more than a chunk of sparse gradients
TRUTH = torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(5)) / ROWS**0.5


@dataclass(frozen=True)
class Row:
    mode: Mode
    rate: float  # of the peers' own optimizer, SGD
    keeps: bool = False  # what a round has not counted, for the next one
    batch: int = 4  # samples, which are an inner step
    target: int = 48  # of an epoch
    averaging: Mapping[str, Any] = field(default_factory=dict)


MODES = {
    "synchronous": Row(Mode(), 2.0),
    "outer steps": Row(OuterSteps(outer=Outer(4), timing=Timing.DELAYED_AVERAGING), 0.5, keeps=True),
    "sparse": Row(Sparse(k=256, bits=2, decay=0.95), 1.0),
    "sparse outer steps": Row(
        SparseOuterSteps(k=256, bits=2, decay=0.95, outer=Outer(4), timing=Timing.DELAYED_AVERAGING), 0.5, keeps=True
    ),
    "powersgd": Row(PowerSGD(averager_rank=4), 1.0),
    "poweref": Row(PowerEF(averager_rank=4), 1.0),
}


class Learner:
    """A peer that learns a matrix, and keeps books of its samples."""

    def __init__(self, node: DHTNode, row: Row, pace: float) -> None:
        self.node, self.row, self.pace = node, row, pace
        self.weights = torch.nn.Parameter(torch.zeros(ROWS, COLUMNS))
        self.data = torch.Generator().manual_seed(int.from_bytes(node.peer_id[:4]))
        self.goes = asyncio.Event()
        self.goes.set()
        self.last = 10**6  # the epoch at which it stops
        self.computed = 0
        self.digests: dict[str, str] = {}  # lineage → of the parameters then
        self.errors: dict[int, float] = {}  # epoch → of the parameters then
        self.advanced, self.credited = record(node, EpochAdvanced), record(node, EpochCredited)
        self.downloads, self.replays = record(node, StateDownloaded), record(node, RoundsReplayed)
        self.notices = record(node, Noticed)
        config = OptimizerConfig("run", row.target, description=PeerDescription("trainer"))
        optimizer = torch.optim.SGD([self.weights], lr=row.rate)
        peer = PeerContext(node, config, averager_config(config, options=row.averaging))
        self.core = OptimizerCore(peer, Trained(optimizer), row.mode)

    @property
    def epoch(self) -> int:
        return self.core.position.epoch

    async def train(self) -> None:
        while self.epoch < self.last:
            await asyncio.sleep(self.pace)
            await self.goes.wait()
            rows = torch.randn(self.row.batch, ROWS, generator=self.data)
            loss = ((rows @ (self.weights - TRUTH)) ** 2).mean()
            (self.weights.grad,) = torch.autograd.grad(loss, [self.weights])
            self.computed += self.row.batch
            await self.core.step(self.row.batch)
            state = self.core.replica.state
            digest = state.digest()
            assert self.digests.setdefault(state.position.lineage.hex(), digest) == digest, "a lineage is one state"
            self.errors[self.epoch] = float((state.trained[0].detach() - TRUTH).norm())

    @property
    def counted(self) -> float:
        """Samples that rounds have counted, as far as this peer knows; of a round that it replayed, by its record."""
        return sum(credit.samples.get(self.node.peer_id.text, 0.0) for credit in self.credited)

    @property
    def lost(self) -> int:
        """Samples that it has been told are lost."""
        ends = "given up|lost" if self.row.keeps else "given up|lost|not in the average"
        told = [re.match(rf"(\d+) samples of this peer are ({ends})", notice.text) for notice in self.notices]
        return sum(int(each[1]) for each in told if each)


class Field:
    """A swarm in which something goes wrong."""

    def __init__(self, swarm: Swarm, row: Row) -> None:
        self.swarm, self.row = swarm, row
        self.peers: list[Learner] = []  # that stay
        self._all: list[Learner] = []
        self._work: dict[Learner, asyncio.Task[None]] = {}

    async def __aenter__(self) -> Field:
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._work.values():
            task.cancel()
        await asyncio.wait(self._work.values())

    async def learner(self) -> Learner:
        peer = Learner(await self.swarm.node(), self.row, pace=0.2 + 0.013 * len(self.peers))
        await self.swarm.add(peer)
        self.peers.append(peer)
        self._all.append(peer)
        return peer

    def begin(self) -> None:
        """Lets all peers train that do not train yet."""
        self._work |= {peer: asyncio.ensure_future(peer.train()) for peer in self.peers if peer not in self._work}

    async def in_mid_round(self) -> list[Learner]:
        """Returns all peers, the leader first, when a round of all of them has begun."""

        def begun() -> list[PeerID]:
            groups = [peer.core._group for peer in self.peers if peer.core._group.begun]
            return max((group.members for group in groups), key=len, default=[])

        await until(lambda: len(begun()) == len(self.peers) and min(peer.epoch for peer in self.peers) > 0)
        by_id = {peer.node.peer_id: peer for peer in self.peers}
        return [by_id[member] for member in begun()]

    async def kill(self, peer: Learner) -> None:
        await self.swarm.kill(peer)  # type: ignore[arg-type]
        self.peers.remove(peer)
        dead = self._work.pop(peer)
        dead.cancel()
        await asyncio.wait([dead])

    async def freeze(self, peer: Learner) -> None:
        peer.goes.clear()
        self.swarm.network.freeze(peer.node.peer_id)

    async def thaw(self, peer: Learner) -> None:
        """Thaws the peer; returns when it has downloaded or replayed what it missed."""
        self.swarm.network.thaw(peer.node.peer_id)
        peer.goes.set()
        await until(lambda: bool(peer.downloads or peer.replays))

    async def end(self) -> None:
        """Ends the training, one epoch after all peers are together again."""
        await self.in_mid_round()
        last = max(peer.epoch for peer in self.peers) + 1
        for peer in self.peers:
            peer.last = last
        await asyncio.gather(*self._work.values())
        for peer in self.peers:
            await peer.core.state_dict()  # no end of an epoch is under way any more

    def check(self) -> None:
        assert len({peer.core.position for peer in self.peers}) == 1
        digests: dict[str, str] = {}
        for peer in self.peers:
            for lineage, digest in peer.digests.items():
                assert digests.setdefault(lineage, digest) == digest, f"{peer.node.peer_id.short} has other bits"
            assert peer.computed == peer.counted + peer.core.work.samples + peer.lost
            assert peer.errors[peer.epoch] < float(TRUTH.norm()), "it learns"
        witness = next(peer for peer in self.peers if not peer.downloads)  # it knows every round of the run
        counted = sum((Counter(credit.samples) for credit in witness.credited), Counter[str]())
        assert witness.core.position.samples == counted.total()
        for peer in self._all:
            own = counted[peer.node.peer_id.text]
            assert own <= peer.computed - peer.core.work.samples, "a sample is in the run twice"
            assert own == peer.counted or peer.downloads or peer not in self.peers


async def killed(there: Field) -> None:
    *_, last = await there.in_mid_round()
    await asyncio.sleep(0.03)  # its parts are on their way
    await there.kill(last)


async def leader_killed(there: Field) -> None:
    leader, *_ = await there.in_mid_round()
    await there.kill(leader)


async def frozen(there: Field) -> None:
    """The last peer is frozen for so long that it downloads what it has missed."""
    first, *_, last = await there.in_mid_round()
    await there.freeze(last)
    await until(lambda: first.epoch >= last.epoch + 4)
    await there.thaw(last)
    assert last.downloads


async def dozing(there: Field) -> None:
    """The last peer makes up for the one round that it missed, unless the mode's rounds are kept without a proof."""
    *others, last = await there.in_mid_round()
    await there.freeze(last)
    await until(lambda: others[0].epoch > last.epoch)
    for peer in others:
        peer.goes.clear()
    await there.thaw(last)
    for peer in others:
        peer.goes.set()
    assert bool(last.replays) == (last.core.work.method.program is None)


async def parted(there: Field) -> None:
    """Both halves go on, and one of them takes over the other's state in the end."""
    members = await there.in_mid_round()
    assert there.swarm.contact is not None
    halves = members[:2], members[2:]
    ids = [[peer.node.peer_id for peer in half] for half in halves]
    there.swarm.network.partition([there.swarm.contact.peer_id, *ids[0]], ids[1])
    reached = max(peer.epoch for peer in members)
    await until(lambda: min(peer.epoch for peer in members) > reached + 1)
    assert len({peer.core.position.lineage for peer in members}) > 1
    there.swarm.network.heal()
    await there.in_mid_round()
    assert [all(peer.downloads for peer in half) for half in halves].count(True) == 1
    assert [any(peer.downloads for peer in half) for half in halves].count(True) == 1


async def joined(there: Field) -> None:
    await there.in_mid_round()
    newcomer = await there.learner()
    there.begin()
    await until(lambda: newcomer.counted > 0)


FAULTS: dict[str, Callable[[Field], Awaitable[None]]] = {
    "killed": killed,
    "leader killed": leader_killed,
    "frozen": frozen,
    "dozing": dozing,
    "parted": parted,
    "joined": joined,
}


# Mode training has tests of its own for most of these, and so have outer steps: peers/test_membership.py and
# test_outer.py.
FIRST = [
    ("sparse", "joined", 3),
    ("sparse outer steps", "leader killed", 3),
    ("powersgd", "dozing", 4),
    ("poweref", "joined", 3),
]
OTHERS = [case for case in itertools.product(MODES, FAULTS, [4]) if case not in FIRST]


@pytest.mark.parametrize("seed", [0, *soak(range(1, 4))])
@pytest.mark.parametrize(("mode", "fault", "count"), [*FIRST, *soak(OTHERS)])
@within(600)
async def test_who_stays_is_equal_and_samples_count_once_or_are_told_as_lost(
    mode: str, fault: str, count: int, seed: int
) -> None:
    async with Swarm(seed, latency=0.02) as swarm, Field(swarm, MODES[mode]) as there:
        for _ in range(count):
            await there.learner()
        there.begin()
        await FAULTS[fault](there)
        await there.end()
        there.check()
