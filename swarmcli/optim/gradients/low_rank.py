"""The linear algebra of low-rank averaging: pure functions, the same on every peer.

    E    (rows, cols)  what is compressed
    Q    (cols, rank)  from the last round: Eᵀ P of that round
    P    (rows, rank)  E Q, made orthonormal; then Q = Eᵀ P, and P Qᵀ is the best approximation of E in the span of P

All peers decide alike, since they decide by bits that they share, and in float64: averages of all-reduces are equal to
the last bit everywhere, but what processors compute from them is not.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence

import numpy
import torch

# A column that is shorter than this share of its usual length says next to nothing: the inverse of the share is how
# much rounding errors along the columns before it grow each round. Random matrices have 0.2 and more; orthogonal ones
# with noise of size x about 3 x.
_NEARLY_INVARIANT = 0.02
_SLACK = 16.0  # times the unit roundoff: what is no larger is a rounding error


def flattened(shape: Sequence[int]) -> tuple[int, int] | None:
    """The two dimensions to which a tensor is flattened; None if it has fewer than two that are not 1, or is empty.

    Neighbors with the smallest product are merged until two are left, which keeps the matrix nearly square.
    """
    extents = [extent for extent in shape if extent != 1]
    if len(extents) < 2 or 0 in extents:
        return None
    while len(extents) > 2:
        at = min(range(len(extents) - 1), key=lambda i: extents[i] * extents[i + 1])
        extents[at : at + 2] = [extents[at] * extents[at + 1]]
    return extents[0], extents[1]


def saved(rows: int, cols: int, rank: int) -> float:
    """The share of a matrix that need not be sent: 1 − rank (rows + cols) / (rows cols)."""
    return 1.0 - rank * (rows + cols) / (rows * cols)


def drawn(seed: bytes, *label: int, length: int, dtype: torch.dtype) -> torch.Tensor:
    """(length,) numbers between −1 and 1, equal at all peers, on any processor and with any library."""
    name = b"swarm column" + b"".join(number.to_bytes(8, "big") for number in label)
    digits = hashlib.shake_128(seed + name).digest(4 * length)
    return torch.from_numpy(numpy.frombuffer(digits, dtype="<i4") / 2.0**31).to(dtype)


def vanished(matrix: torch.Tensor) -> list[int]:
    """The columns that are zero, or so small that their squares vanish."""
    least = math.sqrt(torch.finfo(matrix.dtype).tiny)
    return (matrix.abs().amax(dim=0) <= least).nonzero().flatten().tolist()


def redrawn(matrix: torch.Tensor, columns: Sequence[int], seed: bytes, *label: int) -> torch.Tensor:
    """The matrix with these columns drawn again; the matrix itself if there are none."""
    if not columns:
        return matrix
    result = matrix.clone()
    for column in columns:
        result[:, column] = drawn(seed, *label, column, length=len(matrix), dtype=matrix.dtype)
    return result


def orthonormalized(matrix: torch.Tensor, seed: bytes, *label: int) -> torch.Tensor:
    """An orthonormal basis (rows, rank) of the columns' span. The rank must not be above the number of rows.

    Columns that lie, up to rounding, in the span of those before them are drawn anew from the seed.
    """
    unit, _ = _normalized(matrix)
    for attempt in range(matrix.shape[1] + 1):
        basis, remainders = _factored(unit)
        lost = (remainders <= _SLACK * torch.finfo(matrix.dtype).eps).nonzero().flatten().tolist()
        if not lost:
            break
        unit, _ = _normalized(redrawn(unit, lost, seed, *label, attempt))
    return basis.to(matrix.dtype)


def stuck(product: torch.Tensor, right: torch.Tensor) -> list[int]:
    """The columns of `product`, which is E `right`, that say next to nothing about E.

    `right` is Eᵀ P of the last round. If E is much like it was then, column j has about the length |right_j|². If
    nearly all of that is missing, the span of P was nearly invariant under E Eᵀ, and no error is left in it.
    """
    unit, lengths = _normalized(product)
    _, remainders = _factored(unit)
    usual = torch.linalg.vector_norm(right.double(), dim=0).square()
    return (remainders * lengths <= _NEARLY_INVARIANT * usual).nonzero().flatten().tolist()


def _normalized(matrix: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The columns in float64 with length one, or zero; and their lengths before."""
    unit = matrix.double()
    largest = unit.abs().amax(dim=0)
    scale = torch.where(largest > 0, largest, torch.ones_like(largest))
    unit = unit / scale  # so that squares neither overflow nor vanish
    lengths = torch.linalg.vector_norm(unit, dim=0)
    unit.div_(torch.where(lengths > 0, lengths, torch.ones_like(lengths)))
    return unit, lengths * scale


def _factored(unit: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """An orthonormal basis, and for each column how much of its unit length is not in the span of those before it."""
    basis, upper = torch.linalg.qr(unit)
    diagonal = upper.diagonal()
    return basis * diagonal.sign(), diagonal.abs()  # one sign: otherwise rounding could choose between two
