"""Who was away contributes again soon after it has caught up, however short the epochs are; nobody waits for who stays
away."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Literal

import pytest

from swarmcli.events import RoundsReplayed, StateDownloaded
from swarmcli.optim.peers.directory import PeerDirectory, ReportOptions
from swarmcli.testing import virtual_time
from tests.optim.optim_swarm import Swarm, Trainer, until
from tests.optim.oracle import Oracle, Work, now
from tests.suites import soak

Absence = Literal["frozen", "killed", "cut"]
BATCHES = 3  # of each trainer, in an epoch of all


@dataclass(frozen=True)
class Drawn:
    """A swarm, and who is away from it."""

    peers: int
    away: int  # of these
    absence: Absence
    epoch: float  # seconds, to compute
    catching_up: float  # seconds, for a download or the averages of one round
    gone: float  # seconds
    latency: float  # seconds, one way

    @classmethod
    def of(cls, seed: int) -> Drawn:
        draw = random.Random(seed)

        def between(least: float, most: float) -> float:
            return math.exp(draw.uniform(math.log(least), math.log(most)))

        peers, epoch = draw.randint(3, 6), between(0.1, 10)
        return cls(
            peers,
            draw.randint(1, peers // 2),
            draw.choice(["frozen", "killed", "cut"]),
            epoch,
            min(between(0.05, 5), epoch / 3),  # a peer that needs longer than an epoch for a round is never in step
            draw.choice([1, 3]) * draw.uniform(0.5, 4) + draw.uniform(0, 2) * epoch,
            draw.choice([0.0005, 0.002, 0.01]),
        )

    @property
    def aim(self) -> float:
        """Seconds in which it contributes from its first download on. That takes a while itself, and so do the averages
        of two rounds that end meanwhile."""
        return max(3 * self.epoch, 3.0) + 3 * self.catching_up


def slowly(work: Callable[..., Awaitable[Any]], seconds: float) -> Callable[..., Awaitable[Any]]:
    async def slow(*args: Any, **options: Any) -> Any:  # what is asked for is served at once, and arrives late
        done = await work(*args, **options)
        await asyncio.sleep(seconds)
        return done

    return slow


class Absentees:
    """A swarm in which some go away and come back."""

    def __init__(self, swarm: Swarm, drawn: Drawn, work: Work) -> None:
        self.swarm, self.drawn, self.work = swarm, drawn, work
        self.oracle = Oracle(swarm)
        self.gate = asyncio.Event()
        self.gate.set()

    async def trainer(self) -> Trainer:
        drawn = self.drawn
        pace = drawn.epoch / BATCHES
        trainer = await self.oracle.trainer(seed=1, target=4 * BATCHES * drawn.peers, pace=pace)
        core = trainer.core
        core.exchange.download = slowly(core.exchange.download, drawn.catching_up)
        archive = core.work.averager.archive
        archive.fetch = slowly(archive.fetch, drawn.catching_up)
        return trainer

    async def run(self) -> None:
        drawn, oracle = self.drawn, self.oracle
        trainers = [await self.trainer() for _ in range(drawn.peers)]
        away, staying = trainers[: drawn.away], trainers[drawn.away :]
        self.work.begin(*staying)
        self.work.begin(*away, gate=self.gate)
        await until(lambda: min(trainer.epoch for trainer in trainers) >= 4)
        usual = oracle.usual(staying, 0, now())
        back = await self.be_away(away)
        came = now()
        caught_up = {trainer: self.when_caught_up(trainer) for trainer in back}
        for trainer in back:
            async with asyncio.timeout(100):
                await until(lambda: oracle.contributed(trainer, came))  # noqa: B023
            _, moment = oracle.watched[trainer].first_contribution(came)
            worst = moment - min([moment, *caught_up[trainer]]) - drawn.aim
            assert worst <= 0, f"{trainer.node.peer_id.short} came back {worst:.1f} s too late"
        gaps = [gap for trainer in staying for gap in oracle.gaps_begun(trainer, came)]
        assert max(gaps, default=0.0) < 3 * usual + 3, "nobody waits long for who comes back"
        await self.work.all_until(max(trainer.epoch for trainer in staying) + 3)
        oracle.check([*back, *staying])

    def when_caught_up(self, trainer: Trainer) -> list[float]:
        moments: list[float] = []
        trainer.node.endpoint.events.subscribe(
            lambda event: moments.append(now()) if isinstance(event, StateDownloaded | RoundsReplayed) else None
        )
        return moments

    async def be_away(self, away: list[Trainer]) -> list[Trainer]:
        network, peers = self.swarm.network, [trainer.node.peer_id for trainer in away]
        match self.drawn.absence:
            case "frozen":
                for peer in peers:
                    network.freeze(peer)
                self.gate.clear()
                await asyncio.sleep(self.drawn.gone)
                for peer in peers:
                    network.thaw(peer)
                self.gate.set()
            case "cut":
                others = [t.node.peer_id for t in self.swarm.trainers if t not in away]
                network.partition(peers, [self.swarm.contact.peer_id, *others])
                await asyncio.sleep(self.drawn.gone)
                network.heal()
            case "killed":
                for trainer in away:
                    await self.swarm.kill(trainer)
                    self.work._tasks.pop(trainer).cancel()
                await asyncio.sleep(self.drawn.gone)
                away = [await self.trainer() for _ in away]
                self.work.begin(*away)
        return away


@pytest.mark.parametrize("seed", [141, *soak(set(range(300)) - {141})])
def test_who_comes_back_contributes_soon(seed: int) -> None:
    async def main() -> None:
        drawn = Drawn.of(seed)
        async with Swarm(seed=seed, latency=drawn.latency) as swarm, Work() as work:
            await Absentees(swarm, drawn, work).run()

    virtual_time.run(main(), seed=seed, timeout=2000)


def test_a_newcomer_hears_at_once_that_the_others_stepped_between_their_answers_and_its_search(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Their searches for the next group are older than its own. Otherwise it would hear of that by their reports."""
    monkeypatch.setattr(PeerDirectory, "options", ReportOptions(refresh_period=30.0))

    async def main() -> None:
        async with Swarm(seed=1) as swarm, Work() as work:
            oracle = Oracle(swarm)
            staying = [await oracle.trainer(seed=1, target=160, pace=0.1) for _ in range(2)]
            work.begin(*staying)
            await until(lambda: staying[0].epoch == 2)
            newcomer = await oracle.trainer(seed=2, target=160, pace=0.1)
            survey, came = newcomer.core.survey.survey, now()

            async def while_they_step() -> Any:
                answers = await survey()
                if newcomer.epoch in {word.position.epoch for word in answers.values()}:
                    newcomer.core.survey.survey = survey  # type: ignore[method-assign]
                    await until(lambda: min(trainer.epoch for trainer in staying) > newcomer.epoch)
                return answers

            newcomer.core.survey.survey = while_they_step  # type: ignore[method-assign]
            work.begin(newcomer)
            await until(lambda: newcomer.core.phase == "training")
            settled, epoch = now(), newcomer.epoch
            assert epoch < staying[0].epoch
            await until(lambda: newcomer.epoch > epoch)
            assert now() - settled < 2.0, "a step waits 1.5 s for a round that should begin by the reports"
            await until(lambda: oracle.contributed(newcomer, came))

    virtual_time.run(main(), seed=1, timeout=200)
