"""Training together equals one process that sees the same samples as whole batches."""

import asyncio

import pytest
import torch

from swarmcli.testing import virtual_time
from tests.optim.optim_swarm import TARGET, Swarm, adamw, digests, momentum, reference, together
from tests.suites import soak

EPOCHS = 6
TIGHT = {"rtol": 1e-10, "atol": 1e-12}


async def halves(swarm: Swarm, seeds: tuple[int, int], epochs: int, make=momentum) -> None:
    """Two trainers; in every epoch each computes exactly half of the batch and then waits for its end."""
    trainers = []
    for seed in seeds:
        trainers.append(await swarm.trainer(seed=seed, make=make, batch_size=TARGET // 2))
        await trainers[-1].core.join()

    async def train(trainer) -> None:
        for epoch in range(epochs):
            await trainer.compute()
            await trainer.follow(until=epoch + 1)

    await together(*(train(trainer) for trainer in trainers))


@pytest.mark.parametrize(("seeds", "make"), [((1, 2), adamw), *soak([((1, 1), momentum), ((1, 2), momentum)])])
def test_two_trainers_with_half_the_batch_each(seeds: tuple[int, int], make) -> None:
    """With unlike initial weights the later one downloads before its first gradient."""

    async def main() -> None:
        async with Swarm() as swarm:
            await halves(swarm, seeds, EPOCHS, make)
            assert [len(rows) for rows in swarm.batches(EPOCHS)] == [TARGET] * EPOCHS
            expected = reference(1, swarm.batches(EPOCHS), make)
            for trainer in swarm.trainers:
                torch.testing.assert_close(trainer.weights.detach(), expected, **TIGHT)
            assert len(digests(swarm.trainers)) == 1

    virtual_time.run(main())


SIZES = [(5,), (4, 4), (1, 7), (2, 3, 6), (1, 2, 3, 4, 5)]
OTHERS = [(sizes, make) for sizes in SIZES for make in (momentum, adamw) if (sizes, make) != ((2, 3, 6), momentum)]


@pytest.mark.parametrize(("sizes", "make"), [((2, 3, 6), momentum), *soak(OTHERS)])
def test_unequal_batches_at_unequal_paces(sizes: tuple[int, ...], make) -> None:
    async def main() -> None:
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

    virtual_time.run(main())


@pytest.mark.parametrize("seed", range(5))
def test_unlike_weights_at_the_same_moment_end_up_in_one_lineage(seed: int) -> None:
    async def main() -> None:
        async with Swarm(seed=seed) as swarm:
            trainers = [await swarm.trainer(seed=number) for number in range(3)]
            await together(*(trainer.train(3) for trainer in trainers))
            assert len(digests(trainers)) == 1

    virtual_time.run(main(), seed=seed)


def test_alone_it_does_not_wait_for_others() -> None:
    async def main() -> None:
        async with Swarm() as swarm:
            trainer = await swarm.trainer(seed=1, batch_size=TARGET, pace=0.1)
            began = asyncio.get_running_loop().time()
            await trainer.train(EPOCHS)
            assert asyncio.get_running_loop().time() - began < EPOCHS * 0.5
            torch.testing.assert_close(trainer.weights.detach(), reference(1, swarm.batches(EPOCHS)), **TIGHT)

    virtual_time.run(main())
