"""Training together equals one process that sees the same samples as whole batches."""

import pytest
import torch

from tests.optim.optim_swarm import TARGET, Swarm, adamw, digests, momentum, reference, together
from tests.simulation import now, simulated
from tests.suites import soak

EPOCHS = 6
TIGHT = {"rtol": 1e-10, "atol": 1e-12}


SIZES = [(5,), (4, 4), (1, 7), (2, 3, 6), (1, 2, 3, 4, 5)]
OTHERS = [(sizes, make) for sizes in SIZES for make in (momentum, adamw) if (sizes, make) != ((2, 3, 6), momentum)]


@pytest.mark.parametrize(("sizes", "make"), [((2, 3, 6), momentum), *soak(OTHERS)])
@simulated
async def test_unequal_batches_at_unequal_paces(sizes: tuple[int, ...], make) -> None:
    async with Swarm(seed=len(sizes)) as swarm:
        for number, size in enumerate(sizes):
            await swarm.trainer(seed=3, make=make, batch_size=size, pace=0.1 + 0.07 * number)
        await together(*(trainer.train(EPOCHS) for trainer in swarm.trainers))
        batches = swarm.batches(EPOCHS)
        assert all(len(rows) >= TARGET for rows in batches)
        expected = reference(3, batches, make)
        for trainer in swarm.trainers:
            torch.testing.assert_close(trainer.weights.detach(), expected, **TIGHT)
        assert len(digests(swarm.trainers)) == 1
        assert len({trainer.core.position for trainer in swarm.trainers}) == 1
        for trainer in swarm.trainers:
            assert [event.samples for event in trainer.epochs] == [len(rows) for rows in batches]


@pytest.mark.parametrize("seed", range(5))
@simulated
async def test_unlike_weights_at_the_same_moment_end_up_in_one_lineage(seed: int) -> None:
    async with Swarm(seed=seed) as swarm:
        trainers = [await swarm.trainer(seed=number) for number in range(3)]
        await together(*(trainer.train(3) for trainer in trainers))
        assert len(digests(trainers)) == 1


@simulated
async def test_alone_it_does_not_wait_for_others() -> None:
    async with Swarm() as swarm:
        trainer = await swarm.trainer(seed=1, batch_size=TARGET, pace=0.1)
        began = now()
        await trainer.train(EPOCHS)
        assert now() - began < EPOCHS * 0.5
        torch.testing.assert_close(trainer.weights.detach(), reference(1, swarm.batches(EPOCHS)), **TIGHT)
