"""CenteredClip: values far from the middle are drawn towards it before they count."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from swarmcli.averaging.aggregators.base import Aggregator, PartAggregator, norm, within_range
from swarmcli.averaging.aggregators.median import CollectedPart, middle
from swarmcli.averaging.checks import as_count, check_numbers

MOST_ITERATIONS = 20
_ROOM = 0.25  # all values are multiplied by this: otherwise differences of the largest numbers would be out of range


@dataclass(frozen=True, slots=True)
class CenteredClip(Aggregator):
    """centre + Σ weight · clip(values − centre) / Σ weight, repeated (Karimireddy et al., arXiv 2012.10333).

    radius       differences are clipped to this many times their median norm
    iterations   each begins with the average of the one before as its centre

    The first centre is the coordinate-wise median of the same parts. The paper takes the last round's average, which
    a newcomer and an auxiliary do not have; for plain gradients it helps little (measured: benchmarks/NOTES.md).
    Weights count. With fewer than four members no median withstands a liar, so they form the weighted mean.
    """

    radius: float = 1.0
    iterations: int = 3

    def __post_init__(self) -> None:
        check_numbers(radius=self.radius)
        if not 0 < self.radius < math.inf:
            raise ValueError(f"radius must be positive and finite, got {self.radius}")
        if as_count(self.iterations, "iterations", least=1) > MOST_ITERATIONS:
            raise ValueError(f"iterations must be 1 to {MOST_ITERATIONS}, got {self.iterations}")

    @property
    def passes(self) -> int:  # type: ignore[override]
        """Each iteration takes eight passes, since a norm takes long; the median takes four."""
        return 4 + 8 * self.iterations

    @property
    def description(self) -> str:
        return f"centered_clip radius={float(self.radius)!r} iterations={int(self.iterations)}"

    def part(self, memory: torch.Tensor, senders: int, *, ordered: bool = False) -> PartAggregator:
        return CollectedPart(memory, self._combine)

    def _combine(self, rows: list[torch.Tensor], weights: Sequence[float], out: torch.Tensor) -> torch.Tensor:
        shares = [weight / math.fsum(weights) for weight in weights]
        if len(rows) < 4:
            return weighted_sum(rows, shares, out)
        for row in rows:
            row.mul_(_ROOM)
        centre = middle([row.clone() for row in rows], 0.5, out)
        for _ in range(self.iterations):
            self._move(centre, rows, shares)
        return within_range(centre.div_(_ROOM))

    def _move(self, centre: torch.Tensor, rows: list[torch.Tensor], shares: Sequence[float]) -> None:
        """One iteration. Differences are formed twice, so that memory for one is enough."""
        difference = torch.empty_like(centre)
        distances = [norm(torch.sub(row, centre, out=difference)) for row in rows]
        radius = self.radius * sorted(distances)[(len(rows) - 1) // 2]
        step = torch.zeros_like(centre)
        for row, share, distance in zip(rows, shares, distances, strict=True):
            clipped = share if distance <= radius else share * (radius / distance)
            step.add_(torch.sub(row, centre, out=difference).mul_(clipped))
        centre.add_(step)


def weighted_sum(rows: Sequence[torch.Tensor], shares: Sequence[float], out: torch.Tensor) -> torch.Tensor:
    """Σ share · row, in the order of the rows."""
    torch.mul(rows[0], shares[0], out=out)
    for row, share in zip(rows[1:], shares[1:], strict=True):
        out.add_(row.mul_(share))
    return within_range(out)
