"""PowerEF: an estimate of the mean gradient that all peers share and correct with low rank (EF21, arXiv 2106.05203).

    P ← Σ n (G − g) Q / N      all-reduce; then made orthonormal
    Q ← Σ n (G − g)ᵀ P / N     all-reduce, with the differences of gradients that are not compressed
    g ← g + P Qᵀ               what everyone steps with: g' − g = P Pᵀ (mean G − g)

The error mean G − g of a gradient that stays the same never grows, since P Pᵀ is a projection, and each round takes as
many dimensions from its range as P has columns. There is nothing that only one peer knows; a newcomer needs g and Q.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from swarmcli.optim.gradients.accumulator import GradientAccumulator
from swarmcli.optim.gradients.low_rank import Difference
from swarmcli.optim.gradients.low_rank_method import LowRankMethod, Rank
from swarmcli.optim.gradients.method import Outline


class PowerEFMethod(LowRankMethod):
    """GradientMethod. g and Q change only in `finish`."""

    name = "poweref"
    # Under E Eᵀ of an orthogonal E every span is invariant: E Q of the Q that comes from the last P is in the span of
    # that P, of which nothing is left in the error, and every second round would do nothing.
    redraws_stuck = True

    def __init__(self, accumulator: GradientAccumulator, rank: Rank) -> None:
        super().__init__(accumulator, rank)
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

    def reset_own(self) -> None:
        """There is nothing of this peer's own."""

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


@dataclass(frozen=True)
class PowerEF(Rank):
    """MethodFactory with the options of Rank."""

    def __call__(self, accumulator: GradientAccumulator) -> PowerEFMethod:
        return PowerEFMethod(accumulator, self)

    def outline(self, parameters: Sequence[torch.Tensor]) -> Outline:
        method = self(GradientAccumulator(parameters))
        return Outline(method.tensors, method.program)
