"""PowerEF: the estimate that all share moves by projections of its error, and reaches a gradient that stays."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from swarmcli.optim.modes.low_rank import PowerEF
from tests.optim.gradients.low_rank_peers import SHAPES, Gradients, equal, gradient_of, round_of

MODE = PowerEF(averager_rank=2, min_compression_ratio=0.1)
ALWAYS = PowerEF(averager_rank=4, min_compression_ratio=-1000)


def estimate(peer: Gradients) -> list[torch.Tensor]:
    return [peer.method.shared[f"g{index}"].clone() for index in range(len(peer.parameters))]


def orthogonal(size: int, noise: float = 0.0, seed: int = 0) -> torch.Tensor:
    return torch.linalg.qr(gradient_of(seed, (size, size)))[0] + noise * gradient_of(seed + 1, (size, size))


def errors(gradient: torch.Tensor, rounds: int, members: int = 1) -> list[float]:
    """The relative error after each round, with a mean gradient that stays the same."""
    peers = [Gradients(ALWAYS, [tuple(gradient.shape)], gradient.dtype) for _ in range(members)]
    spread = [(-1.0) ** index * gradient_of(99, gradient.shape, gradient.dtype) for index in range(members)]
    found = []
    for number in range(rounds):
        for peer, deviation in zip(peers, spread, strict=True):
            peer.accumulate([gradient + deviation if members % 2 == 0 else gradient], 3)
            peer.freeze()
        round_of(peers, seed=bytes([number]))
        found.append(float((peers[0].averaged[0] - gradient).norm() / gradient.norm()))
    return found


@settings(deadline=None, max_examples=20)
@given(st.lists(st.lists(st.integers(0, 9), min_size=3, max_size=3).filter(any), min_size=1, max_size=5))
def test_the_estimate_moves_by_a_projection_of_its_error(rounds: list[list[int]]) -> None:
    """g' − g = P Pᵀ (mean G − g), and all of it where nothing is compressed, whatever the weights."""
    peers = [Gradients(MODE) for _ in range(3)]
    for number, weights in enumerate(rounds):
        old = estimate(peers[0])
        drawn = [peer.draw(10 * number + i, n) for i, (peer, n) in enumerate(zip(peers, weights, strict=True))]
        for peer in peers:
            peer.freeze()
        round_of(peers, seed=bytes([number]))
        mean = [
            sum(n * gradients[place] for n, gradients in zip(weights, drawn, strict=True)) / sum(weights)
            for place in range(len(SHAPES))
        ]
        new = estimate(peers[0])
        for index in peers[0].method.rest:
            torch.testing.assert_close(new[index], mean[index])
        for index, matrix in peers[0].method.matrices.items():
            error = (mean[index] - old[index]).reshape(matrix.mean.shape)
            moved = (new[index] - old[index]).reshape(matrix.mean.shape)
            torch.testing.assert_close(moved, matrix.p @ (matrix.p.t() @ error), rtol=1e-10, atol=1e-10)
        for peer in peers:
            assert all(map(torch.equal, peer.averaged, new)) and equal(peer.state(), peers[0].state())


@pytest.mark.parametrize(("shape", "members"), [((30, 20), 1), ((20, 30), 2), ((40, 40), 2), ((21, 5), 1)])
def test_a_gradient_that_stays_is_reached_after_as_many_rounds_as_its_rank_needs(
    shape: tuple[int, int], members: int
) -> None:
    needed = math.ceil(min(shape) / 4)
    found = errors(gradient_of(sum(shape), shape), needed + 2, members)
    assert all(later <= earlier * (1 + 1e-12) + 1e-15 for earlier, later in pairwise(found))
    assert found[needed - 1] < 1e-10 and found[-1] < 1e-14
    assert found[needed - 2] > 1e-3


@pytest.mark.parametrize("noise", [0.0, 1e-12, 1e-6])
def test_orthogonal_matrices_and_nearly_orthogonal_ones_waste_no_round(noise: float) -> None:
    found = errors(orthogonal(32, noise), 9)
    for done, error in enumerate(found[:7], start=1):
        assert error == pytest.approx(math.sqrt(1 - 4 * done / 32), rel=0.05)
    assert found[7] < 1e-12


def test_columns_are_redrawn_only_where_they_say_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """With gradients that change as those of batches do, the second phase brings what the first one did."""
    peer, brought = Gradients(MODE), list[list[torch.Tensor]]()
    products = peer.method.program._products

    def seen(right: list[torch.Tensor]) -> list[torch.Tensor]:
        brought.append(products(right))
        return brought[-1]

    monkeypatch.setattr(peer.method.program, "_products", seen)
    for seed in range(10):
        peer.draw(seed, 2)
        peer.freeze()
        round_of([peer], seed=bytes([seed]))
    assert len(brought) == 20
    assert all(map(torch.equal, *brought[2 * seed : 2 * seed + 2]) for seed in range(10))


def test_the_gradients_that_an_optimizer_gets_are_not_the_estimate() -> None:
    peer = Gradients(MODE)
    peer.draw(0, 2)
    peer.freeze()
    round_of([peer])
    before = estimate(peer)
    for tensor in peer.method.averaged:
        tensor.mul_(0.5)  # as one that clips in place
    assert all(map(torch.equal, estimate(peer), before))
