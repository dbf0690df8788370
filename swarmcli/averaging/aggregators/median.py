"""Aggregators that put the members' numbers in order, element by element. Each member counts once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from swarmcli.averaging.aggregators.base import Aggregator, PartAggregator
from swarmcli.averaging.aggregators.collected import CollectedPart, sort_elements
from swarmcli.averaging.checks import check_numbers


@dataclass(frozen=True, slots=True)
class Median(Aggregator):
    """Coordinate-wise median; of an even number the mean of the two in the middle (Yin et al., arXiv 1803.01498).

    Weights above zero have no say: a member that claims a large one moves a median no further. So a member with a large
    batch counts like one with a small batch. Each element lies between those of honest members while these are the
    majority.
    """

    passes = 2

    @property
    def description(self) -> str:
        return "median"

    def part(self, memory: torch.Tensor, senders: int, *, ordered: bool = False) -> PartAggregator:
        return _MiddleOfPart(memory, 0.5)


@dataclass(frozen=True, slots=True)
class TrimmedMean(Aggregator):
    """Coordinate-wise mean without the ⌊trim · (n − 1)⌋ smallest and as many of the largest (Yin et al.).

    Weights have no say, as in Median. Each element lies between those of honest members while no more members lie than
    are cut off at one end: with the default a third of the group, as many as its decisions bear.
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
        return _MiddleOfPart(memory, self.trim)


class _MiddleOfPart(CollectedPart):
    def __init__(self, memory: torch.Tensor, trim: float) -> None:
        super().__init__(memory)
        self._trim = trim

    def _combine(self, rows: list[torch.Tensor], weights: Sequence[float]) -> torch.Tensor:
        return middle(rows, self._trim, self._memory)


def middle(rows: list[torch.Tensor], trim: float, out: torch.Tensor) -> torch.Tensor:
    """The mean of each element without its ⌊trim · (n − 1)⌋ smallest and largest values. Uses up the rows."""
    cut = int(trim * (len(rows) - 1))
    sort_elements(rows)
    kept = rows[cut : len(rows) - cut]
    share = 1 / len(kept)
    torch.mul(kept[0], share, out=out)  # before they are added: their sum could be beyond the range
    for row in kept[1:]:
        out.add_(row.mul_(share))
    return out
