"""PowerSGD: what a round does not carry stays with the peer for the next one (arXiv 1905.13727, algorithms 1 and 2).

    S ← S + n G              residual of this peer, in sums over samples; G its mean gradient over n samples
    P ← Σ S Q / N            all-reduce, N = Σ n; then made orthonormal
    Q ← Σ Sᵀ P / N           all-reduce
    L = P Qᵀ                 what everyone steps with
    S ← S − n L

In sums over samples residuals stay right when weights change from round to round: over any rounds of the same members
Σ N L + Σ S = Σ n G. A peer that leaves takes its residual along.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from swarmcli.optim.gradients.accumulator import GradientAccumulator
from swarmcli.optim.gradients.low_rank import Difference
from swarmcli.optim.gradients.low_rank_method import LowRankMethod, Rank
from swarmcli.optim.gradients.method import Outline


class PowerSGDMethod(LowRankMethod):
    """GradientMethod. S and Q change only in `finish`, so a round that fails or is repeated adds nothing twice."""

    name = "powersgd"

    def __init__(self, accumulator: GradientAccumulator, rank: Rank) -> None:
        super().__init__(accumulator, rank)
        self._residuals = [torch.zeros_like(matrix.mean) for matrix in self.matrices]

    @property
    def own(self) -> Mapping[str, torch.Tensor]:
        """The residuals, as (rows, cols)."""
        return {f"residual{index}": each for index, each in zip(self.indices, self._residuals, strict=True)}

    def reset_own(self) -> None:
        """Residuals of gradients at parameters that this peer does not hold any more are dropped."""
        for residual in self._residuals:
            residual.zero_()

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


@dataclass(frozen=True)
class PowerSGD(Rank):
    """MethodFactory with the options of Rank."""

    def __call__(self, accumulator: GradientAccumulator) -> PowerSGDMethod:
        return PowerSGDMethod(accumulator, self)

    def outline(self, parameters: Sequence[torch.Tensor]) -> Outline:
        method = self(GradientAccumulator(parameters))
        return Outline(method.tensors, method.program)
