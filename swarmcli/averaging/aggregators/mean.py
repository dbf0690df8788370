"""The weighted mean, with a gate against values far beyond the others."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from swarmcli.averaging.aggregators.base import FREE_WEIGHT, Aggregator, PartAggregator, largest, within_range
from swarmcli.averaging.checks import check_numbers
from swarmcli.compression.base import all_finite


@dataclass(frozen=True, slots=True)
class Mean(Aggregator):
    """Σ weight · values / Σ weight.

    gate   a sender is left out of a part if its size is above this many times the (f + 1)-th largest. inf: nobody is

    A sender's size is its maximum norm: exact in any order, and read from memory once. Of n senders f = ⌊(n − 1) / 3⌋
    may lie, so the gate compares with the (f + 1)-th largest size: of the f + 1 senders at least one is honest. With
    fewer than four senders f is 0, and the gate leaves nobody out. It compares sizes times the square root of the
    weight as well, and leaves out only who is beyond both: of honest gradients those of small batches are noisier, and
    those of large batches weigh more. If f senders or fewer hold anything but zeros, the gate leaves nobody out either:
    these may be rows that only they have seen.
    """

    gate: float = 1000.0

    def __post_init__(self) -> None:
        check_numbers(gate=self.gate)
        if not self.gate >= 1:
            raise ValueError(f"gate must be at least 1, got {self.gate}")

    @property
    def description(self) -> str:
        return f"mean gate={float(self.gate)!r}"

    def part(self, memory: torch.Tensor, senders: int, *, ordered: bool = False) -> PartAggregator:
        return _MeanOfPart(memory, senders, self.gate, ordered)


class _MeanOfPart:
    """Adds values as they come, and holds back only those that may turn out to be beyond the gate.

    What the gate compares with can only grow with each sender, so a sender that is within the gate once stays within.
    """

    def __init__(self, memory: torch.Tensor, senders: int, gate: float, ordered: bool) -> None:
        self._total, self._gate, self._ordered = memory, gate, ordered
        self._unit = FREE_WEIGHT * 2.0 ** senders.bit_length()  # weights are divided by it, see FREE_WEIGHT
        self._most = senders if math.isfinite(gate) else 0
        self._weights: dict[int, float] = {}
        self._sizes: dict[int, tuple[float, float]] = {}  # size, and size · √weight; empty if the gate has no say
        self._held: dict[int, torch.Tensor] = {}
        self._begun = False

    @property
    def nbytes(self) -> int:
        return sum(values.nbytes for values in self._held.values())

    def add(self, values: torch.Tensor, weight: float, sender: int, *, lasting: bool = False) -> None:
        self._weights[sender] = weight
        if _liars(self._most):
            size = largest(values)
            self._sizes[sender] = size, size * math.sqrt(weight)
        if self._ordered or self._is_beyond(sender, _liars(self._most)):
            self._held[sender] = values if lasting else values.clone()
        else:
            self._add(values, weight)
        if not self._ordered:
            for other in [other for other in self._held if not self._is_beyond(other, _liars(self._most))]:
                self._add(self._held.pop(other), self._weights[other])

    def finish(self) -> tuple[torch.Tensor, Mapping[int, str]]:
        liars = _liars(len(self._sizes))
        left_out: dict[int, str] = {}
        if any(self._limits(liars)):
            left_out = {
                sender: f"it holds {size:.3g}, more than {self._gate:g} times what the sender ranked {liars + 1} holds"
                for sender, (size, _) in self._sizes.items()
                if sender in self._held and self._is_beyond(sender, liars)
            }
        for sender in sorted(self._held.keys() - left_out.keys()):
            self._add(self._held.pop(sender), self._weights[sender])
        counted = (weight for sender, weight in self._weights.items() if sender not in left_out)
        mean = self._total.div_(math.fsum(counted) / self._unit)
        return mean if all_finite(mean) else within_range(mean), left_out

    def _add(self, values: torch.Tensor, weight: float) -> None:
        factor, total = weight / self._unit, self._total
        if self._begun:
            total.add_(values.to(total.dtype) * factor)  # not with alpha=, which rounds once where others round twice
        elif values.dtype is total.dtype:
            torch.mul(values, factor, out=total)
        else:
            total.copy_(values).mul_(factor)
        self._begun = True

    def _limits(self, liars: int) -> tuple[float, float]:
        """The largest size, and size · √weight, that are within the gate; zero until more than f senders have come."""
        if len(self._sizes) <= liars:
            return 0.0, 0.0
        sizes, scaled = (sorted(each, reverse=True) for each in zip(*self._sizes.values(), strict=True))
        return self._gate * sizes[liars], self._gate * scaled[liars]

    def _is_beyond(self, sender: int, liars: int) -> bool:
        sizes = self._sizes.get(sender, (0.0, 0.0))
        return all(size > limit for size, limit in zip(sizes, self._limits(liars), strict=True))


def _liars(senders: int) -> int:
    return (senders - 1) // 3 if senders else 0
