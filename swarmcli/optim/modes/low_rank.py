"""Synchronous training with PowerSGD or PowerEF: large gradients travel as two thin matrices."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from swarmcli.averaging import AveragerCore
from swarmcli.optim.gradients.accumulator import Accumulator, Shapes
from swarmcli.optim.gradients.low_rank_methods import LowRankMethod, PowerEFMethod, PowerSGDMethod, Rank
from swarmcli.optim.modes.synchronous import Synchronous
from swarmcli.optim.state.buffers import room_for

if TYPE_CHECKING:
    from swarmcli.averaging import AveragerConfig
    from swarmcli.dht import DHTNode


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

    def assisting_averager(
        self,
        node: DHTNode,
        config: AveragerConfig,
        parameters: Sequence[torch.Tensor],
        buffers: Sequence[torch.Tensor] = (),
    ) -> AveragerCore:
        """It needs to know the program of the rounds, and what they average: no sums, means or residuals."""
        with torch.device("meta"):
            method = self.method(Shapes.of(parameters), room_for(buffers))
        tensors = [torch.empty_like(each, device="cpu") for each in method.tensors]
        return AveragerCore(tensors, node, config, program=method.program)


class PowerSGD(LowRank):
    def method(self, accumulator: Accumulator | Shapes, beside: Sequence[torch.Tensor] = ()) -> PowerSGDMethod:
        return PowerSGDMethod(accumulator, self.rank, beside)


class PowerEF(LowRank):
    def method(self, accumulator: Accumulator | Shapes, beside: Sequence[torch.Tensor] = ()) -> PowerEFMethod:
        return PowerEFMethod(accumulator, self.rank, beside)
