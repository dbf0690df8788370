"""The method that changes nothing: everyone's mean gradients are averaged as they are, weighted by samples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from swarmcli.optim.gradients.accumulator import GradientAccumulator, sum_type
from swarmcli.optim.gradients.method import Outline

if TYPE_CHECKING:
    from swarmcli.averaging.phases.program import RoundProgram

_NOTHING: Mapping[str, torch.Tensor] = {}


class PlainMethod:
    """GradientMethod by one all-reduce over the means themselves, in place. Nothing outlives a round."""

    program: RoundProgram | None = None
    shared = own = _NOTHING

    def __init__(self, accumulator: GradientAccumulator) -> None:
        self.averaged: Sequence[torch.Tensor] = accumulator.means
        self.tensors: Sequence[torch.Tensor] = accumulator.means

    def load(self, samples: float) -> None:
        """The means are where they are averaged."""

    def alone(self) -> None:
        """The own means are the average."""

    def finish(self, samples: float, counted: bool) -> None:
        """The average is where it is used."""

    def reset_own(self) -> None:
        """There is nothing of this peer's own."""


@dataclass(frozen=True)
class Plain:
    """MethodFactory without options."""

    def __call__(self, accumulator: GradientAccumulator) -> PlainMethod:
        return PlainMethod(accumulator)

    def outline(self, parameters: Sequence[torch.Tensor]) -> Outline:
        return Outline([torch.empty(p.shape, dtype=sum_type(p.dtype)) for p in parameters], None)
