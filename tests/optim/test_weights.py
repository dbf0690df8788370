"""What a peer's gradients weigh in the average, where that is not their number of samples: tokens, for example."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable

import pytest
import torch

from swarmcli.averaging.config import AllreduceOptions
from swarmcli.averaging.group import Group, Member
from swarmcli.averaging.round.allreduce import contributions
from swarmcli.averaging.round.buffers import Average
from swarmcli.averaging.round.plan import Layout, Plan
from swarmcli.events import EpochCredited, RoundsReplayed
from swarmcli.network.identity import Identity
from swarmcli.optim.gradients.accumulator import GradientAccumulator, Weighed
from swarmcli.optim.modes import LocalUpdates, PowerEF, PowerSGD, Sparse
from swarmcli.optim.modes.base import StateOptions
from swarmcli.optim.modes.gradients import Mode
from tests.optim.optim_swarm import (
    TARGET,
    Swarm,
    assist,
    auxiliary,
    digests,
    loss_of,
    make_model,
    record,
    reference,
    together,
    weighed,
    weights_of,
)
from tests.simulation import simulated
from tests.suites import soak

TIGHT = {"rtol": 1e-10, "atol": 1e-12}


@pytest.mark.parametrize("mode", [Mode(), PowerSGD(averager_rank=1), *soak([PowerEF(averager_rank=1)])])
@simulated
async def test_gradients_count_by_weight_and_epochs_are_made_of_samples(mode: Mode) -> None:
    """An auxiliary goes along, and one peer replays two rounds: all come to what one process makes of the weighted mean
    over the rows, and count as many rows."""
    epochs = 4
    async with Swarm() as swarm:
        options = {"seed": 3, "mode": mode, "weighs": True}
        trainers = [await swarm.trainer(**options, batch_size=size) for size in (2, 3, 5)]
        credited = record(trainers[0].node, EpochCredited)
        helper = await auxiliary(swarm, mode=mode)

        replays = record(trainers[2].node, RoundsReplayed)

        async def train() -> None:
            await together(*(trainer.train(2) for trainer in trainers))
            swarm.network.freeze(trainers[2].node.peer_id)
            await together(*(trainer.train(epochs) for trainer in trainers[:2]))
            swarm.network.thaw(trainers[2].node.peer_id)
            await asyncio.sleep(5)
            assert await trainers[2].core.join()

        await together(assist(helper, epochs), train())
        batches = swarm.batches(epochs)
        expected = reference(3, [weighed(rows) for rows in batches])
        for trainer in trainers:
            torch.testing.assert_close(trainer.weights.detach(), expected, **TIGHT)
        assert len({trainer.core.position for trainer in trainers} | {helper.position}) == 1
        assert [event.rounds for event in replays] == [2]
        assert [event.samples for event in trainers[0].epochs] == [len(rows) for rows in batches]
        assert [sum(each.samples.values()) for each in credited] == [len(rows) for rows in batches]
        assert all(len(rows) >= TARGET for rows in batches)


@simulated
async def test_states_of_local_updates_are_averaged_by_weight() -> None:
    async with Swarm() as swarm:
        mode = LocalUpdates(state=StateOptions(delay=False))
        trainers = [await swarm.trainer(mode=mode, weighs=True, batch_size=TARGET // 2) for _ in range(2)]
        for trainer in trainers:
            await trainer.core.join()
        ends, weights = [], []

        async def train(trainer) -> None:
            await trainer.compute()
            await trainer.follow(1)

        await together(*(train(trainer) for trainer in trainers))
        for (rows,) in [list(trainer.used.values()) for trainer in trainers]:
            model = make_model(0)
            loss_of(model, weighed(rows)).backward()
            ends.append(model.detach() - 0.02 * model.grad)
            weights.append(float(weights_of(rows).sum()))
        expected = sum(weight * end for weight, end in zip(weights, ends, strict=True)) / sum(weights)
        torch.testing.assert_close(trainers[0].weights.detach(), expected, **TIGHT)
        assert len(digests(trainers)) == 1


@simulated
async def test_the_weight_of_a_member_is_capped_and_so_are_the_samples_that_it_claims() -> None:
    """One member names a weight of a million for four samples, another its own weight for a million samples."""
    async with Swarm() as swarm:
        trainers = [await swarm.trainer(averaging={"max_share": 0.3}) for _ in range(5)]
        for trainer in trainers:
            await trainer.core.join()
        heavy, many = (trainer.core.work for trainer in trainers[:2])
        lie(heavy, lambda own: Weighed(own.samples, 1e6))
        lie(many, lambda own: Weighed(10**6, own.weight))
        credited = record(trainers[4].node, EpochCredited)
        control = record_rounds(trainers[4])
        await together(*(trainer.train(2) for trainer in trainers))
        for weights in control:
            assert max(weights.values()) <= 0.3 * sum(weights.values()) * (1 + 1e-9)
        for each in credited:
            assert max(each.samples.values()) <= 0.3 * sum(each.samples.values()) * (1 + 1e-9)
        assert len(digests(trainers)) == 1


def test_one_reducer_cannot_change_what_a_member_is_credited_with() -> None:
    """One of three parts names other samples for a member; two members are too few to bound each other's."""
    members = [Member(Identity.from_seed(number).peer_id) for number in range(2)]
    group = Group.form(b"", members, [1.0, 1.0], bytes(16))
    told = [(5.0, 2.0, 7.0, 8.0), (5.0, 2.0, 1e6, 8.0), (5.0, 2.0, 7.0, 8.0)]
    parts = Plan.make(Layout.of([torch.zeros(12)]), [2.0, 1.0], 16).parts
    averages = [Average(part, (0, 1), each, message=None, digest=b"") for part, each in zip(parts, told, strict=True)]
    weights, samples, partly = contributions(group, averages, AllreduceOptions())
    assert (list(weights.values()), list(samples.values()), partly) == ([5.0, 2.0], [7.0, 8.0], {})


def lie(work, other: Callable[[Weighed], Weighed]) -> None:
    freeze = work.freeze

    async def lying() -> Weighed:
        own = await freeze()
        return other(own) if own.samples else own

    work.freeze = lying


def record_rounds(trainer) -> list[dict]:
    """A list that gets the weights of each round with which this trainer steps."""
    seen, advance = [], trainer.core.work.advance

    async def watched(committed):
        seen.append(dict(committed.weights))
        return await advance(committed)

    trainer.core.work.advance = watched
    return seen


@pytest.mark.parametrize("weight", [math.nan, math.inf, -1.0])
def test_an_impossible_weight_is_refused_and_nothing_is_added(weight: float) -> None:
    parameter = torch.nn.Parameter(torch.zeros(1))
    sums = GradientAccumulator([parameter])
    parameter.grad = torch.ones(1)
    with pytest.raises(ValueError, match="weight="):
        sums.add(2, weight=weight)
    assert sums.samples == 0 and not sums.accumulators[0].any()


@pytest.mark.parametrize("mode", [PowerSGD(averager_rank=1, min_compression_ratio=0.1), Sparse()])
def test_what_was_kept_back_is_not_sent_with_next_to_no_weight(mode: PowerSGD | Sparse) -> None:
    """Divided by next to nothing, a residual would be far beyond what others send, and its peer would be left out."""
    parameter = torch.nn.Parameter(torch.zeros(16, 16))
    sums = GradientAccumulator([parameter])
    method = mode.method(sums.means)
    for residual in method.own.values():
        residual.fill_(3.0)
    parameter.grad = torch.ones(16, 16)
    sums.add(3, weight=0.0)
    handed = sums.freeze()
    method.load(handed.weight)
    tensors = next(method.program.run(b"seed")) if method.program else method.tensors
    assert tensors and not any(tensor.any() for tensor in tensors)
    method.finish(handed.weight, counted=True)
    assert all((residual == 3.0).all() for residual in method.own.values())


def test_a_batch_without_weight_brings_its_samples_and_no_gradient() -> None:
    """A mean over no tokens is no number; alone in its epoch, it must still come to the round."""
    parameter = torch.nn.Parameter(torch.zeros(1))
    sums = GradientAccumulator([parameter])
    parameter.grad = torch.full((1,), math.nan)
    assert sums.add(3, weight=0.0)
    alone = sums.freeze()
    assert alone.samples == 3 and 0 < alone.weight < 1e-6 and sums.means[0].item() == 0
    sums.restore()
    parameter.grad = torch.full((1,), 5.0)
    assert sums.add(2, weight=8.0)
    assert sums.freeze() == Weighed(5, pytest.approx(8.0)) and sums.means[0].item() == pytest.approx(5.0)
