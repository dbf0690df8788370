"""Local updates: everyone steps by itself, and the states come together as the same computation in one process says."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch

from swarmcli.events import EpochAdvanced, Noticed, RoundFinished, StateDownloaded
from swarmcli.optim.gradients.accumulator import Weighed
from swarmcli.optim.modes.base import StateOptions
from swarmcli.optim.modes.outer import LocalUpdates
from tests.optim.optim_swarm import (
    Swarm,
    Trainer,
    adamw,
    decay,
    digests,
    loss_of,
    make_model,
    momentum,
    record,
    together,
)
from tests.simulation import within
from tests.suites import soak

EPOCHS = 4
TIGHT = {"rtol": 1e-11, "atol": 1e-12}


def local(delay: bool = False, every: int | None = None, statistics: tuple[str, ...] = ()) -> LocalUpdates:
    return LocalUpdates(state=StateOptions(delay=delay, average_every=every, statistics=statistics))


def in_one_process(
    epochs: list[list[list[torch.Tensor]]], make: Any, names: tuple[str, ...], every: int = 1
) -> torch.Tensor:
    """The parameters of all peers after epochs in which each peer made a step with each of its batches."""
    peers = [(weights := make_model(1), made := make([weights]), decay(made)) for _ in epochs[0]]
    for number, batches in enumerate(epochs, 1):
        for (weights, optimizer, _), its in zip(peers, batches, strict=True):
            for batch in its:
                weights.grad = None
                loss_of(weights, batch).backward()
                optimizer.step()
        samples = [sum(map(len, its)) for its in batches]
        for name in ("weights", *names) if number % every == 0 else ():
            tensors = [{**made.state[weights], "weights": weights.data}[name] for weights, made, _ in peers]
            mean = sum(n * each for n, each in zip(samples, tensors, strict=True)) / sum(samples)
            for each in tensors:
                each.copy_(mean)
        for *_, schedule in peers:
            schedule.step()
    return peers[0][0].detach()


@pytest.mark.parametrize(
    ("sizes", "make", "names", "every"),
    [
        ((2, 6, 3), adamw, ("exp_avg", "exp_avg_sq"), 1),
        ((4, 4), adamw, (), 2),  # the rounds between only count: they average one number
        *soak([((4, 4), momentum, ("momentum_buffer",), 1), ((1, 4, 2, 5), adamw, ("exp_avg", "exp_avg_sq"), 1)]),
    ],
)
@within(300)
async def test_it_is_the_same_computation_in_one_process(
    sizes: tuple[int, ...], make: Any, names: tuple[str, ...], every: int
) -> None:
    async with Swarm() as swarm:
        mode = local(every=every if every > 1 else None, statistics=names)
        peers = [await swarm.trainer(batch_size=size, seed=1, make=make, mode=mode) for size in sizes]
        assert (peers[0].core.work.averager.layout.numel == 1) == (every > 1)
        await together(*(peer.train(EPOCHS) for peer in peers))
        batches = [[list(peer.used[epoch].split(peer.batch_size)) for peer in peers] for epoch in range(EPOCHS)]
        expected = in_one_process(batches, make, names, every)
        for peer in peers:
            torch.testing.assert_close(peer.weights.detach(), expected, **TIGHT)
        assert len(digests(peers)) == 1 and len({peer.core.position for peer in peers}) == 1
        own, *others = (peer.core.replica.state.optimizer.state[peer.weights] for peer in peers)
        assert all(torch.equal(own[name], other[name]) for other in others for name in names)


class Delayed(Trainer):
    """Notes what it hands in, where the anchor goes, and how long its steps wait."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.handed: dict[int, tuple[int, torch.Tensor]] = {}  # epoch → samples, and the model then
        self.anchors: dict[int, torch.Tensor] = {}
        self.waits: list[float] = []  # seconds
        freeze = self.core.work.freeze

        async def noted() -> Weighed:
            handed = await freeze()
            self.handed.setdefault(self.epoch + 1, (handed.samples, self.weights.detach().clone()))
            return handed

        def note(event: object) -> None:
            if isinstance(event, EpochAdvanced):
                self.anchors[event.epoch] = self.core.replica.state.trained[0].detach().clone()

        self.core.work.freeze = noted
        self.node.endpoint.events.subscribe(note)

    async def compute(self, rows: int | None = None) -> None:
        loop = asyncio.get_running_loop()
        began = loop.time()
        await super().compute(rows)
        self.waits.append(loop.time() - began - self.pace)


@within(300)
async def test_training_goes_on_beside_a_delayed_round_and_the_anchor_goes_where_peers_were_when_it_began() -> None:
    async with Swarm(latency=0.25) as swarm:
        options = {"seed": 1, "mode": local(delay=True), "pace": 0.5}
        peers = [await swarm.add(Delayed(await swarm.node(), batch_size=size, **options)) for size in (1, 2)]
        await together(*(peer.train(EPOCHS) for peer in peers))
        for peer in peers:
            assert max(peer.waits[len(peer.waits) // 2 :]) < 0.05
            assert max(event.averaging_seconds for event in peer.epochs) > 1.0
            for epoch in range(1, EPOCHS + 1):
                handed = [each.handed[epoch] for each in peers]
                mean = sum(samples * model for samples, model in handed) / sum(samples for samples, _ in handed)
                torch.testing.assert_close(peer.anchors[epoch], mean, **TIGHT)


@within(300)
async def test_a_newcomer_with_other_weights_and_one_that_was_frozen_are_in_step_soon() -> None:
    async with Swarm() as swarm:
        peers = [await swarm.trainer(seed=1, mode=local()) for _ in range(2)]
        await together(*(peer.train(2) for peer in peers))
        peers.append(await swarm.trainer(seed=2, mode=local()))
        downloads = record(peers[2].node, StateDownloaded)
        await together(*(peer.train(4) for peer in peers))
        assert len(downloads) == 1
        assert len({peer.core.replica.state.digest() for peer in peers}) == 1
        await together(*(peer.train(5) for peer in peers[1:]))
        await peers[0].compute()
        await together(*(peer.train(9) for peer in peers))  # it has come back, and then taken part in an average
        assert len({peer.core.replica.state.digest() for peer in peers}) == 1
        assert len({peer.core.position for peer in peers}) == 1


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@within(300)
async def test_a_batch_whose_gradient_is_not_finite_reaches_neither_parameters_nor_statistics(value: float) -> None:
    async with Swarm() as swarm:
        peer = await swarm.trainer(seed=1, make=adamw, mode=local())
        notices = record(peer.node, Noticed)
        await peer.compute()
        before, samples = peer.weights.detach().clone(), peer.core.work.samples
        statistics = {name: tensor.clone() for name, tensor in peer.core.replica.state.statistics.capture()[0].items()}
        for _ in range(2):
            peer.weights.grad = torch.full_like(peer.weights, 1.0)
            peer.weights.grad[2] = value  # of a finite loss, as of a square root at 0
            await peer.core.step(4)
        assert torch.equal(peer.weights, before)
        assert all(torch.equal(peer.core.replica.state.statistics.capture()[0][n], t) for n, t in statistics.items())
        assert (peer.core.work.samples, peer.core.work.given_up.count) == (samples, 2)
        (notice,) = [each.text for each in notices if "not finite" in each.text]
        assert notice.startswith("4 samples of this peer are given up")
        await peer.compute()
        assert not torch.equal(peer.weights, before)
        assert peer.weights.isfinite().all()


@pytest.mark.soak  # test_several_groups.py has groups side by side of gradients
@within(300)
async def test_groups_side_by_side_come_together_after_each_epoch() -> None:
    """Their anchors are unlike, and all average them; what each has learned since stays on top."""
    async with Swarm() as swarm:
        mode = LocalUpdates(state=StateOptions(delay=False), target_group_size=2)
        options = {"batch_size": 2, "target": 240, "matchmaking_time": 5.0, "mode": mode}
        peers = [await swarm.trainer(seed=1, averaging={"target_group_size": 2}, **options) for _ in range(4)]
        rounds = record(peers[0].node, RoundFinished)
        await together(*(peer.train(3) for peer in peers))
        assert sum(event.purpose == "run_state" and event.outcome == "committed" for event in rounds) >= 2
        anchors = torch.stack([peer.core.replica.state.trained[0].detach() for peer in peers])
        models = torch.stack([peer.weights.detach() for peer in peers])
        assert float((models - anchors).abs().max()) < 1e-9, "nobody has learned since"
        learned = anchors.mean(0) - make_model(1).detach()
        assert float((anchors - anchors.mean(0)).norm()) < 0.05 * float(learned.norm())
