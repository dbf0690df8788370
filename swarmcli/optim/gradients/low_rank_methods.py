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
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from swarmcli.averaging.checks import check_numbers
from swarmcli.averaging.round.program import Phases, run_alone
from swarmcli.optim.gradients.accumulator import GradientMethod
from swarmcli.optim.gradients.low_rank import flattened, orthonormalized, redrawn, saved, stuck, vanished


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
    """Averages most matrices as products of two thin ones. It is the RoundProgram of its rounds, too, whose phases read
    means and what outlives rounds, and change neither.

    A column of Q that has vanished, as that of a layer whose gradient was zero does, is drawn anew before it is used,
    from a seed that the group shares: a product with it would be zero for ever.
    """

    name: str
    redraws_stuck = False  # whether columns of P that say nothing are asked for again with other columns of Q

    def __init__(self, means: Sequence[torch.Tensor], rank: Rank, beside: Sequence[torch.Tensor] = ()) -> None:
        super().__init__(means, beside)
        self.description = f"{self.name} {rank.averager_rank} {float(rank.min_compression_ratio)}"
        self.nbytes = sum(mean.nbytes for mean in means)
        self.matrices: dict[int, Matrix] = {}  # by the index of their gradient
        for index, mean in enumerate(means):
            if (extents := rank.matrix(mean.shape)) is not None:
                self.matrices[index] = Matrix.of(mean, extents, rank.averager_rank)
        self.rest = {index: mean for index, mean in enumerate(means) if index not in self.matrices}
        thin = [*(each.p for each in self.matrices.values()), *(each.q for each in self.matrices.values())]
        self.tensors = [*thin, *self.rest.values(), *beside]

    @property
    def program(self) -> LowRankMethod:
        return self

    @property
    def shared(self) -> Mapping[str, torch.Tensor]:
        return {f"q{index}": matrix.right for index, matrix in self.matrices.items()}

    @property
    def phases(self) -> Sequence[Sequence[int]]:
        count, total = len(self.matrices), len(self.tensors)
        if not count:
            return (range(total),)
        return (*(range(count) for _ in range(1 + self.redraws_stuck)), range(count, total))

    @torch.no_grad()
    def run(self, seed: bytes) -> Phases:
        p = list[torch.Tensor]()
        if self.matrices:
            kept = [matrix.right for matrix in self.matrices.values()]
            lost = [vanished(each) for each in kept]
            right = [
                redrawn(each, columns, seed, place)
                for place, (each, columns) in enumerate(zip(kept, lost, strict=True))
            ]
            averages = yield self._products(right)
            if self.redraws_stuck:
                right = [
                    redrawn(each, _fresh(average, each, columns), seed, place, 1 << 32)  # another label
                    for place, (average, each, columns) in enumerate(zip(averages, right, lost, strict=True))
                ]
                averages = yield self._products(right)
            p = [orthonormalized(average, seed, place) for place, average in enumerate(averages)]
        return [*p, *(yield self._others(p))]

    def _products(self, right: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        if not self.samples:  # its weight is zero
            return [torch.zeros_like(matrix.p) for matrix in self.matrices.values()]
        return [torch.mm(each, q) for each, q in zip(self._compressed(), right, strict=True)]

    def _others(self, p: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        if not self.samples:
            return [torch.zeros_like(tensor) for tensor in self.tensors[len(p) :]]
        products = [torch.mm(each.t(), left) for each, left in zip(self._compressed(), p, strict=True)]
        return [*products, *self._sent_whole(), *self.beside]

    def alone(self) -> None:
        kept = b"".join(matrix.right.numpy().tobytes() for matrix in self.matrices.values())
        results = run_alone(self, hashlib.sha256(b"swarm alone" + kept).digest())
        for tensor, result in zip(self.tensors, results, strict=True):
            tensor.copy_(result)

    @torch.no_grad()
    def finish(self, samples: float, counted: bool) -> None:
        self._conclude(self.samples if counted else 0.0)
        for matrix in self.matrices.values():
            matrix.right.copy_(matrix.q)
        self.samples = 0.0

    @abstractmethod
    def _compressed(self) -> Iterator[torch.Tensor]:
        """The part of each matrix that this peer compresses, per sample; one at a time, since each takes its memory."""

    @abstractmethod
    def _sent_whole(self) -> list[torch.Tensor]:
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

    def __init__(self, means: Sequence[torch.Tensor], rank: Rank, beside: Sequence[torch.Tensor] = ()) -> None:
        super().__init__(means, rank, beside)
        self._residuals = {index: torch.zeros_like(matrix.mean) for index, matrix in self.matrices.items()}

    @property
    def own(self) -> Mapping[str, torch.Tensor]:
        """The residuals, as (rows, cols)."""
        return {f"residual{index}": each for index, each in self._residuals.items()}

    def _compressed(self) -> Iterator[torch.Tensor]:
        for index, matrix in self.matrices.items():
            yield matrix.mean.add(self._residuals[index], alpha=1.0 / self.samples)

    def _sent_whole(self) -> list[torch.Tensor]:
        return list(self.rest.values())

    def _conclude(self, samples: float) -> None:
        for index, matrix in self.matrices.items():
            residual = self._residuals[index]
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

    def __init__(self, means: Sequence[torch.Tensor], rank: Rank, beside: Sequence[torch.Tensor] = ()) -> None:
        super().__init__(means, rank, beside)
        self._estimates = [torch.zeros_like(mean) for mean in means]

    @property
    def shared(self) -> Mapping[str, torch.Tensor]:
        """Q and g, the latter in the shapes of the parameters."""
        return {**super().shared, **{f"g{index}": each for index, each in enumerate(self._estimates)}}

    def _compressed(self) -> Iterator[torch.Tensor]:
        for index, matrix in self.matrices.items():
            yield matrix.mean - self._estimates[index].view_as(matrix.mean)

    def _sent_whole(self) -> list[torch.Tensor]:
        return [mean - self._estimates[index] for index, mean in self.rest.items()]

    def _conclude(self, samples: float) -> None:
        # Into the means, and a copy of that: an optimizer that scales its gradients in place must not change g.
        for index, matrix in self.matrices.items():
            estimate = self._estimates[index].view_as(matrix.mean)
            torch.addmm(estimate, matrix.p, matrix.q.t(), out=matrix.mean)
            estimate.copy_(matrix.mean)
        for index, difference in self.rest.items():
            self._estimates[index].add_(difference)
            difference.copy_(self._estimates[index])


def _fresh(product: torch.Tensor, right: torch.Tensor, drawn: Sequence[int]) -> list[int]:
    """The columns of Q to be asked for once more with other numbers. Where one was drawn for this round, a product of
    zero means that there is nothing to compress."""
    return [column for column in stuck(product, right) if column not in drawn]
