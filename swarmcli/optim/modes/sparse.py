"""Synchronous training with the largest gradients of each chunk, in few bits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from swarmcli.averaging import AveragerCore
from swarmcli.compression import TopK
from swarmcli.optim.gradients.accumulator import Accumulator, Shapes
from swarmcli.optim.gradients.sparse_method import SparseMethod
from swarmcli.optim.modes.synchronous import Synchronous
from swarmcli.optim.state.buffers import room_for

if TYPE_CHECKING:
    from swarmcli.averaging import AveragerConfig
    from swarmcli.dht import DHTNode


@dataclass(frozen=True, kw_only=True)
class Sparse(Synchronous):
    """For `k` and `bits` see TopK, for `decay` (0 to 1) SparseMethod. Raises ValueError, which names the option."""

    k: int = 64
    bits: int = 2
    decay: float = 0.95

    def __post_init__(self) -> None:
        super().__post_init__()
        _ = self.codec  # checks it
        if not 0 <= self.decay <= 1:
            raise ValueError(f"decay={self.decay!r}: expected a share from 0 to 1")

    @property
    def codec(self) -> TopK:
        return TopK(self.k, self.bits)

    def method(self, accumulator: Accumulator | Shapes, beside: Sequence[torch.Tensor] = ()) -> SparseMethod:
        return SparseMethod(accumulator, self.codec, self.decay, beside)

    def assisting_averager(
        self,
        node: DHTNode,
        config: AveragerConfig,
        parameters: Sequence[torch.Tensor],
        buffers: Sequence[torch.Tensor] = (),
    ) -> AveragerCore:
        """It has no residuals, but its averages travel as those of the others."""
        with torch.device("meta"):
            method = self.method(Shapes.of(parameters), room_for(buffers))
        tensors = [torch.empty_like(each, device="cpu") for each in method.tensors]
        allreduce = replace(config.allreduce, compression=method.compression)
        return AveragerCore(tensors, node, replace(config, allreduce=allreduce))
