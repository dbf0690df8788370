"""Peers whose limits change at random moments while they train, and the clock by which their epochs are judged.

While nobody computes the clock stands. An epoch is judged by the least favourable limits that it has seen: a round that
was planned for them is not planned anew when they are lifted.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Callable
from dataclasses import dataclass

import torch

from swarmcli.dht import DHTNode
from swarmcli.events import Event, Noticed
from swarmcli.network.identity import PeerID
from swarmcli.optim.arguments import averager_config
from swarmcli.optim.auxiliary import AuxiliaryCore
from swarmcli.optim.config import OptimizerConfig, PeerContext, PeerDescription, Role
from swarmcli.optim.core import OptimizerCore
from swarmcli.optim.modes.base import Trained
from swarmcli.testing import virtual_time
from tests.optim.optim_swarm import Swarm
from tests.simulation import now

ELEMENTS = 100_000  # of float32: a round's gradients take 0.4 MB
MOST_BEHIND = 60  # epochs for which others may go on until everybody is back
CALM_EPOCHS = 3  # that have to end once nobody is limited any more
NBYTES = 4 * ELEMENTS
BATCH = 16  # samples
LOOK = 0.5  # seconds between two looks at everyone
UPLOADS = (10e3, 10e3, 30e3, 100e3, 500e3, 2e6)  # bytes per second, of which a limit is drawn
DOWNLOADS = (20e3, 100e3, 500e3, 2e6)


@dataclass(frozen=True)
class Allowance:
    """An epoch may take `times` × T + `seconds`; T: see `usual_epoch`, of this epoch or the one before: rounds get the
    time that the last ones needed, and one whose members are lost may use it up. The first epoch takes `first` seconds
    more: nobody knows anybody's line before a round, so a peer that turns slow in it gets a third of a round's time."""

    times: float = 3.0
    seconds: float = 5.0
    first: float = 45.0

    def of(self, usual: float, epoch: int) -> float:
        return self.times * usual + self.seconds + (0.0 if epoch else self.first)


LIMITS_AND_PAUSES = ("upload", "upload", "download", "hours", "pause", "none")


class Unlike:
    """One peer of a run: a trainer, a monitor or an auxiliary, with a line and a pace of its own."""

    def __init__(
        self, node: DHTNode, role: Role, target: int, pace: float, elements: int = ELEMENTS, **averaging: float
    ) -> None:
        """`pace` is in samples per second; 0 for whoever does not compute. `elements`: of float32, in the model.
        `averaging`: options of the averager."""
        self.node, self.role, self.pace, self.target = node, role, pace, target
        self.name = f"{role} {node.peer_id.short}"
        self.said: list[str] = []
        self.ends = self.frozen = False
        self.computed = 0  # samples
        self.upload: float | None = None
        self.download: float | None = None
        self._weights = torch.nn.Parameter(torch.zeros(elements))
        config = OptimizerConfig("run", target, description=PeerDescription(role, name=self.name))
        peer = PeerContext(node, config, averager_config(config, auxiliary=role == "auxiliary", options=averaging))
        self.core: OptimizerCore | AuxiliaryCore
        if role == "auxiliary":
            self.core = AuxiliaryCore(peer, [self._weights])
        else:
            self.core = OptimizerCore(peer, Trained(torch.optim.SGD([self._weights], lr=0.1), None, ()))
        node.endpoint.events.subscribe(self._hear)

    def _hear(self, event: Event) -> None:
        if isinstance(event, Noticed):
            self.said.append(event.text)

    @property
    def epoch(self) -> int:
        return self.core.position.epoch

    @property
    def computes(self) -> bool:
        return self.pace > 0 and not self.core.pausing.is_asked and not self.frozen

    async def run(self) -> None:
        """The loop of a role, which obeys a pause."""
        core = self.core
        if isinstance(core, AuxiliaryCore):
            while not self.ends:
                await core.step()
            return
        await core.join()
        while not self.ends:
            if core.pausing.is_asked:
                await core.step(0)
            elif core.pausing.away:
                await core.join()
            elif not self.pace:
                await core.step(0)
            else:
                await asyncio.sleep(BATCH / self.pace)
                if self.frozen:
                    continue
                self._weights.grad = torch.full_like(self._weights, 1e-3)
                self.computed += BATCH
                await core.step(BATCH)

    def limit(self, upload: float | None, download: float | None) -> None:
        self.upload, self.download = upload, download
        self.node.endpoint.limit_rates(upload, download)

    def pause(self, asked: bool) -> None:
        (self.core.pause if asked else self.core.resume)()


def usual_epoch(peers: list[Unlike], target: int) -> float:
    """Seconds that an epoch takes with those trainers that make it shortest, their round included; infinite if nobody
    computes. It adds the trainers one by one, the quickest line first, and takes the shortest of these epochs."""
    best, pace = math.inf, 0.0
    for peer in sorted(filter(lambda peer: peer.computes, peers), key=sending_time):
        pace += peer.pace
        best = min(best, target / pace + sending_time(peer))
    return best


def sending_time(peer: Unlike) -> float:
    """Seconds for which a round keeps the peer's line busy: it sends and receives gradients and averages once each."""
    slowest = min(peer.upload or math.inf, peer.download or math.inf)
    return 2 * NBYTES / slowest


class Clock:
    """Tells how much of the allowance of the epoch under way has passed."""

    def __init__(self, peers: list[Unlike], target: int, allowance: Allowance) -> None:
        self.peers, self.target, self.allowance = peers, target, allowance
        self.epoch, self.began, self.epochs = 0, now(), 0  # under way; since when; ended
        self.seconds, self.usual = 0.0, 0.0  # of this epoch, without those in which nobody computed; T
        self.before = 0.0  # T of the last epoch
        self.longest = 0.0  # part of the allowance that an epoch has taken

    def look(self, seconds: float) -> None:
        """Notes that `seconds` have passed with the limits as they are."""
        epoch = max(peer.epoch for peer in self.peers)
        if epoch > self.epoch:
            self.epochs += 1
            self.begin(epoch)
        usual = usual_epoch(self.peers, self.target)
        if usual < math.inf:
            self.seconds += seconds
            self.usual = max(self.usual, usual)
        self.longest = max(self.longest, self.passed)

    def begin(self, epoch: int) -> None:
        self.epoch, self.began, self.seconds, self.usual, self.before = epoch, now(), 0.0, 0.0, self.usual

    @property
    def passed(self) -> float:
        """The part of the allowance of this epoch that has passed."""
        return self.seconds / self.allowance.of(max(self.usual, self.before), self.epoch)

    @property
    def verdict(self) -> str:
        where = ", ".join(f"{peer.name} at {peer.epoch} with {_have(peer)}" for peer in self.peers)
        lately = "; ".join(f"{peer.name}: {text}" for peer in self.peers for text in peer.said[-2:])
        return (
            f"epoch {self.epoch} has not ended {now() - self.began:.0f} s after it began at {self.began:.0f} s "
            f"(T is {self.usual:.1f} s, {self.passed:.2f} of the allowance): {where}; {lately}"
        )


def _have(peer: Unlike) -> str:
    core = peer.core
    samples = f"{core.work.samples} samples" if isinstance(core, OptimizerCore) else "no samples of its own"
    limits = ", ".join(f"{way} {rate:g}" for way, rate in (("up", peer.upload), ("down", peer.download)) if rate)
    return f"{samples}{' and ' + limits if limits else ''}{', paused' if core.pausing.is_asked else ''}"


async def now_and_then(peers: list[Unlike], drawn: random.Random, every: float, seconds: float) -> None:
    """Changes what somebody lends, at random moments, for `seconds`."""
    ends_at = now() + seconds
    while now() < ends_at:
        await asyncio.sleep(drawn.expovariate(1 / every))
        peer = drawn.choice(peers)
        match drawn.choice(LIMITS_AND_PAUSES):
            case "upload":
                peer.limit(drawn.choice(UPLOADS), peer.download)
            case "download":
                peer.limit(peer.upload, drawn.choice(DOWNLOADS))
            case "none":
                peer.limit(None, None)
                peer.pause(False)
            case "pause" if not peer.core.pausing.is_asked:
                peer.pause(True)
            case "hours":  # a pause that ends by the clock
                peer.pause(True)
                asyncio.get_running_loop().call_later(drawn.uniform(5, 60), peer.pause, False)
            case _:
                peer.pause(False)


def search(
    seed: int, *, allowance: Allowance, afterwards: Allowance, seconds: float = 60.0, every: float = 5.0
) -> Clock:
    """Runs 2 to 5 peers, drawn by the seed, whose limits change for `seconds`; then all limits are lifted.

    Raises AssertionError if an epoch took longer than allowed, if epochs do not end as they should once the limits are
    lifted, or if a peer has not come back into step by then.
    """
    drawn = random.Random(seed)
    trainers = drawn.randint(1, 3)
    helpers: list[Role] = [role for role in ("monitor", "auxiliary") if drawn.random() < 0.7]
    if trainers + len(helpers) < 2:
        helpers = ["monitor"]
    paces = [drawn.uniform(20, 100) for _ in range(trainers)]
    target = round(sum(paces) * drawn.uniform(2, 6))
    latency = latencies(drawn)

    async def main() -> Clock:
        async with Swarm(seed, latency=latency) as swarm:
            roles: list[tuple[Role, float]] = [("trainer", pace) for pace in paces] + [(role, 0.0) for role in helpers]
            peers = []
            for role, pace in roles:
                behind_firewall = role == "auxiliary" and drawn.random() < 0.5
                peers.append(Unlike(await swarm.node(client_mode=behind_firewall), role, target, pace))
            clock = Clock(peers, target, allowance)
            try:
                async with asyncio.TaskGroup() as tasks:
                    for peer in peers:
                        await peer.core.start()
                        tasks.create_task(peer.run(), name=peer.name)
                    changing = tasks.create_task(now_and_then(peers, drawn, every, seconds))
                    while not changing.done():
                        await asyncio.sleep(LOOK)
                        clock.look(LOOK)
                        assert clock.passed <= 1, clock.verdict
                    for peer in peers:
                        peer.limit(None, None)
                        peer.pause(False)
                    clock.allowance = afterwards
                    clock.begin(clock.epoch)
                    calm = clock.epoch + CALM_EPOCHS
                    while min(peer.epoch for peer in peers) < calm:
                        await asyncio.sleep(LOOK)
                        clock.look(LOOK)
                        assert clock.passed <= 1, clock.verdict
                        assert clock.epoch < calm + MOST_BEHIND, f"somebody does not come back: {clock.verdict}"
                    for peer in peers:
                        peer.ends = True
            finally:
                for peer in peers:
                    await peer.core.shutdown()
            return clock

    return virtual_time.run(main(), seed=seed, timeout=20 * seconds)


def latencies(drawn: random.Random) -> Callable[[PeerID, PeerID], float]:
    """Returns each pair's latency: 2 to 75 ms one way, drawn once."""
    salt = drawn.getrandbits(32)
    known: dict[tuple[str, ...], float] = {}

    def latency(source: PeerID, target: PeerID) -> float:
        pair = tuple(sorted((source.text, target.text)))
        if pair not in known:
            known[pair] = random.Random(f"{salt} {pair}").uniform(0.002, 0.075)
        return known[pair]

    return latency
