"""Whose each parameter is."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from swarmcli.sharding.zero.partition import assign


class Ownership:
    """The owner of every parameter by index; parameters that come later are shared out without moving the earlier."""

    def __init__(self, weights: Sequence[float]) -> None:
        """`weights` has one for each rank: how much of the bytes it shall take."""
        self.owners: list[int] = []
        self._weights = list(weights)
        self._loads = [0] * len(self._weights)  # bytes of parameters

    def take_on(self, parameters: Sequence[torch.Tensor]) -> None:
        """Shares out the parameters of one more group."""
        sizes = [parameter.numel() * parameter.element_size() for parameter in parameters]
        self.owners += assign(sizes, self._loads, self._weights)

    def indices_of(self, rank: int) -> list[int]:
        """What the rank owns, ascending."""
        return [index for index, owner in enumerate(self.owners) if owner == rank]

    def by_rank(self, parameters: Sequence[torch.Tensor], first: int = 0) -> list[list[torch.Tensor]]:
        """These parameters, whose indices begin with `first`, by the ranks that own them."""
        shares: list[list[torch.Tensor]] = [[] for _ in self._weights]
        for index, parameter in enumerate(parameters, start=first):
            shares[self.owners[index]].append(parameter)
        return shares
