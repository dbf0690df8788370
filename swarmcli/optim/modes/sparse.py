"""Synchronous training in which only the largest gradients of each chunk travel, in few bits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from swarmcli.compression import TopK
from swarmcli.optim.gradients.sparse_method import SparseMethod
from swarmcli.optim.modes.gradients import Mode


@dataclass(frozen=True, kw_only=True)
class Sparse(Mode):
    """TopK explains `k` and `bits`, SparseMethod `decay` (0 to 1). Raises ValueError, which names the option."""

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

    def method(self, means: Sequence[torch.Tensor], beside: Sequence[torch.Tensor] = ()) -> SparseMethod:
        return SparseMethod(means, self.codec, self.decay, beside)
