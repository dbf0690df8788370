"""Outer steps in a swarm: its anchors are those of one process that is fed the same batches."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from swarmcli.averaging import RoundResult
from swarmcli.events import Noticed, RoundsReplayed
from swarmcli.optim import Outer
from swarmcli.optim.modes.base import Timing
from swarmcli.optim.modes.outer import OuterSteps
from swarmcli.optim.state import replica
from tests.optim.optim_swarm import Swarm, Trainer, adamw, decay, digests, loss_of, make_model, record, together
from tests.simulation import simulated, within
from tests.suites import soak

INNER = 4  # samples of an inner step


def outer_steps(timing: Timing = Timing.AT_ONCE, **options: Any) -> OuterSteps:
    return OuterSteps(outer=Outer(INNER, **options), timing=timing)


class PlainDiLoCo:
    """One process in the place of all peers: each makes inner steps of its own from the anchor, round after round."""

    def __init__(self, seed: int, make: Callable[..., torch.optim.Optimizer], outer: Outer) -> None:
        self.anchor = make_model(seed)
        self.outer = outer.make([self.anchor])
        self.make, self.peers = make, dict[object, tuple[torch.nn.Parameter, Any, Any]]()

    def round(self, batches: dict[object, list[torch.Tensor]]) -> None:
        steps = {peer: len(its) for peer, its in batches.items()}
        total = sum(steps.values())
        descent = torch.zeros_like(self.anchor)
        for peer, its in batches.items():
            if peer not in self.peers:
                weights = torch.nn.Parameter(self.anchor.detach().clone())
                optimizer = self.make([weights])
                self.peers[peer] = weights, optimizer, decay(optimizer)
            weights, optimizer, _ = self.peers[peer]
            weights.data.copy_(self.anchor.data)
            for batch in its:
                weights.grad = None
                loss_of(weights, batch).backward()
                optimizer.step()
            descent += (self.anchor.data - weights.data) / total
        self.anchor.grad = descent * (sum(n * n for n in steps.values()) / total)
        self.outer.step()
        for _, _, schedule in self.peers.values():
            schedule.step()


def plain_sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.01)


@pytest.mark.parametrize(
    ("name", "make"),
    [
        ("nesterov", adamw),
        *soak(
            [
                ("adam", plain_sgd),
                ("nesterov", plain_sgd),
                ("adam", adamw),
                ("sgd", adamw),
                ("sgd", plain_sgd),
            ]
        ),
    ],
)
@within(300)
async def test_the_anchors_of_a_swarm_are_those_of_one_process(
    name: Any, make: Callable[..., torch.optim.Optimizer]
) -> None:
    """Three peers of unlike speed, so that some make more inner steps than others."""
    outer = Outer(INNER, name, lr=0.1 if name == "adam" else 0.7)
    async with Swarm() as swarm:
        mode = OuterSteps(outer=outer)
        peers = [await swarm.trainer(seed=1, make=make, mode=mode, pace=pace) for pace in (0.1, 0.17, 0.35)]
        await together(*(peer.train(5) for peer in peers))
        plain = PlainDiLoCo(1, make, outer)
        unlike = 0
        for epoch in range(5):
            given = {peer: list(peer.used[epoch].split(INNER)) for peer in peers if epoch in peer.used}
            unlike += len({len(batches) for batches in given.values()}) > 1
            plain.round(given)
        assert unlike >= 3
        assert len(digests(peers)) == 1
        for peer in peers:
            torch.testing.assert_close(peer.weights.detach(), plain.anchor.detach(), rtol=0, atol=1e-12)


class Taught(Trainer):
    """Counts the samples of its inner steps, and what became of them."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.computed = 0
        self.notices = record(self.node, Noticed)

    async def compute(self, rows: int | None = None) -> None:
        self.computed += rows or self.batch_size
        await super().compute(rows)

    @property
    def counted(self) -> int:
        return sum(epoch.own_samples for epoch in self.epochs)

    @property
    def waits(self) -> int:
        return self.core.work.samples

    @property
    def lost(self) -> int:
        told = [notice.text.split()[0] for notice in self.notices if "of this peer are lost" in notice.text]
        return sum(map(int, told))


async def taught(swarm: Swarm, seed: int = 1, **options: Any) -> Taught:
    options.setdefault("mode", outer_steps(Timing.DELAYED_AVERAGING))
    options.setdefault("make", adamw)
    return await swarm.add(Taught(await swarm.node(), seed=seed, **options))


async def rests(peers: list[Taught]) -> None:
    """Waits until no end of an epoch is under way anywhere."""
    for peer in peers:
        await peer.core.state_dict()


@pytest.mark.parametrize("seed", range(4))
@within(300)
async def test_peers_go_on_while_a_round_runs_and_each_sample_counts_once(seed: int) -> None:
    async with Swarm(seed, latency=0.15) as swarm:  # a round takes longer than a batch
        peers = [await taught(swarm, pace=pace) for pace in (0.05, 0.08, 0.3)]
        await together(*(peer.train(4) for peer in peers))
        await rests(peers)
        assert len(digests(peers)) == 1 and len({peer.core.position.lineage for peer in peers}) == 1
        for peer in peers:
            assert peer.computed == peer.counted + peer.waits + peer.lost
            assert torch.equal(peer.weights.detach(), peer.core.replica.state.trained[0].cpu()), "it is at rest"
        assert sum(peer.lost for peer in peers) == 0
        assert sum(peer.counted for peer in peers) == peers[0].core.position.samples


def test_no_inner_step_is_made_while_the_anchor_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """The model is so large that both run in threads, where a trainer could begin in the middle of a step."""
    monkeypatch.setattr(replica, "OFFLOAD_FROM", 0)
    stepping, beside = threading.Event(), threading.Event()

    class InnerSteps(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            if stepping.is_set():
                beside.set()
            super().step(closure)

    class LongSteps(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            stepping.set()
            beside.wait(0.2)
            super().step(closure)
            stepping.clear()

    async def main() -> None:
        async with Swarm(1) as swarm:
            mode = outer_steps(optimizer=lambda params: LongSteps(params, lr=0.7))
            peer = await taught(swarm, mode=mode, make=lambda params: InnerSteps(params, lr=0.01))
            await peer.compute()
            work = peer.core.work
            await work.freeze()
            await work.average_alone()
            own = {peer.node.peer_id: float(INNER)}
            end = asyncio.ensure_future(work.advance(RoundResult(round_id=bytes(32), weights=own, samples=own)))
            assert await asyncio.to_thread(stepping.wait, 10)
            await work.accumulate(INNER)
            await end
            assert not beside.is_set()

    asyncio.run(main())


@pytest.mark.parametrize("seed", range(4))
@within(300)
async def test_one_that_missed_a_round_keeps_what_it_learned(seed: int) -> None:
    """The late peer was frozen while the others ended two epochs: it steps with their rounds, and hands in its own
    difference with the next one."""
    async with Swarm(seed) as swarm:
        peers = [await taught(swarm, pace=0.1) for _ in range(3)]
        late, *others = peers
        await together(*(peer.train(3) for peer in peers))
        await rests(peers)
        await late.compute()
        swarm.network.freeze(late.node.peer_id)
        await together(*(peer.train(5) for peer in others))
        swarm.network.thaw(late.node.peer_id)
        replays = record(late.node, RoundsReplayed)
        await asyncio.sleep(5)
        held, before = late.waits, late.core.replica.state.trained[0].clone()
        learned = before - late.weights.detach().clone()
        assert held >= INNER and await late.core.join()
        assert replays and late.waits == held
        after = late.core.replica.state.trained[0]
        torch.testing.assert_close(after - late.weights.detach(), learned, rtol=0, atol=1e-12)
        await together(*(peer.train(7) for peer in peers))
        await rests(peers)
        assert len(digests(peers)) == 1
        assert late.computed == late.counted + late.waits + late.lost


@simulated
async def test_a_difference_of_which_a_share_arrived_is_not_sent_again() -> None:
    """A slow sender that is left out in mid-round stays in the parts that have it."""
    async with Swarm() as swarm:
        peer = await taught(swarm)
        await peer.compute()
        work, held = peer.core.work, peer.core.replica
        await work.freeze()
        await work.average_alone()
        own, other = peer.node.peer_id, swarm.contact.peer_id  # type: ignore[union-attr]
        shares = {own: 0.25 * INNER, other: float(INNER)}
        await work.advance(RoundResult(round_id=bytes(32), left_out={own: "too slow"}, weights=shares, samples=shares))
        assert peer.waits == 0
        assert not (await work.freeze()).samples and not any(each.any() for each in work.method.tensors)
        assert torch.equal(peer.weights.detach(), held.state.trained[0])


@within(300)
async def test_a_state_that_was_saved_goes_on_as_it_was() -> None:
    """What is saved is the anchor: the model has it when `state_dict` returns."""
    async with Swarm() as swarm:
        first = await taught(swarm, pace=0.1)
        await first.train(3)
        await first.compute()
        saved, weights = await first.core.state_dict(), first.weights.detach().clone()
        assert saved["swarm"]["inner"][0]["lr"] == pytest.approx(0.02 / 1.3)
        await first.core.shutdown()
        swarm.network.kill(first.node.peer_id)
        swarm.trainers.remove(first)
        again = await taught(swarm, seed=5, pace=0.1)
        with torch.no_grad():
            again.weights.copy_(weights)
        await again.core.load_state_dict(saved)
        assert again.core.position.epoch == 3
        assert again.core.replica.state.digest() == saved["swarm"]["parameters"]
        await again.train(5)
