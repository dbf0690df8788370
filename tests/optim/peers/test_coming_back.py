"""Who was away contributes again soon after it is back, however short epochs are; nobody waits for who stays away."""

from __future__ import annotations

import asyncio
import itertools

import pytest

from tests.optim.optim_swarm import Swarm, Trainer, digests, together, until
from tests.optim.oracle import Oracle, Work
from tests.simulation import now, simulated, within
from tests.suites import soak

BATCHES = 3  # of each trainer, in an epoch of all
CASES = list(itertools.product(["frozen", "killed", "cut"], [0.3, 6.0], [1, 2]))  # absence, epoch (s), how many
FIRST = [("frozen", 0.3, 2)]


async def be_away(swarm: Swarm, absence: str, away: list[Trainer], seconds: float, gate: asyncio.Event) -> None:
    peers = [trainer.node.peer_id for trainer in away]
    match absence:
        case "frozen":
            gate.clear()
            for peer in peers:
                swarm.network.freeze(peer)
        case "cut":
            others = [trainer.node.peer_id for trainer in swarm.trainers if trainer not in away]
            swarm.network.partition(peers, [swarm.contact.peer_id, *others])
        case "killed":
            for trainer in away:
                await swarm.kill(trainer)
    await asyncio.sleep(seconds)
    swarm.network.heal()
    for peer in peers if absence == "frozen" else ():
        swarm.network.thaw(peer)
    gate.set()


@pytest.mark.parametrize(("absence", "epoch", "count"), [*FIRST, *soak(case for case in CASES if case not in FIRST)])
@within(2000)
async def test_who_comes_back_contributes_soon(absence: str, epoch: float, count: int) -> None:
    async with Swarm(seed=count) as swarm, Work() as work:
        oracle, gate = Oracle(swarm), asyncio.Event()
        gate.set()

        async def trainer() -> Trainer:
            return await oracle.trainer(seed=1, target=4 * BATCHES * 4, pace=epoch / BATCHES)

        away, staying = [await trainer() for _ in range(count)], [await trainer() for _ in range(4 - count)]
        work.begin(*staying)
        work.begin(*away, gate=gate)
        await until(lambda: min(trainer.epoch for trainer in (*away, *staying)) >= 4)
        usual = oracle.usual(staying, 0, now())
        await be_away(swarm, absence, away, 3 + epoch, gate)
        if absence == "killed":
            for gone in away:
                work._tasks.pop(gone).cancel()
            away = [await trainer() for _ in away]
            work.begin(*away)
        came = now()
        for back in away:
            async with asyncio.timeout(max(3 * epoch, 3.0) + 4 * epoch + 12):  # lost contacts are probed after 8 s
                await until(lambda: oracle.contributed(back, came))  # noqa: B023
        gaps = [gap for trainer in staying for gap in oracle.gaps_begun(trainer, came)]
        assert max(gaps, default=0.0) < 3 * usual + 3, "nobody waits long for who comes back"
        await work.all_until(max(trainer.epoch for trainer in staying) + 3)
        oracle.check([*away, *staying])


@pytest.mark.parametrize("count", [2, *soak([3])])
@simulated
async def test_a_trainer_that_takes_no_steps_holds_the_others_up_once(count) -> None:
    """Its connections answer and it was in the group, so the round waits for its gradients; the next do not."""
    async with Swarm() as swarm:
        trainers = [await swarm.trainer(averaging_timeout=20.0) for _ in range(count)]
        absent, *others = trainers
        await together(*(trainer.train(3) for trainer in trainers))
        async with asyncio.timeout(60):
            await together(*(trainer.train(6) for trainer in others))
            await asyncio.sleep(absent.core.config.averaging_timeout)  # the round's time is over for it, too
        assert absent.epoch == 3 and absent.core.report().phase == "joining"
        async with asyncio.timeout(30):
            await together(*(trainer.train(9) for trainer in trainers))
        assert len(digests(trainers)) == 1
        assert absent.core.report().phase == "training"
