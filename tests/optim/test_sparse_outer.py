"""Outer steps of which the largest numbers travel: anchors are those of one process, and nothing learned is lost."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from swarmcli.compression import BlockwiseQuantization
from swarmcli.optim import Outer
from swarmcli.optim.modes.base import Timing
from swarmcli.optim.modes.outer import SparseOuterSteps
from swarmcli.optim.state.anchor import Anchored
from swarmcli.optim.state.differences import Differences
from swarmcli.optim.state.replica import InPlace
from tests.optim import optim_swarm
from tests.optim.optim_swarm import Swarm, decay, digests, loss_of, make_model, together
from tests.simulation import within

INNER, K, CHUNK, FADES = 4, 32, 4096, 0.75
FEATURES = 5000  # a chunk and a shorter one
OUTER = Outer(INNER, "sgd", 0.5, 0.0)


def gentle(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1e-4)


def sparse_steps(timing: Timing = Timing.AT_ONCE) -> SparseOuterSteps:
    return SparseOuterSteps(outer=OUTER, timing=timing, k=K, bits=2, decay=FADES)


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optim_swarm, "FEATURES", FEATURES)


def largest(due: torch.Tensor) -> torch.Tensor:
    """SparseLoCo's Q(top-k) with two bits: the mean of the larger half, and that of the smaller one."""
    sent = torch.zeros_like(due)
    for chunk, out in zip(due.split(CHUNK), sent.split(CHUNK), strict=True):
        places = chunk.abs().sort(descending=True).indices[:K]
        for half in places.chunk(2):
            out[half] = chunk[half].abs().double().mean().float() * chunk[half].sign()
    return sent


class PlainSparseLoCo:
    """One process in the place of all peers (arXiv 2508.15706, algorithm 1): residuals are distances here."""

    def __init__(self, seed: int) -> None:
        self.anchor = make_model(seed, torch.float32).detach()
        self.peers, self.residuals = dict[object, Any](), dict[object, torch.Tensor]()

    def round(self, batches: dict[object, list[torch.Tensor]]) -> None:
        steps = {peer: len(its) for peer, its in batches.items()}
        sent = torch.zeros_like(self.anchor)
        for peer, its in batches.items():
            weights, optimizer, _ = self.peers.setdefault(peer, self.newcomer())
            weights.data.copy_(self.anchor)
            for batch in its:
                weights.grad = None
                loss_of(weights, batch).backward()
                optimizer.step()
            due = FADES * self.residuals.get(peer, 0.0) + (self.anchor - weights.data)
            sent += largest(due)
            self.residuals[peer] = due - largest(due)
        codec = BlockwiseQuantization(CHUNK, bits=4)  # of averages, as they come back
        averaged = codec.extract(codec.compress(sent * (1 / sum(steps.values())))).clone()
        self.anchor -= OUTER.lr * averaged * (sum(n * n for n in steps.values()) / sum(steps.values()))
        for _, _, schedule in self.peers.values():
            schedule.step()

    def newcomer(self) -> tuple[torch.nn.Parameter, torch.optim.Optimizer, Any]:
        weights = torch.nn.Parameter(self.anchor.clone())
        optimizer = gentle([weights])
        return weights, optimizer, decay(optimizer)


@within(300)
async def test_the_anchors_of_a_swarm_are_those_of_one_process() -> None:
    """Three peers of unlike speed. Peers agree to the bit; the reference computes in distances, where they compute in
    sums over samples, so it agrees to rounding: a number that is chosen or not, or a code that is another one, would
    be a thousand times as far off."""
    async with Swarm() as swarm:
        common = {"seed": 1, "make": gentle, "mode": sparse_steps(), "dtype": torch.float32}
        peers = [await swarm.trainer(pace=pace, **common) for pace in (0.1, 0.17, 0.35)]
        await together(*(peer.train(5) for peer in peers))
        plain, unlike = PlainSparseLoCo(1), 0
        for epoch in range(5):
            given = {peer: list(peer.used[epoch].split(INNER)) for peer in peers if epoch in peer.used}
            unlike += len({len(batches) for batches in given.values()}) > 1
            plain.round(given)
        moved = float((plain.anchor - make_model(1, torch.float32).detach()).abs().max())
        assert unlike >= 2 and moved > 0.01
        assert len(digests(peers)) == 1
        for peer in peers:
            anchor = peer.core.replica.state.trained[0].detach()
            torch.testing.assert_close(anchor, plain.anchor, rtol=0, atol=2e-6)


@pytest.mark.parametrize("seed", range(5))
def test_what_a_peer_learned_was_sent_or_is_left_or_given_up_number_by_number(seed: int) -> None:
    """Rounds die, stay undecided, commit without this peer's difference, or with it; steps for each round vary. Steps
    are of whole numbers, so what does not add up was lost or counted twice."""
    draws, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    model = torch.nn.Parameter(torch.zeros(FEATURES))
    place = Anchored(InPlace([model]), lambda parameters: torch.optim.SGD(parameters, lr=1.0))
    differences = Differences(place, torch.optim.SGD([model], lr=1.0), INNER)
    mode = SparseOuterSteps(outer=OUTER, k=K, bits=2, decay=1.0)
    method = mode.method(differences.means)
    learned, sent, dropped, fresh = (torch.zeros(FEATURES, dtype=torch.float64) for _ in range(4))
    outcomes = ["dead", "undecided", "without", "without", "with", "with"]
    for _ in range(40):
        for _ in range(draws.choice([0, 1, 2, 4])):
            model.grad = torch.randint(-9, 9, (FEATURES,), generator=generator).float()
            differences.add(INNER)
            learned += INNER * model.grad.double()
            fresh += INNER * model.grad.double()
        samples, outcome = differences.freeze().samples, draws.choice(outcomes)
        method.load(samples)
        if outcome == "dead":
            differences.restore()
            continue
        if outcome == "undecided":
            differences.set_aside()
            method.set_aside()
            dropped, fresh = dropped + fresh, torch.zeros_like(fresh)
            continue
        if outcome == "with" and samples:
            sent += samples * method.tensors[0].double()
            fresh = torch.zeros_like(fresh)
        counted = outcome == "with" and samples > 0
        method.tensors[0].copy_(torch.randint(-9, 9, (FEATURES,), generator=generator))  # the average of all
        method.forget_aside(counted=False)
        method.finish(100.0, counted)
        differences.settle(counted)
        place.state_parameters[0].grad = method.averaged[0].clone()
        place.optimizer.step()
        place.optimizer.zero_grad()
    differences.freeze()
    waiting = differences.handed_in.samples * differences.means[0].double()
    left = method.own["residual0"].double()
    assert dropped.any() and sent.count_nonzero() > 100
    torch.testing.assert_close(sent + left + waiting + dropped, learned, rtol=0, atol=0.1)
