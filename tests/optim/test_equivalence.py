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


@pytest.mark.parametrize("make", [adamw, *soak([momentum])])
def test_two_trainers_with_half_the_batch_each(make) -> None:
    async def main() -> None:
        async with Swarm() as swarm:
            await halves(swarm, (1, 1), EPOCHS, make)
            assert [len(rows) for rows in swarm.batches(EPOCHS)] == [TARGET] * EPOCHS
            expected = reference(1, swarm.batches(EPOCHS), make)
            for trainer in swarm.trainers:
                torch.testing.assert_close(trainer.weights.detach(), expected, **TIGHT)
            assert len(digests(swarm.trainers)) == 1

    virtual_time.run(main())


def test_unlike_initial_weights_the_later_one_downloads_before_its_first_gradient() -> None:
    async def main() -> None:
        async with Swarm() as swarm:
            await halves(swarm, (1, 2), EPOCHS)
            assert [len(rows) for rows in swarm.batches(EPOCHS)] == [TARGET] * EPOCHS
            expected = reference(1, swarm.batches(EPOCHS))
            for trainer in swarm.trainers:
                torch.testing.assert_close(trainer.weights.detach(), expected, **TIGHT)

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


@pytest.mark.parametrize("sizes", soak([((5,),), ((1, 7),), ((2, 3, 6),), ((1, 2, 3, 4, 5),)]), ids=str)
def test_single_precision_stays_within_its_rounding(sizes: tuple[int, ...]) -> None:
    """With SGD; Adam would amplify rounding where gradients are noise."""

    async def main() -> None:
        async with Swarm(seed=len(sizes)) as swarm:
            for number, size in enumerate(sizes):
                await swarm.trainer(seed=3, batch_size=size, pace=0.1 + 0.07 * number, dtype=torch.float32)
            await together(*(trainer.train(EPOCHS) for trainer in swarm.trainers))
            batches = swarm.batches(EPOCHS)
            assert len(digests(swarm.trainers)) == 1
            single, double = reference(3, batches), reference(3, [rows.double() for rows in batches])
            assert single.dtype == torch.float32
            for trainer in swarm.trainers:
                torch.testing.assert_close(trainer.weights.detach(), single, rtol=1e-5, atol=1e-6)
                torch.testing.assert_close(trainer.weights.detach().double(), double, rtol=1e-5, atol=1e-6)

    virtual_time.run(main())


@pytest.mark.parametrize("seed", range(5))
def test_two_that_start_at_the_same_moment_are_one_lineage(seed: int) -> None:
    async def main() -> None:
        async with Swarm(seed=seed) as swarm:
            trainers = [await swarm.trainer(seed=1) for _ in range(2)]
            await together(*(trainer.train(3) for trainer in trainers))
            assert [e.epoch for t in trainers for e in t.epochs] == [1, 2, 3, 1, 2, 3], "nobody downloaded"
            assert all(len(rows) >= TARGET for rows in swarm.batches(3))
            assert len(digests(trainers)) == 1

    virtual_time.run(main(), seed=seed)


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


def test_every_token_counts_alike_where_losses_are_sums_over_tokens() -> None:
    """Peers whose samples have unlike numbers of tokens: their sums over a number of tokens that all divide by."""
    most = 8  # tokens of a sample
    lengths = [(8, 8, 7, 8, 6, 8, 8, 8), (1, 2, 1, 1, 3, 1, 2, 1, 1, 1, 2, 1, 1, 1, 1, 1)]  # TARGET samples in all
    generator = torch.Generator().manual_seed(5)
    tokens = [torch.randn(sum(each), 6, dtype=torch.float64, generator=generator) for each in lengths]

    def sum_of_losses(weights: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        return ((rows @ weights - rows.sum(1)) ** 2).sum()

    async def main() -> None:
        async with Swarm() as swarm:
            trainers = [await swarm.trainer(seed=1) for _ in range(2)]
            alone = trainers[0].weights.detach().clone().requires_grad_()

            async def once(number: int) -> None:
                trainer, samples = trainers[number], len(lengths[number])
                await trainer.core.join()
                (sum_of_losses(trainer.weights, tokens[number]) / (samples * most)).backward()
                await trainer.core.step(samples)
                await trainer.follow(1)

            await together(once(0), once(1))
            (sum_of_losses(alone, torch.cat(tokens)) / (TARGET * most)).backward()
            momentum([alone]).step()
            assert [trainer.core.position.samples for trainer in trainers] == [TARGET, TARGET]
            for trainer in trainers:
                torch.testing.assert_close(trainer.weights, alone, **TIGHT)

    virtual_time.run(main(), timeout=60)
