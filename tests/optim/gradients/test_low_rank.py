"""The linear algebra of low-rank averaging."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from swarmcli.optim.gradients.low_rank import (
    drawn,
    flattened,
    orthonormalized,
    redrawn,
    stuck,
    vanished,
)

SEED = b"seed of the group"


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


@pytest.mark.parametrize(
    ("shape", "matrix"),
    [
        ((), None),
        ((1, 7), None),
        ((4, 0, 3), None),
        ((5, 7), (5, 7)),
        ((5, 1, 7), (5, 7)),
        ((64, 3, 3, 3), (64, 27)),  # a convolution
        ((3, 3, 64, 128), (576, 128)),
    ],
)
def test_tensors_are_flattened_to_two_dimensions(shape: tuple[int, ...], matrix: tuple[int, int] | None) -> None:
    assert flattened(shape) == matrix


@given(st.integers(1, 40), st.data())
def test_a_basis_is_orthonormal_and_spans_the_columns(rows: int, data: st.DataObject) -> None:
    rank = data.draw(st.integers(1, rows))
    scales = data.draw(st.lists(st.sampled_from([1e-150, 1e-12, 1.0, 1e12, 1e150]), min_size=rank, max_size=rank))
    matrix = random(rows, rank, seed=rows) * torch.tensor(scales, dtype=torch.float64)
    basis = orthonormalized(matrix, SEED)
    torch.testing.assert_close(basis.t() @ basis, torch.eye(rank, dtype=torch.float64), rtol=0, atol=1e-12)
    unit = matrix / matrix.abs().amax(dim=0)
    torch.testing.assert_close(basis @ (basis.t() @ unit), unit, rtol=0, atol=1e-10)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_columns_without_direction_are_drawn_alike_by_everyone(dtype: torch.dtype) -> None:
    """One column is zero, one equals another, one does up to rounding; the span of the two good ones stays."""
    good = random(30, 2, dtype=dtype)
    near = good[:, :1] * (1 + torch.finfo(dtype).eps)
    matrix = torch.cat([good, torch.zeros(30, 1, dtype=dtype), good[:, :1], near], dim=1)
    basis = orthonormalized(matrix, SEED, 7)
    tolerance = 100 * torch.finfo(dtype).eps
    torch.testing.assert_close(basis.t() @ basis, torch.eye(5, dtype=dtype), rtol=0, atol=tolerance)
    torch.testing.assert_close(basis @ (basis.t() @ good), good, rtol=0, atol=10 * tolerance)
    assert torch.equal(basis, orthonormalized(matrix, SEED, 7))
    for other in (orthonormalized(matrix, b"another group", 7), orthonormalized(matrix, SEED, 8)):
        assert torch.allclose(other[:, :2], basis[:, :2]) and not torch.allclose(other[:, 2:], basis[:, 2:])


def test_rounding_far_below_the_type_changes_no_decision_and_next_to_no_bit() -> None:
    """Unlike processors hold equal averages, but their sums differ in the last bits of float64."""
    matrix = random(200, 4, dtype=torch.float32)
    columns = torch.tensor([2, 0, 1, 3])
    one = orthonormalized(matrix, SEED)
    other = orthonormalized(matrix.flip(0), SEED).flip(0)  # sums in another order
    assert (one != other).float().mean() < 1e-3
    assert orthonormalized(matrix[:, columns], SEED).shape == one.shape


def test_drawn_numbers_are_the_same_for_ever() -> None:
    """Peers with other versions of torch, of this package or of Python draw these too."""
    column = drawn(b"seed", 1, 2, length=4, dtype=torch.float64)
    expected = [-0.2945111, -0.567148, -0.5446446, -0.3767434]
    torch.testing.assert_close(column, torch.tensor(expected, dtype=torch.float64), rtol=0, atol=1e-6)
    many = drawn(b"seed", length=20_000, dtype=torch.float32)
    assert abs(float(many.mean())) < 0.02 and abs(float(many.square().mean()) - 1 / 3) < 0.01
    assert not torch.equal(drawn(b"seed", 1, length=4, dtype=torch.float64), column)


def test_vanished_columns_are_drawn_and_others_stay() -> None:
    matrix = random(9, 3, dtype=torch.float32)
    matrix[:, 1] = 0
    matrix[:, 2] *= 1e-30
    assert vanished(matrix) == [1, 2]
    again = redrawn(matrix, vanished(matrix), SEED, 0)
    assert torch.equal(again[:, 0], matrix[:, 0]) and vanished(again) == []
    assert redrawn(matrix, [], SEED) is matrix and float(matrix[:, 1].abs().sum()) == 0


@pytest.mark.parametrize("noise", [0.0, 1e-9, 1e-5, 1e-3])
def test_a_span_that_is_nearly_invariant_is_found(noise: float) -> None:
    """After a round with orthogonal E nothing is left of it in the span of P, to which E Q leads."""
    e = torch.linalg.qr(random(24, 24))[0] + noise * random(24, 24, seed=2)
    p = orthonormalized(e @ random(24, 3, seed=1), SEED)
    q = e.t() @ p
    error = e - p @ q.t()
    assert stuck(error @ q, q) == [0, 1, 2]
    assert stuck(error @ random(24, 3, seed=5), q) == []


@pytest.mark.parametrize("seed", range(10))
def test_random_matrices_are_not_taken_for_that(seed: int) -> None:
    e = random(30, 20, seed=seed)
    p = orthonormalized(e @ random(20, 4, seed=seed + 100), SEED)
    q = e.t() @ p
    assert stuck((e - p @ q.t()) @ q, q) == []
