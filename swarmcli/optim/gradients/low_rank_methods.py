"""PowerSGD and PowerEF: gradients that travel as two thin matrices P and Q, in a round of two or three phases.

    P of every matrix                                          (rows, rank)
    PowerEF: P once more, with other columns of Q where these said nothing
    Q of every matrix, the other gradients                     (cols, rank)

A peer's own part of P and Q is linear in what it compresses, so weighted means of the parts are the P and Q of the
weighted mean, whatever the weights.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from swarmcli.averaging.checks import check_numbers
from swarmcli.averaging.round.program import Phases, run_alone
from swarmcli.optim.gradients.accumulator import LEAST_WEIGHT, Accumulator, GradientMethod, Shapes
from swarmcli.optim.gradients.low_rank import Difference, flattened, orthonormalized, redrawn, saved, stuck, vanished


@dataclass(frozen=True)
class Rank:
    """How far matrices are compressed. Raises ValueError or TypeError.

    averager_rank           columns of P and Q; a matrix that has fewer rows or columns gets as many as those
    min_compression_ratio   a matrix of which a smaller share would be saved is sent as it is
    """

    averager_rank: int
    min_compression_ratio: float = 0.5

    def __post_init__(self) -> None:
        check_numbers(averager_rank=self.averager_rank, min_compression_ratio=self.min_compression_ratio)
        if not isinstance(self.averager_rank, int) or self.averager_rank < 1:
            raise ValueError(f"averager_rank must be a whole number of at least 1, got {self.averager_rank!r}")
        if not self.min_compression_ratio < 1:
            raise ValueError(f"min_compression_ratio must be below 1, got {self.min_compression_ratio!r}")

    def matrix(self, shape: Sequence[int]) -> tuple[int, int] | None:
        """Rows and columns of a gradient that is compressed; None for one that is not."""
        extents = flattened(shape)
        if extents is None or saved(*extents, self.averager_rank) < self.min_compression_ratio:
            return None
        return extents


@dataclass(frozen=True)
class Matrix:
    """A compressed gradient. `p` and `q` hold what the last round gave, P orthonormal; `right` is the Q of all peers
    between rounds, zero before the first one."""

    mean: torch.Tensor  # (rows, cols), of the accumulator's memory
    p: torch.Tensor  # (rows, rank)
    q: torch.Tensor  # (cols, rank)
    right: torch.Tensor  # (cols, rank)

    @classmethod
    def of(cls, mean: torch.Tensor, extents: tuple[int, int], rank: int) -> Matrix:
        rows, cols = extents
        rank = min(rank, rows, cols)
        p, q, right = (torch.zeros(length, rank, dtype=mean.dtype) for length in (rows, cols, cols))
        return cls(mean.view(rows, cols), p, q, right)


class LowRankMethod(GradientMethod, ABC):
    """Averages most matrices as products of two thin ones."""

    name: str
    redraws_stuck = False  # whether columns of P that say nothing are asked for again with other columns of Q

    def __init__(self, accumulator: Accumulator | Shapes, rank: Rank, beside: Sequence[torch.Tensor] = ()) -> None:
        super().__init__(accumulator, beside)
        shapes = [rank.matrix(mean.shape) for mean in accumulator.means]
        self.indices = [index for index, extents in enumerate(shapes) if extents is not None]
        self.matrices = [
            Matrix.of(mean, extents, rank.averager_rank)
            for mean, extents in zip(accumulator.means, shapes, strict=True)
            if extents is not None
        ]
        self.uncompressed = [index for index, extents in enumerate(shapes) if extents is None]
        self.rest = [accumulator.means[index] for index in self.uncompressed]
        self.tensors = [
            *(m.p for m in self.matrices),
            *(m.q for m in self.matrices),
            *self.rest,
            *self.beside,
        ]
        self.program: LowRankProgram = LowRankProgram(
            self, f"{self.name} {rank.averager_rank} {float(rank.min_compression_ratio)}"
        )
        self.samples = 0.0  # that the means were loaded with

    @property
    def shared(self) -> Mapping[str, torch.Tensor]:
        return {f"q{index}": matrix.right for index, matrix in zip(self.indices, self.matrices, strict=True)}

    def load(self, weight: float) -> None:
        self.samples = weight if weight > LEAST_WEIGHT else 0.0  # a residual divided by next to nothing is no mean

    def alone(self) -> None:
        seed = hashlib.sha256(b"swarm alone" + b"".join(m.right.numpy().tobytes() for m in self.matrices)).digest()
        with torch.no_grad():
            for tensor, result in zip(self.tensors, run_alone(self.program, seed), strict=True):
                tensor.copy_(result)

    @torch.no_grad()
    def finish(self, samples: float, counted: bool) -> None:
        self._conclude(self.samples if counted else 0.0)
        for matrix in self.matrices:
            matrix.right.copy_(matrix.q)
        self.samples = 0.0

    @abstractmethod
    def differences(self) -> list[Difference]:
        """The part of each matrix that this peer compresses, per sample."""

    @abstractmethod
    def differences_of_rest(self) -> list[torch.Tensor]:
        """The part of the other gradients that it sends."""

    @abstractmethod
    def _conclude(self, samples: float) -> None:
        """Writes the averages, from what `tensors` hold; `samples` of this peer are in them."""


class PowerSGDMethod(LowRankMethod):
    """The rest that a round does not carry stays with the peer for the next one (arXiv 1905.13727, algorithms 1 and 2).

        S ← S + n G              residual of this peer, in sums over samples; G its mean gradient over n samples
        P ← Σ S Q / N            all-reduce, N = Σ n; then made orthonormal
        Q ← Σ Sᵀ P / N           all-reduce
        L = P Qᵀ                 what everyone steps with
        S ← S − n L

    In sums over samples residuals stay right when weights change from round to round: over any rounds of the same
    members Σ N L + Σ S = Σ n G. A peer that leaves takes its residual along.

    S and Q change only in `finish`, so a round that fails or is repeated adds nothing twice.
    """

    name = "powersgd"

    def __init__(self, accumulator: Accumulator | Shapes, rank: Rank, beside: Sequence[torch.Tensor] = ()) -> None:
        super().__init__(accumulator, rank, beside)
        self._residuals = [torch.zeros_like(matrix.mean) for matrix in self.matrices]

    @property
    def own(self) -> Mapping[str, torch.Tensor]:
        """The residuals, as (rows, cols)."""
        return {f"residual{index}": each for index, each in zip(self.indices, self._residuals, strict=True)}

    def differences(self) -> list[Difference]:
        pairs = zip(self.matrices, self._residuals, strict=True)
        return [Difference(matrix.mean, residual, 1.0 / self.samples) for matrix, residual in pairs]

    def differences_of_rest(self) -> list[torch.Tensor]:
        return self.rest

    def _conclude(self, samples: float) -> None:
        for matrix, residual in zip(self.matrices, self._residuals, strict=True):
            if samples:
                residual.add_(matrix.mean, alpha=samples)
            torch.mm(matrix.p, matrix.q.t(), out=matrix.mean)
            if samples:
                residual.add_(matrix.mean, alpha=-samples)


class PowerEFMethod(LowRankMethod):
    """An estimate of the mean gradient that all peers share and correct with low rank (EF21, arXiv 2106.05203).

        P ← Σ n (G − g) Q / N      all-reduce; then made orthonormal
        Q ← Σ n (G − g)ᵀ P / N     all-reduce, with the differences of gradients that are not compressed
        g ← g + P Qᵀ               what everyone steps with: g' − g = P Pᵀ (mean G − g)

    The error mean G − g of a gradient that stays the same never grows, since P Pᵀ is a projection, and each round
    takes as many dimensions from its range as P has columns. There is nothing that only one peer knows; a newcomer
    needs g and Q.

    g and Q change only in `finish`.
    """

    name = "poweref"
    # Under E Eᵀ of an orthogonal E every span is invariant: E Q of the Q that comes from the last P is in the span of
    # that P, of which nothing is left in the error, and every second round would do nothing.
    redraws_stuck = True

    def __init__(self, accumulator: Accumulator | Shapes, rank: Rank, beside: Sequence[torch.Tensor] = ()) -> None:
        super().__init__(accumulator, rank, beside)
        self._estimates = [torch.zeros_like(mean) for mean in accumulator.means]
        self._of_matrices = [
            self._estimates[index].view(matrix.mean.shape)
            for index, matrix in zip(self.indices, self.matrices, strict=True)
        ]
        self._of_rest = [self._estimates[index] for index in self.uncompressed]

    @property
    def shared(self) -> Mapping[str, torch.Tensor]:
        """Q and g, the latter in the shapes of the parameters."""
        return {**super().shared, **{f"g{index}": each for index, each in enumerate(self._estimates)}}

    def differences(self) -> list[Difference]:
        pairs = zip(self.matrices, self._of_matrices, strict=True)
        return [Difference(matrix.mean, estimate, -1.0) for matrix, estimate in pairs]

    def differences_of_rest(self) -> list[torch.Tensor]:
        return [mean - estimate for mean, estimate in zip(self.rest, self._of_rest, strict=True)]

    def _conclude(self, samples: float) -> None:
        # Into the means, and a copy of that: an optimizer that scales its gradients in place must not change g.
        for matrix, estimate in zip(self.matrices, self._of_matrices, strict=True):
            torch.addmm(estimate, matrix.p, matrix.q.t(), out=matrix.mean)
            estimate.copy_(matrix.mean)
        for difference, estimate in zip(self.rest, self._of_rest, strict=True):
            estimate.add_(difference)
            difference.copy_(estimate)


class LowRankProgram:
    """RoundProgram of a method. It reads means and what outlives rounds, and changes neither.

    A column of Q that has vanished, as that of a layer whose gradient was zero does, is drawn anew before it is used,
    from a seed that the group shares: a product with it would be zero for ever.
    """

    def __init__(self, method: LowRankMethod, description: str) -> None:
        self._method = method
        self.description = description

    @cached_property
    def nbytes(self) -> int:
        return sum(mean.nbytes for mean in self._method.averaged)

    @cached_property
    def phases(self) -> Sequence[Sequence[int]]:
        count, total = len(self._method.matrices), len(self._method.tensors)
        if not count:
            return (range(total),)
        return (*(range(count) for _ in range(1 + self._method.redraws_stuck)), range(count, total))

    @torch.no_grad()
    def run(self, seed: bytes) -> Phases:
        method, p = self._method, list[torch.Tensor]()
        if method.matrices:
            lost = [vanished(matrix.right) for matrix in method.matrices]
            right = [
                redrawn(matrix.right, columns, seed, place)
                for place, (matrix, columns) in enumerate(zip(method.matrices, lost, strict=True))
            ]
            averages = yield self._products(right)
            if method.redraws_stuck:
                right = [
                    redrawn(each, _fresh(average, each, columns), seed, place, 1 << 32)  # another label
                    for place, (average, each, columns) in enumerate(zip(averages, right, lost, strict=True))
                ]
                averages = yield self._products(right)
            p = [orthonormalized(average, seed, place) for place, average in enumerate(averages)]
        return [*p, *(yield self._others(p))]

    def _products(self, right: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        if not self._method.samples:  # its weight is zero
            return [torch.zeros_like(matrix.p) for matrix in self._method.matrices]
        return [each.times(q) for each, q in zip(self._method.differences(), right, strict=True)]

    def _others(self, p: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        method = self._method
        if not method.samples:
            return [torch.zeros_like(tensor) for tensor in method.tensors[len(p) :]]
        products = [each.transposed_times(left) for each, left in zip(method.differences(), p, strict=True)]
        return [*products, *method.differences_of_rest(), *method.beside]


def _fresh(product: torch.Tensor, right: torch.Tensor, drawn: Sequence[int]) -> list[int]:
    """The columns of Q to be asked for once more with other numbers. Where one was drawn for this round, a product of
    zero means that there is nothing to compress."""
    return [column for column in stuck(product, right) if column not in drawn]
