"""Delayed ends of epochs that fail, last, or are in the way of others: nothing counts twice, nothing is lost."""

import asyncio
import copy

import pytest
import torch

from swarmcli.events import Noticed
from swarmcli.optim.gradients.accumulator import Weighed
from swarmcli.optim.modes.base import Timing
from tests.optim.epoch.delayed_swarm import DelayedSwarm, DelayedTrainer
from tests.optim.optim_swarm import TARGET, digests, record, together, until
from tests.simulation import simulated, within
from tests.suites import soak

# The end of an epoch is told step by step for each in test_end.py.
every_delay = pytest.mark.parametrize(
    "timing", [Timing.DELAYED_AVERAGING, *soak([Timing.DELAYED_STEP])], ids=lambda timing: timing.name
)


def accounted(trainer: DelayedTrainer) -> int:
    """Samples in averages, on their way to one, or taken in for the next."""
    handed_in = (trainer.core._end._frozen or Weighed()).samples
    return sum(event.own_samples for event in trainer.epochs) + handed_in + trainer.core.work.samples


@every_delay
@within(300)
async def test_a_newcomer_downloads_while_ends_are_under_way(timing: Timing) -> None:
    async with DelayedSwarm(seed=6, latency=0.05) as swarm:
        first = [await swarm.delayed(timing, seed=1, batch_size=2, pace=0.5) for _ in range(2)]

        async def join_late() -> None:
            await until(lambda: first[0].epoch == 2 and bool(first[0].core._end.under_way))
            late = await swarm.delayed(timing, seed=9, batch_size=2, pace=0.5)
            await late.core.join()
            assert torch.equal(late.weights, late.host_weights), "it begins with what it downloaded"
            await late.train(6)

        await together(join_late(), *(trainer.train(6) for trainer in first))
        await together(*(trainer.core.join() for trainer in swarm.trainers))
        assert len(digests(swarm.trainers)) == 1
        assert sum(event.own_samples > 0 for event in swarm.trainers[2].epochs) >= 3


@every_delay
@simulated
async def test_an_error_of_the_background_reaches_the_next_step(timing: Timing) -> None:
    asyncio.get_running_loop().set_exception_handler(lambda *_: None)
    async with DelayedSwarm(seed=8) as swarm:
        trainer = await swarm.delayed(timing, seed=1, batch_size=TARGET)
        await trainer.train(2)
        await trainer.core._end.over()
        step = trainer.place.optimizer.step

        def fails() -> None:
            raise RuntimeError("no memory left for the statistics")

        trainer.place.optimizer.step = fails
        with pytest.raises(RuntimeError, match="statistics"):
            for _ in range(3):
                await trainer.compute()
        trainer.place.optimizer.step = step
        before = trainer.epoch
        await trainer.train(before + 2)


@within(300)
async def test_who_stops_waiting_for_a_round_may_go_on_later() -> None:
    """The wait is interrupted as by a KeyboardInterrupt: the end of the epoch goes on by itself. Nobody knows with
    which parameters the trainer computes meanwhile, so these samples are told as lost."""
    async with DelayedSwarm(seed=8, latency=0.25) as swarm:
        trainers = [await swarm.delayed(Timing.DELAYED_STEP, seed=1, batch_size=TARGET // 2) for _ in range(2)]
        said = record(trainers[0].node, Noticed)
        await together(*(trainer.train(3) for trainer in trainers))
        await together(*(trainer.core._end.over() for trainer in trainers))
        async with asyncio.TaskGroup() as group:
            group.create_task(trainers[1].train(8))
            interrupted = group.create_task(trainers[0].train(8))
            await until(lambda: bool(trainers[0].core._end.under_way))
            interrupted.cancel()
            await asyncio.wait([interrupted])
            group.create_task(trainers[0].train(8))
        assert len(digests(trainers)) == 1
        lost = sum(int(each.text.split()[0]) for each in said if "are lost" in each.text)
        assert lost == trainers[0].batch_size
        for trainer, missing in zip(trainers, (lost, 0), strict=True):
            assert accounted(trainer) + missing == sum(map(len, trainer.rows))


@every_delay
@within(300)
async def test_shutting_down_in_the_middle_of_a_round_leaves_nothing(timing: Timing) -> None:
    async with DelayedSwarm(seed=3, latency=0.2) as swarm:
        trainers = [await swarm.delayed(timing, seed=1) for _ in range(2)]
        async with asyncio.TaskGroup() as group:
            leaving, staying = (group.create_task(trainer.train(20)) for trainer in trainers)
            await until(lambda: trainers[0].epoch >= 3 and bool(trainers[0].core._end.under_way))
            leaving.cancel()
            await trainers[0].core.shutdown()
            await until(lambda: trainers[1].epoch >= 8)
            staying.cancel()


@every_delay
@within(300)
async def test_a_checkpoint_waits_for_what_is_under_way_and_continues_bit_for_bit(timing: Timing) -> None:
    async with DelayedSwarm(seed=3, latency=0.1) as swarm:
        trainer = await swarm.delayed(timing, seed=1, batch_size=TARGET)
        await trainer.train(5)
        saved = copy.deepcopy(await trainer.core.state_dict())
        assert saved["swarm"]["epoch"] == trainer.epoch
        weights = trainer.weights.detach().clone()
        assert torch.equal(weights, trainer.host_weights)
        data = trainer.data.get_state()
        for _ in range(4):
            await trainer.compute()
        await trainer.core._end.over()
        expected, reached = trainer.host_weights, trainer.epoch
        await trainer.core.shutdown()
        await trainer.node.shutdown()

        again = await swarm.delayed(timing, seed=2, batch_size=TARGET)
        with torch.no_grad():
            again.weights.copy_(weights)
        await again.core.load_state_dict(saved)
        again.data.set_state(data)
        for _ in range(4):
            await again.compute()
        await again.core._end.over()
        assert (again.epoch, reached) == (reached, saved["swarm"]["epoch"] + 4)
        assert torch.equal(again.host_weights, expected)


@within(100)
async def test_a_batch_under_which_the_model_changed_is_dropped() -> None:
    """The batch's step was interrupted while it waited for the end of an epoch, during which the model gets the
    parameters of the last epoch."""
    async with DelayedSwarm() as swarm:
        trainer = await swarm.delayed(Timing.DELAYED_STEP, batch_size=TARGET)
        await trainer.train(2)
        gate, check, notices = asyncio.Event(), trainer.core.replica.check, record(trainer.node, Noticed)

        async def gated() -> None:
            await gate.wait()
            await check()

        trainer.core.replica.check = gated  # type: ignore[method-assign]
        step = asyncio.ensure_future(trainer.compute())
        await until(lambda: trainer.core._end.under_way)
        step.cancel()
        await asyncio.wait([step])
        before = trainer.weights.detach().clone()
        gate.set()
        await until(lambda: not torch.equal(trainer.weights, before))
        await trainer.core.step(TARGET)
        assert [event.text for event in notices if f"{TARGET} samples of this peer are lost" in event.text]
        await trainer.train(5)
