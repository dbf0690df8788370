"""An optimizer whose statistics lie elsewhere, as a site's do; here only behind a fence that counts what passes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch

from swarmcli.averaging.state.distant import AnyTensor, DistantTensor
from swarmcli.compression import TensorDescriptor
from swarmcli.compression.base import tensor_memory
from swarmcli.errors import SiteError
from swarmcli.optim.state.statistics import OwnStatistics, Piece


class Still(DistantTensor):
    """A copy of one moment."""

    def __init__(self, statistics: Elsewhere, tensor: torch.Tensor) -> None:
        super().__init__(TensorDescriptor.of(tensor))
        self._statistics, self._copy = statistics, tensor.detach().clone()
        statistics.pinned += 1

    def read(self, begin: int, end: int) -> memoryview:
        self._statistics.look(end - begin)
        return tensor_memory(self._copy)[begin:end]

    def __del__(self) -> None:
        self._statistics.pinned -= 1


class Elsewhere:
    """`most` is the largest piece, in bytes, that came or went at a time; `pinned` how many copies are held."""

    waits = True
    spool: Path | None = None

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._own = OwnStatistics(optimizer)
        self.most = self.pinned = 0
        self.gone = False

    def capture(self) -> tuple[dict[str, AnyTensor], dict[str, Any]]:
        self.look(0)
        tensors, numbers = self._own.capture()
        return {
            place: Still(self, tensor) if tensor.dim() else tensor  # small ones come by themselves
            for place, tensor in tensors.items()
            if isinstance(tensor, torch.Tensor)
        }, numbers

    def staged(
        self, tensors: Mapping[str, AnyTensor], numbers: Mapping[str, Any], groups: Sequence[dict[str, Any]]
    ) -> AbstractContextManager[Any]:
        return self._own.staged(tensors, numbers, groups)

    def describe(self) -> dict[str, TensorDescriptor]:
        self.look(0)
        return self._own.describe()

    def read(self, pieces: Sequence[Piece]) -> list[torch.Tensor]:
        values = self._own.read(pieces)
        self.look(sum(value.nbytes for value in values))
        return values

    def write(self, pieces: Sequence[Piece], values: Sequence[torch.Tensor]) -> None:
        self.look(sum(value.nbytes for value in values))
        self._own.write(pieces, values)

    def look(self, nbytes: int) -> None:
        if self.gone:
            raise SiteError("rank 1 is gone")
        self.most = max(self.most, nbytes)


class AdamElsewhere(torch.optim.Optimizer):
    """Adam; its `state` is empty, and its statistics are elsewhere."""

    def __init__(self, parameters: Iterable[torch.Tensor]) -> None:
        self.inner = torch.optim.Adam(parameters, lr=0.1)
        super().__init__(self.inner.param_groups, self.inner.defaults)
        self.inner.param_groups = self.param_groups
        self.statistics = Elsewhere(self.inner)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.inner.step()


def adam(parameters: Iterable[torch.Tensor]) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=0.1)
