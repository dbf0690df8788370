"""Synchronous training with PowerSGD or PowerEF: large gradients travel as two thin matrices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from swarmcli.optim.gradients.low_rank_methods import LowRankMethod, PowerEFMethod, PowerSGDMethod, Rank
from swarmcli.optim.modes.gradients import Mode


@dataclass(frozen=True, kw_only=True)
class LowRank(Mode):
    """Synchronous training with a low-rank method. Rank explains the options."""

    averager_rank: int
    min_compression_ratio: float = 0.5
    kind: ClassVar[type[LowRankMethod]]

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

    def method(self, means: Sequence[torch.Tensor], beside: Sequence[torch.Tensor] = ()) -> LowRankMethod:
        return self.kind(means, self.rank, beside)


class PowerSGD(LowRank):
    kind = PowerSGDMethod


class PowerEF(LowRank):
    kind = PowerEFMethod
