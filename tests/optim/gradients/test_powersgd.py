"""PowerSGD: what is not sent stays and is not lost, whoever comes and goes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from swarmcli.optim.modes.low_rank import PowerSGD
from tests.optim.gradients.low_rank_peers import SHAPES, Gradients, broken_off, equal, gradient_of, round_of

MODE = PowerSGD(averager_rank=2, min_compression_ratio=0.1)


def residuals(peer: Gradients) -> list[torch.Tensor]:
    return [each.clone() for each in peer.method.own.values()]


def compressed(peer: Gradients, gradients: list[torch.Tensor]) -> list[torch.Tensor]:
    return [gradients[index].reshape(matrix.mean.shape) for index, matrix in peer.method.matrices.items()]


def test_which_tensors_are_compressed() -> None:
    peer = Gradients(MODE)
    assert [SHAPES[index] for index in peer.method.matrices] == [(12, 10), (8, 3, 2, 2)]
    assert [tuple(m.mean.shape) for m in peer.method.matrices.values()] == [(12, 10), (8, 12)]
    assert list(peer.method.shared) == ["q0", "q1"] and list(peer.method.own) == ["residual0", "residual1"]
    assert [list(phase) for phase in peer.method.program.phases] == [[0, 1], [2, 3, 4, 5, 6, 7, 8]]


@settings(deadline=None, max_examples=40)
@given(st.lists(st.lists(st.integers(0, 9), min_size=3, max_size=3).filter(any), min_size=1, max_size=5))
def test_nothing_is_lost(rounds: list[list[int]]) -> None:
    """Σ over rounds of N L, and all residuals, are Σ of n G, whatever the weights from round to round, zeros too."""
    peers = [Gradients(MODE) for _ in range(3)]
    given_in = [torch.zeros_like(m.mean) for m in peers[0].method.matrices.values()]
    handed_out = [torch.zeros_like(m.mean) for m in peers[0].method.matrices.values()]
    for number, weights in enumerate(rounds):
        for index, (peer, samples) in enumerate(zip(peers, weights, strict=True)):
            for total, gradient in zip(
                given_in, compressed(peer, peer.draw(10 * number + index, samples)), strict=True
            ):
                total += samples * gradient
            peer.freeze()
        total_samples = round_of(peers, seed=bytes([number]))
        assert total_samples == sum(weights)
        for total, average in zip(handed_out, compressed(peers[0], peers[0].averaged), strict=True):
            total += total_samples * average
    for place, expected in enumerate(given_in):
        held = sum(residuals(peer)[place] for peer in peers)
        torch.testing.assert_close(handed_out[place] + held, expected, rtol=1e-11, atol=1e-11)
    for peer in peers[1:]:
        assert equal(dict(peer.method.shared), dict(peers[0].method.shared))
        assert all(map(torch.equal, peer.averaged, peers[0].averaged))


def test_the_average_is_the_best_in_the_span_of_p() -> None:
    peers = [Gradients(MODE) for _ in range(2)]
    means = []
    for index, peer in enumerate(peers):
        means.append(compressed(peer, peer.draw(index, 1 + index)))
        peer.freeze()
    round_of(peers)
    for place, matrix in enumerate(peers[0].method.matrices.values()):
        mean = (means[0][place] + 2 * means[1][place]) / 3
        expected = matrix.p @ (matrix.p.t() @ mean)
        torch.testing.assert_close(compressed(peers[0], peers[0].averaged)[place], expected)
        torch.testing.assert_close(matrix.right, mean.t() @ matrix.p)
    rest = peers[0].method.rest
    for index in rest:
        one, other = gradient_of(0 + index, SHAPES[index]), gradient_of(100 + index, SHAPES[index])
        torch.testing.assert_close(peers[0].averaged[index], (one + 2 * other) / 3)


def test_a_round_that_fails_or_is_tried_again_adds_nothing_twice() -> None:
    peers, twins = [[Gradients(MODE) for _ in range(2)] for _ in range(2)]
    for group in (peers, twins):
        for index, peer in enumerate(group):
            peer.draw(index, 2)
            peer.freeze()
        round_of(group)
        for index, peer in enumerate(group):
            peer.draw(5 + index, 3)
    for peer in peers:
        before = peer.state()
        for number in range(3):  # tries that end after either phase, or before any
            peer.freeze()
            broken_off(peer, number)
            peer.accumulator.restore()
            assert equal(before, peer.state())
    for group in (peers, twins):
        for peer in group:
            peer.freeze()
        round_of(group, seed=b"second")
    for one, other in zip(peers, twins, strict=True):
        assert equal(one.state(), other.state()) and all(map(torch.equal, one.averaged, other.averaged))


def test_one_that_was_left_out_keeps_its_residual_as_it_was() -> None:
    peers = [Gradients(MODE) for _ in range(3)]
    for seed in (0, 10):
        before = residuals(peers[2])
        for index, peer in enumerate(peers):
            peer.draw(seed + index, 2)
            peer.freeze()
        total = round_of(peers, seed=bytes([seed]), left_out=[2] if seed else [])
    assert total == 4 and all(map(torch.equal, residuals(peers[2]), before))
    assert all(map(torch.equal, peers[2].averaged, peers[0].averaged))
    assert equal(dict(peers[2].method.shared), dict(peers[0].method.shared))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_layer_whose_gradient_was_zero_learns_again(dtype: torch.dtype) -> None:
    peer = Gradients(MODE, [(12, 10)], dtype)
    for _ in range(3):
        peer.accumulate([torch.zeros(12, 10, dtype=dtype)], 1)
        peer.freeze()
        peer.method.alone()  # a round with nobody else
        peer.finish(1)
        assert float(peer.averaged[0].abs().max()) == 0
    gradient = gradient_of(1, (12, 10), dtype)
    peer.accumulate([gradient], 1)
    peer.freeze()
    round_of([peer], seed=b"now")
    assert float(peer.averaged[0].norm() / gradient.norm()) > 0.2


def test_rank_above_what_a_matrix_allows_is_exact() -> None:
    shapes = [(6, 2), (1, 3), (2, 6), (3, 3)]
    peer = Gradients(PowerSGD(averager_rank=50, min_compression_ratio=-1000), shapes)
    assert len(peer.method.matrices) == 3
    gradients = peer.draw(3, 4)
    peer.freeze()
    round_of([peer])
    for gradient, average in zip(gradients, peer.averaged, strict=True):
        torch.testing.assert_close(average, gradient)
    assert float(max(each.abs().max() for each in peer.method.own.values())) < 1e-12
