"""Every inner step is in one round, in none that is known to have left it out, or told as lost."""

from __future__ import annotations

import random

import pytest
import torch

from swarmcli.optim.gradients.accumulator import Weighed
from swarmcli.optim.state.anchor import Anchored
from swarmcli.optim.state.differences import Differences, steps_of
from swarmcli.optim.state.replica import InPlace

STEPS = 400


class Peer:
    """Its k-th inner step moves the k-th number of its model by -1: so a difference tells which steps are in it."""

    def __init__(self, batch: int = 2) -> None:
        self.model = torch.nn.Parameter(torch.zeros(STEPS, dtype=torch.float64))
        self.place = Anchored(InPlace([self.model]), lambda parameters: torch.optim.SGD(parameters, lr=1.0))
        inner = torch.optim.SGD([self.model], lr=1.0)
        self.differences = Differences(self.place, inner, batch)
        self.steps, self.batch = 0, batch

    def learn(self) -> None:
        self.model.grad = torch.zeros_like(self.model)
        self.model.grad[self.steps] = 1.0
        assert self.differences.add(self.batch)
        self.steps += 1

    def freeze(self) -> tuple[int, set[int]]:
        """Freezes the difference; returns its samples, and which steps are in it."""
        samples = self.differences.freeze().samples
        steps = (self.differences.means[0] * samples / self.batch).round()
        assert set(steps.tolist()) <= {0.0, 1.0}, "each step once"
        return samples, set(steps.nonzero().flatten().tolist())

    def step(self, counted: bool, move: torch.Tensor) -> None:
        """A round commits, and the anchor moves."""
        self.differences.settle(counted)
        self.place.anchor[0].add_(move)

    @property
    def learned(self) -> set[int]:
        """The steps that the model has beyond the anchor."""
        self.place.publish()
        beyond = (self.place.anchor[0] - self.model.detach()).round()
        assert set(beyond.tolist()) <= {0.0, 1.0}, "each step once"
        return set(beyond.nonzero().flatten().tolist())


@pytest.mark.parametrize("seed", range(20))
def test_every_step_counts_once_or_is_told_as_lost(seed: int) -> None:
    """A round that is undecided may have counted what was handed in: no other round gets it, and the model has it only
    until the anchor moves. It may be made up for, or another one come in its place."""
    drawn, peer, counted, aside, lost = random.Random(seed), Peer(), set[int](), set[int](), set[int]()
    outcomes = ["counted", "counted", "left out", "dead", "undecided", "undecided, made up for"]
    while peer.steps < STEPS - 40:
        for _ in range(drawn.randrange(5)):
            peer.learn()
        samples, handed = peer.freeze()
        assert samples == 2 * len(handed) and not counted & handed
        for _ in range(drawn.randrange(4)):  # while the round is under way
            peer.learn()
        outcome = drawn.choice(outcomes)
        if outcome == "dead":
            peer.differences.restore()
        elif outcome.startswith("undecided"):
            peer.differences.set_aside()
            if samples:
                lost, aside = lost | aside, handed
        if outcome.startswith(("dead", "undecided")) and drawn.random() < 0.5:
            peer.place.rest()  # to be saved: no round is under way
        if drawn.random() < 0.5:
            peer.learn()
        if outcome not in ("dead", "undecided"):
            peer.step(outcome == "counted" and samples > 0, torch.randn(STEPS, dtype=torch.float64).round() * 8)
            if outcome == "undecided, made up for":
                counted |= aside
            else:
                lost |= aside
            aside = set()
        if outcome == "counted":
            counted |= handed
        if not aside and not lost & peer.learned:
            assert 2 * len(peer.learned) == peer.differences.samples
        assert not counted & peer.learned
        waiting = peer.differences.samples // 2
        assert len(counted) + len(aside) + len(lost) + waiting == peer.steps, "nothing is lost without a word"
    assert lost and counted


def test_a_model_that_rests_is_the_anchor_and_goes_on_from_where_it_was() -> None:
    peer = Peer()
    for _ in range(3):
        peer.learn()
    peer.place.rest()
    assert torch.equal(peer.model.detach(), peer.place.anchor[0])
    assert peer.learned == {0, 1, 2}
    peer.place.rest()
    peer.step(False, torch.full((STEPS,), 0.5, dtype=torch.float64))
    assert peer.learned == {0, 1, 2}


def test_parts_of_an_inner_step_count_by_weight_and_one_without_weight_by_its_samples_alone() -> None:
    whole, parts = Peer(batch=4), Peer(batch=4)
    torch.manual_seed(1)
    one, other = torch.randn(2, STEPS, dtype=torch.float64)
    whole.model.grad = (6 * one + 2 * other) / 8
    assert whole.differences.add(4, weight=8)
    for gradient, samples, weight in ((one, 1, 6), (other * float("nan"), 2, 0), (other, 1, 2)):
        parts.model.grad = gradient.clone()
        assert parts.differences.add(samples, weight=weight)
    torch.testing.assert_close(parts.model, whole.model, rtol=0, atol=1e-12)
    before = parts.model.detach().clone()
    assert parts.differences.add(4, weight=0) and torch.equal(parts.model.detach(), before)
    assert parts.differences.freeze() == Weighed(8, 8.0)


def test_what_is_not_finite_is_dropped() -> None:
    peer = Peer()
    peer.learn()
    peer.model.grad = torch.full_like(peer.model, float("inf"))
    assert not peer.differences.add(2)
    assert peer.freeze() == (2, {0})
    peer.differences.restore()
    with torch.no_grad():
        peer.model[3] = float("nan")
    assert peer.differences.freeze() == Weighed() and not peer.differences.means[0].any()
    assert not peer.learned, "the model is the anchor again"


def test_the_mean_of_equal_differences_for_each_step_is_the_difference() -> None:
    assert steps_of([(64, 64), (64, 64), (64, 64)], 8) == 8
    assert steps_of([(10, 10)], 5) == 2
    assert steps_of([], 5) == 0 and steps_of([(0, 0)], 5) == 0
    assert steps_of([(96, 96), (32, 32)], 8) == (96 * 12 + 32 * 4) / 128
    assert steps_of([(3, 80), (1, 16)], 8) == (3 * 10 + 1 * 2) / 4
