"""The common base of aggregators that need all parts at once."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

import torch


class CollectedPart(ABC):
    """Holds the values of all senders until `finish`; then takes them in the order of senders, whoever came first."""

    def __init__(self, memory: torch.Tensor) -> None:
        self._memory = memory
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
        rows = [self._values.pop(sender).to(self._memory.dtype) for sender in order]  # one at a time beside its copy
        return self._combine(rows, [self._weights[sender] for sender in order]), {}

    @abstractmethod
    def _combine(self, rows: list[torch.Tensor], weights: Sequence[float]) -> torch.Tensor:
        """The average of `rows`, of the type of sums, in the memory for it. The rows may be written to."""


def sort_elements(rows: list[torch.Tensor]) -> None:
    """Sorts every element among its like in all rows: afterwards the first row holds the smallest.

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
