"""What can happen to the members of a round, and when: drawn from a seed, at times or at packets."""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass, field

from swarmcli.averaging import RoundResult
from swarmcli.averaging.config import AllreduceOptions, Trust
from swarmcli.errors import RoundFailed, RoundUndecided
from swarmcli.network import PeerID
from tests.averaging.rounds import Kind, Outcome, Swarm

BANDWIDTH = 20_000.0  # bytes per second: a round takes about a second, and events fall into all of its phases
THAW = 100.0  # seconds after which everything heals; whoever was frozen so long finds the others gone on


@dataclass(frozen=True)
class Fault:
    """`what` happens to the member that is `whom`, at `when`: seconds, or a number of packets."""

    what: str
    whom: str
    when: float | int


def draw_kinds(random_: random.Random) -> list[Kind]:
    """A group of 2 to 16 that has a reducer: the leader listens."""
    kinds = [Kind(weight=random_.choice([1.0, 2.0, 0.0]), delay=random_.random() * 0.3)]
    kinds[0].auxiliary = random_.random() < 0.1
    for _ in range(random_.choice([1, 1, 2, 2, 2, 3, 3, 4, 5, 6, 8, 11, 15])):
        kinds.append(
            Kind(
                weight=random_.choice([1.0, 1.0, 3.0, 0.0]),
                listening=random_.random() < 0.6,
                auxiliary=random_.random() < 0.25,
                bandwidth=random_.choice([0.0, 1.0, 1.0, 5.0]),
                delay=random_.random() * 0.3,
            )
        )
    return kinds


def draw_fault(random_: random.Random) -> Fault:
    what = random_.choice(["kill", "kill", "freeze", "thaw soon", "cut", "isolate", "leave"])
    whom = random_.choice(["leader", "reducer", "sender", "auxiliary", "anybody", "source", "target"])
    return Fault(what, whom, random_.choice([random_.random() * 1.2, random_.randint(1, 400)]))


@dataclass
class Chaos:
    """Brings the faults over a swarm while its round runs."""

    swarm: Swarm
    faults: list[Fault]
    random: random.Random
    touched: set[int] = field(default_factory=set)  # to whom something happened
    happened: list[str] = field(default_factory=list)
    begun: float = 0.0

    def __post_init__(self) -> None:
        self._open = list(self.faults)
        self._packets = 0
        self._soon: list[asyncio.TimerHandle] = []
        self._count_packets()

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        self.begun = loop.time()
        for fault in self.faults:
            if isinstance(fault.when, float):
                self._soon.append(loop.call_later(fault.when, self._strike, fault))
        await asyncio.sleep(THAW)
        self._open.clear()
        for peer in self.swarm.peers:
            self.swarm.network.thaw(peer.peer_id)
        self.swarm.network.heal()

    def _count_packets(self) -> None:
        latency = self.swarm.network.latency

        def counted(source: PeerID, target: PeerID) -> float:
            self._packets += bool(self.begun)
            for fault in [each for each in self._open if isinstance(each.when, int) and each.when <= self._packets]:
                self._strike(fault, self._index(source), self._index(target))
            return latency(source, target)

        self.swarm.network.latency = counted  # type: ignore[method-assign]

    def _index(self, peer_id: PeerID) -> int:
        return next(index for index, peer in enumerate(self.swarm.peers) if peer.peer_id == peer_id)

    def _strike(self, fault: Fault, source: int = 0, target: int = 0) -> None:
        if fault not in self._open:
            return
        self._open.remove(fault)
        victim = self._victim(fault.whom, source, target)
        self.touched.add(victim)
        self.happened.append(f"{asyncio.get_running_loop().time() - self.begun:.3f} s: {fault}, which is {victim}")
        network, peer = self.swarm.network, self.swarm.peers[victim].peer_id
        match fault.what:
            case "kill":
                self.swarm.kill(victim)
            case "leave":
                self.swarm.tasks[victim].cancel()
                if not self.swarm.peers[victim].before:  # it has not begun
                    self.swarm.peers[victim].service.decline(self.swarm.formed)
            case "freeze":
                self.swarm.freeze(victim)
            case "thaw soon":
                self.swarm.freeze(victim)
                seconds = self.random.choice([0.5, 3.0, 9.0, 20.0, 40.0])
                self._soon.append(asyncio.get_running_loop().call_later(seconds, network.thaw, peer))
            case "cut":
                network.cut(
                    peer, self.random.choice([each.peer_id for each in self.swarm.peers if each.peer_id != peer])
                )
            case "isolate":
                network.partition([peer])

    def _victim(self, whom: str, source: int, target: int) -> int:
        kinds = dict(enumerate(peer.kind for peer in self.swarm.peers))
        match whom:
            case "source":
                return source
            case "target":
                return target
            case "leader":
                return 0
            case "reducer":
                able = [index for index, kind in kinds.items() if kind.bandwidth > 0]
            case "sender":
                able = [index for index, kind in kinds.items() if not kind.auxiliary]
            case "auxiliary":
                able = [index for index, kind in kinds.items() if kind.auxiliary]
            case _:
                able = []
        return self.random.choice(able or list(kinds))

    def story(self, outcomes: list[Outcome | None]) -> list[str]:
        lines = [*self.happened]
        for peer, outcome in zip(self.swarm.peers, outcomes, strict=True):
            said = outcome.digest.hex()[:8] if isinstance(outcome, RoundResult) else str(outcome)
            lines.append(f"{peer.kind}: {type(outcome).__name__} {said}")
        return lines

    # What must hold

    def check(self, outcomes: list[Outcome | None]) -> list[RoundResult]:
        """Members have no two results; and where a quorum was left in peace, each of its members has the result."""
        holders = self.swarm.check(outcomes)
        for outcome in outcomes:
            if isinstance(outcome, RoundFailed | RoundUndecided):
                assert str(outcome), outcome
        peaceful = set(range(len(outcomes))) - self.touched
        in_reach = any(self.swarm.peers[index].kind.listening for index in peaceful)  # all others can dial that one
        quorum = self.swarm.quorum()
        if in_reach and len(quorum.voters & peaceful) >= quorum.to_decide:
            undecided = {index for index in peaceful if isinstance(outcomes[index], RoundUndecided)}
            stranded = {index for index in undecided if self._is_stranded(index, outcomes, peaceful)}
            assert undecided == stranded, f"{undecided - stranded} have a quorum and are undecided"
        return holders

    def _is_stranded(self, index: int, outcomes: list[Outcome | None], peaceful: set[int]) -> bool:
        """Whether the result that was committed is only in the hands of members that have no way to this one."""
        return "committed" in str(outcomes[index]) and not any(
            isinstance(outcome, RoundResult) and outcome.averages and self._can_dial(index, other)
            for other, outcome in enumerate(outcomes)
            if other in peaceful
        )

    def _can_dial(self, one: int, other: int) -> bool:
        return self.swarm.peers[one].kind.listening or self.swarm.peers[other].kind.listening


async def play(seed: int, faults: int) -> tuple[Chaos, list[Outcome | None]]:
    """One round of a drawn group with drawn faults."""
    random_ = random.Random(f"{seed} {faults}")
    kinds = draw_kinds(random_)
    trust: Trust = "members" if seed % 2 else "strangers"
    options = AllreduceOptions(part_size_bytes=512, trust=trust)
    swarm = Swarm(kinds, seed=seed, bandwidth=BANDWIDTH, options=options, shapes=((20, 30), (7,), (250,)))
    drawn = [draw_fault(random_) for _ in range(faults)]
    chaos = Chaos(swarm, drawn, random_)
    async with swarm:
        outcomes = await swarm.round(chaos.run)
    try:
        chaos.check(outcomes)
    except AssertionError as error:
        raise AssertionError(
            "\n".join([f"seed {seed}, {faults} faults: {str(error)[:300]}", *chaos.story(outcomes)])
        ) from None
    return chaos, outcomes
