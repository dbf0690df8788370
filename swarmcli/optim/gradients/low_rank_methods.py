"""PowerSGD and PowerEF: gradients travel as two thin matrices P and Q, in a round of two or three phases.

    P of every matrix                                          (rows, rank)
    PowerEF: P once more, with other columns of Q in place of those that said nothing
    Q of every matrix, and the other gradients                 (cols, rank)

A peer's P and Q are linear in what it compresses, so their weighted means over peers are the P and Q of the weighted
mean, whatever the weights.
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

    averager_rank           columns of P and Q; fewer for a matrix that has fewer rows or columns
    min_compression_ratio   a matrix that would save a smaller share than this is sent as it is
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
        """Rows and columns of a gradient of this shape; None if it is not compressed."""
        extents = flattened(shape)
        if extents is None or saved(*extents, self.averager_rank) < self.min_compression_ratio:
            return None
        return extents


@dataclass(frozen=True)
class Matrix:
    """A compressed gradient. `p` and `q` hold the last round's outcome, P orthonormal. `right` is the Q that all peers
    hold between rounds, zero before the first one."""

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
    """Averages most matrices as products of two thin ones. It is also the RoundProgram of its rounds: the phases read
    the means and what outlives rounds, and change neither.

    A column of Q that has vanished, like that of a layer whose gradient was zero, is drawn anew before its use, from a
    seed that the group shares: otherwise products with it would be zero for ever.
    """

    name: str
    redraws_stuck = False  # whether a second phase replaces columns of P that say nothing, by other columns of Q

    def __init__(self, means: Sequence[torch.Tensor], rank: Rank, beside: Sequence[torch.Tensor] = ()) -> None:
        super().__init__(means, beside)
        self.description = f"{self.name} {rank.averager_rank} {float(rank.min_compression_ratio)}"
        self.nbytes = sum(mean.nbytes for mean in means)
        self.matrices: dict[int, Matrix] = {}  # index of a gradient → its matrix
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
        """Yields what this peer compresses of each matrix, per sample; one at a time, since each takes memory."""

    @abstractmethod
    def _sent_whole(self) -> list[torch.Tensor]:
        """What this peer sends of the other gradients."""

    @abstractmethod
    def _conclude(self, samples: float) -> None:
        """Writes the averages to the means, from what `tensors` hold. `samples`: the weight of this peer in them."""


class PowerSGDMethod(LowRankMethod):
    """What a round does not carry stays with the peer for the next one (arXiv 1905.13727, algorithms 1 and 2).

        S ← S + n G              residual of this peer, in sums over samples; G its mean gradient over n samples
        P ← Σ S Q / N            all-reduce, N = Σ n; then made orthonormal
        Q ← Σ Sᵀ P / N           all-reduce
        L = P Qᵀ                 what everyone steps with
        S ← S − n L

    As sums over samples residuals stay right when weights change from round to round: over any rounds of the same
    members Σ N L + Σ S = Σ n G. A peer that leaves takes its residual along.

    S and Q change only in `finish`, so a round that fails, or that is tried again, adds nothing twice.
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
    """All peers share an estimate of the mean gradient, and correct it with low rank (EF21, arXiv 2106.05203).

        P ← Σ n (G − g) Q / N      all-reduce; then made orthonormal
        Q ← Σ n (G − g)ᵀ P / N     all-reduce, with the differences of gradients that are not compressed
        g ← g + P Qᵀ               what everyone steps with: g' − g = P Pᵀ (mean G − g)

    If the gradient stays the same, the error mean G − g never grows, since P Pᵀ is a projection, and each round takes
    as many dimensions from its range as P has columns. No peer has anything of its own; a newcomer needs g and Q.

    g and Q change only in `finish`.
    """

    name = "poweref"
    # If E is orthogonal, every span is invariant under E Eᵀ: with the Q of the last P, E Q is in the span of that P, in
    # which no error is left, so every second round would do nothing.
    redraws_stuck = True

    def __init__(self, means: Sequence[torch.Tensor], rank: Rank, beside: Sequence[torch.Tensor] = ()) -> None:
        super().__init__(means, rank, beside)
        self._estimates = [torch.zeros_like(mean) for mean in means]

    @property
    def shared(self) -> Mapping[str, torch.Tensor]:
        """Q, and g in the shapes of the parameters."""
        return {**super().shared, **{f"g{index}": each for index, each in enumerate(self._estimates)}}

    def _compressed(self) -> Iterator[torch.Tensor]:
        for index, matrix in self.matrices.items():
            yield matrix.mean - self._estimates[index].view_as(matrix.mean)

    def _sent_whole(self) -> list[torch.Tensor]:
        return [mean - self._estimates[index] for index, mean in self.rest.items()]

    def _conclude(self, samples: float) -> None:
        # To the means, and from there to g: an optimizer that scales its gradients in place must not change g.
        for index, matrix in self.matrices.items():
            estimate = self._estimates[index].view_as(matrix.mean)
            torch.addmm(estimate, matrix.p, matrix.q.t(), out=matrix.mean)
            estimate.copy_(matrix.mean)
        for index, difference in self.rest.items():
            self._estimates[index].add_(difference)
            difference.copy_(self._estimates[index])


def _fresh(product: torch.Tensor, right: torch.Tensor, drawn: Sequence[int]) -> list[int]:
    """The columns of Q that the second phase replaces. Not those that were drawn for this round: a product of zero with
    one of these means that there is nothing to compress."""
    return [column for column in stuck(product, right) if column not in drawn]
