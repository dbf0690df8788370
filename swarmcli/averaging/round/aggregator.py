"""How the values of several senders become one part of the average."""

from __future__ import annotations

import math
from typing import Protocol

import torch

from swarmcli.compression.base import all_finite

# Values up to the largest of their type may have weights up to this, and larger weights only smaller values. So that a
# sum of n of them stays in range it is formed in units of n times this weight: powers of two, which change no bit. What
# lies within 2**20 of the smallest number of the type loses digits by that.
FREE_WEIGHT = 2.0**20


class PartAggregator(Protocol):
    """One part at its reducer. Calls come one at a time, and `finish` comes last, after at least one `add`."""

    def add(self, values: torch.Tensor, weight: float) -> None:
        """One sender's values, finite and flat. The memory of `values` may change afterwards."""

    def finish(self) -> torch.Tensor:
        """The average, flat and finite, in the type of sums."""


class WeightedMean:
    """Σ weight · values / Σ weight. Its bits depend on the order of senders: a part has one reducer."""

    def __init__(self, memory: torch.Tensor, senders: int) -> None:
        """`memory`: flat, of the type of sums, with any content; the mean will lie there. `senders`: the most."""
        self._total, self._weights = memory, list[float]()
        self._unit = FREE_WEIGHT * 2.0 ** senders.bit_length()  # of weight, in the sum

    def add(self, values: torch.Tensor, weight: float) -> None:
        factor, total = weight / self._unit, self._total
        if self._weights:
            total.add_(values, alpha=factor)
        elif values.dtype is total.dtype:
            torch.mul(values, factor, out=total)
        else:
            total.copy_(values).mul_(factor)
        self._weights.append(weight)

    def finish(self) -> torch.Tensor:
        mean = self._total.div_(math.fsum(self._weights) / self._unit)
        if not all_finite(mean):
            # A mean lies between its values, which are finite: at the end of the range it was rounded beyond it.
            limit = torch.finfo(mean.dtype).max
            mean.clamp_(-limit, limit)
        return mean


def sum_type(dtype: torch.dtype) -> torch.dtype:
    """The type in which values of a type are added up."""
    return torch.float64 if dtype is torch.float64 else torch.float32
