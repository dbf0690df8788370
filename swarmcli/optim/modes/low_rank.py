"""Synchronous training with PowerSGD or PowerEF: large gradients travel as two thin matrices."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from swarmcli.optim.gradients.accumulator import Accumulator, Shapes
from swarmcli.optim.gradients.low_rank_methods import LowRankMethod, PowerEFMethod, PowerSGDMethod, Rank
from swarmcli.optim.modes.synchronous import Synchronous


@dataclass(frozen=True, kw_only=True)
class LowRank(Synchronous):
    """For the options see Rank."""

    averager_rank: int
    min_compression_ratio: float = 0.5

    def __post_init__(self) -> None:
        super().__post_init__()
        _ = self.rank  # checks it
        if self.target_group_size is not None:
            raise ValueError(
                "target_group_size: PowerSGD and PowerEF need one group of all peers, since what these share (Q, "
                "estimates) has to be the same for everyone"
            )

    @property
    def rank(self) -> Rank:
        return Rank(self.averager_rank, self.min_compression_ratio)

    @abstractmethod
    def method(self, accumulator: Accumulator | Shapes, beside: Sequence[torch.Tensor] = ()) -> LowRankMethod: ...


class PowerSGD(LowRank):
    def method(self, accumulator: Accumulator | Shapes, beside: Sequence[torch.Tensor] = ()) -> PowerSGDMethod:
        return PowerSGDMethod(accumulator, self.rank, beside)


class PowerEF(LowRank):
    def method(self, accumulator: Accumulator | Shapes, beside: Sequence[torch.Tensor] = ()) -> PowerEFMethod:
        return PowerEFMethod(accumulator, self.rank, beside)
