"""Aggregators that put the members' numbers in order, element by element. Each member counts once.

They need the values of all senders at once, and so does CenteredClip: `CollectedPart` holds them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch

from swarmcli.averaging.aggregators.base import Aggregator, PartAggregator
from swarmcli.averaging.checks import check_numbers

# (rows, weights, memory) → the average of the rows, in that memory. Rows are of the type of sums, and may be written
# to.
Combine: TypeAlias = Callable[[list[torch.Tensor], Sequence[float], torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True)
class Median(Aggregator):
    """Coordinate-wise median; of an even number the mean of the two in the middle (Yin et al., arXiv 1803.01498).

    Weights above zero do not matter: a member that claims a large one moves the median no further. So a member with a
    large batch counts like one with a small batch. Each element lies between those of honest members while these are
    the majority.
    """

    passes = 2

    @property
    def description(self) -> str:
        return "median"

    def part(self, memory: torch.Tensor, senders: int, *, ordered: bool = False) -> PartAggregator:
        return CollectedPart(memory, lambda rows, weights, out: middle(rows, 0.5, out))


@dataclass(frozen=True, slots=True)
class TrimmedMean(Aggregator):
    """Coordinate-wise mean without the ⌊trim · (n − 1)⌋ smallest and as many of the largest (Yin et al.).

    Weights do not matter, as in Median. Each element lies between those of honest members while no more members lie
    than are cut off at one end: with the default a third of the group, as many as its votes withstand.
    """

    trim: float = 0.34
    passes = 2

    def __post_init__(self) -> None:
        check_numbers(trim=self.trim)
        if not 0 < self.trim < 0.5:
            raise ValueError(f"trim must lie between 0 and 0.5, got {self.trim}")

    @property
    def description(self) -> str:
        return f"trimmed_mean trim={float(self.trim)!r}"

    def part(self, memory: torch.Tensor, senders: int, *, ordered: bool = False) -> PartAggregator:
        return CollectedPart(memory, lambda rows, weights, out: middle(rows, self.trim, out))


class CollectedPart:
    """Holds the values of all senders until `finish`; then combines them in the order of senders, not of arrival."""

    def __init__(self, memory: torch.Tensor, combine: Combine) -> None:
        self._memory, self._combine = memory, combine
        self._values: dict[int, torch.Tensor] = {}
        self._weights: dict[int, float] = {}

    @property
    def nbytes(self) -> int:
        return sum(values.nbytes for values in self._values.values())

    def add(self, values: torch.Tensor, weight: float, sender: int, *, lasting: bool = False) -> None:
        # A copy in any case: sorting networks write where the values lie.
        self._values[sender], self._weights[sender] = values.clone(), weight

    def finish(self) -> tuple[torch.Tensor, Mapping[int, str]]:
        order = sorted(self._values)
        rows = [self._values.pop(sender).to(self._memory.dtype) for sender in order]  # popped: only one is there twice
        return self._combine(rows, [self._weights[sender] for sender in order], self._memory), {}


def middle(rows: list[torch.Tensor], trim: float, out: torch.Tensor) -> torch.Tensor:
    """The mean of each element without its ⌊trim · (n − 1)⌋ smallest and largest values. Overwrites the rows."""
    cut = int(trim * (len(rows) - 1))
    sort_elements(rows)
    kept = rows[cut : len(rows) - cut]
    share = 1 / len(kept)
    torch.mul(kept[0], share, out=out)  # before they are added: their sum could be beyond the range
    for row in kept[1:]:
        out.add_(row.mul_(share))
    return out


def sort_elements(rows: list[torch.Tensor]) -> None:
    """Sorts each element across all rows: afterwards the first row holds the smallest.

    Batcher's odd-even merge sort: pairs of rows are compared in an order that does not depend on what they hold, so
    all elements of a row go through the processor's wide units at once.
    """
    if not rows:
        return
    for row in rows:
        row.add_(0.0)  # turns −0 into 0: processors differ in which of the two counts as smaller
    spare = torch.empty_like(rows[0])
    for first, second in _comparisons(len(rows)):
        low, high = rows[first], rows[second]
        torch.minimum(low, high, out=spare)
        torch.maximum(low, high, out=high)
        rows[first], spare = spare, low


def _comparisons(count: int) -> list[tuple[int, int]]:
    """Knuth, volume 3, algorithm 5.2.2M."""
    pairs = []
    length = 1
    while length < count:
        step = length
        while step:
            for start in range(step % length, count - step, 2 * step):
                for first in range(start, min(start + step, count - step)):
                    if first // (2 * length) == (first + step) // (2 * length):
                        pairs.append((first, first + step))
            step //= 2
        length *= 2
    return pairs
