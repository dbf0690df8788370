"""All leave but one, or but the auxiliaries, or all: who comes later goes on from the newest state that there is."""

import asyncio
import itertools

import pytest

from swarmcli.events import EpochAdvanced, StateDownloaded
from tests.optim.optim_swarm import Swarm, Trainer, assist, auxiliary, meanwhile, record, until
from tests.optim.oracle import Checkpoint, Oracle, Work
from tests.simulation import within
from tests.suites import soak


async def gone(work: Work, trainer: Trainer) -> Checkpoint:
    """It leaves in order, and leaves a checkpoint behind."""
    await work.stop(trainer)
    checkpoint = await Checkpoint.of(trainer)
    await trainer.core.shutdown()
    return checkpoint


@pytest.mark.parametrize(
    ("ages", "together"),
    [
        ((4, 2), True),
        *soak([((2, 5, 4), True), ((2, 5, 4), False), *itertools.product([(7, 7, 7), (6, 7, 2)], [True, False])]),
    ],
    ids=str,
)
@within(300)
async def test_all_are_gone_and_come_back_from_checkpoints(ages: tuple[int, ...], together: bool) -> None:
    """The newest leads; those who come later follow."""
    async with Swarm() as swarm, Work() as work:
        oracle = Oracle(swarm)
        trainers = [await oracle.trainer(seed=1, pace=0.1 + 0.01 * number) for number in range(len(ages))]
        work.begin(*trainers)
        checkpoints: list[Checkpoint] = []
        for age in sorted(ages):
            await until(lambda at=age: all(trainer.epoch >= at for trainer in trainers[len(checkpoints) :]))
            checkpoints.append(await gone(work, trainers[len(checkpoints)]))
        by_age = {checkpoint.epoch: checkpoint for checkpoint in checkpoints}
        newest = by_age[max(by_age)]
        back = []
        for checkpoint in checkpoints:
            trainer = await oracle.trainer(seed=3)
            await oracle.load(trainer, checkpoint)
            back.append(trainer)
            work.begin(trainer, until=newest.epoch + 4)
            if not together:
                await asyncio.sleep(0.7)
        leader = back[checkpoints.index(newest)]
        downloads = record(leader.node, StateDownloaded)
        await work.done()
        oracle.check(back)
        if together:  # otherwise the others may have come further before it is there
            assert downloads == []
            assert leader.epochs[0].epoch == newest.epoch + 1, "it goes on from its own state"


@pytest.mark.parametrize(("seed", "kept"), [(0, False), *soak([(0, True), *itertools.product([1, 2], [True, False])])])
@within(300)
async def test_only_auxiliaries_are_left_and_trainers_come_back(seed: int, kept: bool) -> None:
    """From the start or, with soak, `kept`: from checkpoints."""
    async with Swarm(seed=seed) as swarm, Work() as work:
        oracle = Oracle(swarm)
        helper = await auxiliary(swarm)
        async with meanwhile(assist(helper)) as (helping,):
            trainers = [await oracle.trainer(seed=1) for _ in range(2)]
            work.begin(*trainers)
            await until(lambda: trainers[0].epoch >= 2)
            checkpoints = [await gone(work, trainer) for trainer in trainers]
            await asyncio.sleep(70)
            assert not helping.done()
            helped = record(helper.node, EpochAdvanced)
            back = [await oracle.trainer(seed=1) for _ in range(2)]
            for trainer, checkpoint in zip(back, checkpoints, strict=True):
                if kept:
                    await oracle.load(trainer, checkpoint)
                else:
                    trainer.core.catch_up.note_heard(None, begins_anew=True)
            work.begin(*back, until=5)
            await work.done()
            oracle.check(back)
            assert len(helped) > 1, "the auxiliary helps them"
            assert helper.position == back[0].core.position
