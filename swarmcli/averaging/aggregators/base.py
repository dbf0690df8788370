"""The contract of all aggregators, and the arithmetic that they share.

All of it is elementwise, and multiplies before it adds: processors that could do both in one operation, with another
rounding, come to the same bits as those that cannot. So a peer with the same parts can repeat an average bit by bit.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Protocol

import torch

# With weights up to this, values may be as large as their type allows; with larger weights only smaller. A sum over n
# senders stays in range, since weights are divided by this times a power of two above n: that changes no bit, except
# that values within that factor of the type's smallest number lose digits.
FREE_WEIGHT = 2.0**20

_SQUARES_FIT = 40  # binary exponents up to this, and down to its negative, whose squares can be added up in float32
_EXACT_FROM = 256  # with no more terms left, a sum goes on in exact arithmetic


class PartAggregator(Protocol):
    """One part at its reducer. Calls come one at a time, and `finish` comes last, after at least one `add`."""

    @property
    def nbytes(self) -> int:
        """Bytes that it holds now, without the memory that it was given for the average."""

    def add(self, values: torch.Tensor, weight: float, sender: int, *, lasting: bool = False) -> None:
        """Adds one sender's values, finite and flat, with a positive weight; each sender comes once. They are only
        read. `lasting`: their memory does not change before `finish` has returned; otherwise it may change at once."""

    def finish(self) -> tuple[torch.Tensor, Mapping[int, str]]:
        """Returns the average, flat and finite, in the type of sums and in the memory that was given; and sender → why
        it is not in the average."""


class Aggregator(ABC):
    """How parts become averages: an option of the run. It holds no state, and needs only the values, weights and
    senders of a part, so newcomers, auxiliaries and auditors come to the same average."""

    passes = 1  # about how often `finish` goes over all values of a part: long work goes to the executor

    @property
    @abstractmethod
    def description(self) -> str:
        """The name and all parameters, in at most 200 characters. Peers that average together compare it."""

    @abstractmethod
    def part(self, memory: torch.Tensor, senders: int, *, ordered: bool = False) -> PartAggregator:
        """Begins a part. `memory`: flat, of the type of sums, with any content; the average will lie there.
        `senders`: the most that can come.

        `ordered`: the average does not depend on the order in which senders come, to the last bit. It costs memory
        where the sum could otherwise be formed as they come.
        """


def sum_type(dtype: torch.dtype) -> torch.dtype:
    """The type in which values of a type are added up."""
    return torch.float64 if dtype is torch.float64 else torch.float32


def largest(values: torch.Tensor) -> float:
    """The largest magnitude among finite flat values."""
    if not values.numel():
        return 0.0
    low, high = torch.aminmax(values)
    return max(-low.item(), high.item())


def norm(values: torch.Tensor) -> float:
    """The Euclidean norm of finite flat values: the same on every computer.

    torch's own depends in its last bits on how many numbers a processor adds at once. Here halves are added to each
    other, element by element; scaled by a power of two where squares would overflow or vanish.
    """
    exponent = math.frexp(largest(values))[1]
    left = values.to(sum_type(values.dtype))
    if abs(exponent) > _SQUARES_FIT:
        for power in _powers(-exponent):
            left = left * power
    else:
        exponent = 0
    left = left * left
    while (count := left.numel()) > _EXACT_FROM:
        half = (count + 1) // 2
        left[: count - half].add_(left[half:])
        left = left[:half]
    return math.ldexp(math.sqrt(math.fsum(left.tolist())), exponent)


def _powers(exponent: int) -> list[float]:
    """Powers of two whose product is 2**exponent; a single one may be beyond the range of float32."""
    first = max(-100, min(100, exponent))
    return [math.ldexp(1.0, first)] + ([math.ldexp(1.0, exponent - first)] if exponent != first else [])


def within_range(average: torch.Tensor) -> torch.Tensor:
    """Makes an average of finite values finite again: at the end of the range it may have been rounded beyond it."""
    limit = torch.finfo(average.dtype).max
    return average.clamp_(-limit, limit)
