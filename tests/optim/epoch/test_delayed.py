"""Delayed steps and delayed averaging: training goes on meanwhile, and everything is one round late, no more."""

import itertools

import pytest
import torch

from swarmcli.optim.modes.base import Timing
from tests.optim.epoch.delayed_swarm import DelayedSwarm, one_round_late
from tests.optim.optim_swarm import TARGET, adamw, digests, momentum, reference, together
from tests.simulation import simulated
from tests.suites import soak

EPOCHS = 6
TIGHT = {"rtol": 1e-10, "atol": 1e-12}
DELAYED = [Timing.DELAYED_STEP, Timing.DELAYED_AVERAGING]


FIRST = [(adamw, (4, 6), Timing.DELAYED_STEP), (momentum, (4, 6), Timing.DELAYED_AVERAGING)]
EVERYTHING = itertools.product((momentum, adamw), ((5,), (4, 6), (2, 3, 6)), DELAYED)


@pytest.mark.parametrize(
    ("make", "sizes", "timing"),
    [*FIRST, *soak(case for case in EVERYTHING if case not in FIRST)],
    ids=lambda value: str(value) if isinstance(value, tuple) else None,
)
@simulated
async def test_it_equals_one_process_that_is_one_round_late(timing: Timing, sizes: tuple[int, ...], make) -> None:
    async with DelayedSwarm(seed=len(sizes), latency=0.1) as swarm:
        for number, size in enumerate(sizes):
            await swarm.delayed(timing, seed=3, make=make, batch_size=size, pace=0.1 + 0.07 * number)
        await together(*(trainer.train(EPOCHS) for trainer in swarm.trainers))
        batches = swarm.batches(EPOCHS)
        assert all(len(rows) >= TARGET for rows in batches)
        assert [event.samples for event in swarm.trainers[0].epochs] == [len(rows) for rows in batches]
        expected = one_round_late(3, batches, make)
        for trainer in swarm.trainers:
            torch.testing.assert_close(trainer.host_weights, expected, **TIGHT)
        assert len(digests(swarm.trainers)) == 1
        in_time = reference(3, batches, make)
        assert not torch.allclose(in_time, expected, rtol=1e-3), "the staleness makes a difference here"
        if timing is Timing.DELAYED_AVERAGING and len(sizes) > 1:
            assert all(len(trainer.ahead) >= EPOCHS // 2 for trainer in swarm.trainers)


@simulated
async def test_a_delayed_round_costs_the_trainer_no_waiting() -> None:
    """A round trip takes half a second, a round takes several, and the trainer's steps still wait for nothing."""
    async with DelayedSwarm(seed=2, latency=0.25) as swarm:
        for _ in range(2):
            await swarm.delayed(Timing.DELAYED_AVERAGING, seed=3, batch_size=1, pace=0.5)
        await together(*(trainer.train(5) for trainer in swarm.trainers))
        for trainer in swarm.trainers:
            settled = trainer.waits[len(trainer.waits) // 2 :]
            assert max(settled) < 0.05
            assert max(event.averaging_seconds for event in trainer.epochs) > 1.0
            assert len(trainer.ahead) > 4


@simulated
async def test_an_epoch_that_is_over_before_the_last_one_ended_waits_for_it() -> None:
    """Rounds take longer than to compute an epoch: no peer takes in more than its part of one meanwhile."""
    async with DelayedSwarm(seed=2, latency=0.5) as swarm:
        for size in (2, 4):
            await swarm.delayed(Timing.DELAYED_AVERAGING, seed=3, batch_size=size, pace=0.05)
        await together(*(trainer.train(6) for trainer in swarm.trainers))
        parts = [trainer.core._end._share * TARGET for trainer in swarm.trainers]
        assert sum(parts) == pytest.approx(TARGET)
        for trainer, part in zip(swarm.trainers, parts, strict=True):
            late = trainer.ahead[len(trainer.ahead) // 2 :]
            assert part - 2 * trainer.batch_size <= max(late) < part + trainer.batch_size
            assert max(trainer.waits) > 1.0
        assert len(digests(swarm.trainers)) == 1
