"""Whether an average comes of its inputs: computed again, and compared.

Reducers of audited runs add in the order of members, with operations that IEEE 754 fixes to the last bit. So an auditor
usually finds an honest average again bit by bit. Where two processors differ all the same, a tolerance counts, of some
last digits of the largest input, element by element: a lie within it moves no element by more than a few millionths of
the members' values. An auditor accuses far beyond it, and judges forgive a part of that: so no two honest peers come to
opposite verdicts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from swarmcli.averaging.aggregators.base import Aggregator, sum_type
from swarmcli.averaging.audit.signed import Input
from swarmcli.compression import CompressionBase, NoCompression, TensorDescriptor, TensorMessage
from swarmcli.compression.base import all_finite
from swarmcli.errors import CompressionError

# How many tolerances an average is off: within the first it is true, beyond the last an auditor accuses, and from the
# middle one on it counts as false.
TRUE_WITHIN, FALSE_BEYOND, ACCUSED_BEYOND = 1, 2, 4

_ROUNDINGS = 8  # of one addition or multiplication each, for every sender
_STRAYS = 1 / 64  # of the elements, which may be off by a level of the codec for each tolerance


@dataclass(frozen=True)
class Terms:
    """How a part is averaged, as every member of the group knows by its own plan and options. `senders`: the most
    that could have come."""

    part: int
    reducer: int
    senders: int
    descriptor: TensorDescriptor
    codec: CompressionBase
    aggregator: Aggregator


@dataclass(frozen=True)
class Redone:
    """An average, computed again.

    senders, weights   of the inputs in it
    values             flat, in the type of sums; None if there were no inputs
    tolerance          for each element
    """

    senders: tuple[int, ...]
    weights: tuple[float, ...]
    values: torch.Tensor | None
    tolerance: torch.Tensor | None


class NoInput(Exception):
    """An input that a reducer signed for cannot be averaged: no honest reducer would have signed."""


def redo(terms: Terms, inputs: Sequence[Input], messages: Sequence[TensorMessage]) -> Redone:
    """Computes the average again; `messages` are the content of the inputs. Raises NoInput."""
    if not inputs:
        return Redone((), (), None, None)
    kind = sum_type(terms.descriptor.dtype)
    part = terms.aggregator.part(torch.empty(terms.descriptor.numel, dtype=kind), terms.senders, ordered=True)
    largest = torch.zeros(terms.descriptor.numel, dtype=kind)
    for each, message in zip(inputs, messages, strict=True):
        values = _values(terms, each, message)
        torch.maximum(largest, values.to(kind).abs(), out=largest)
        part.add(values, each.counts, each.sender)
    average, left_out = part.finish()
    torch.maximum(largest, average.abs(), out=largest)
    counted = [each for each in inputs if each.sender not in left_out]
    tolerance = largest.mul_(_ROUNDINGS * (len(inputs) + 4) * torch.finfo(kind).eps)
    return Redone(tuple(e.sender for e in counted), tuple(e.counts for e in counted), average, tolerance)


def encoded(terms: Terms, average: torch.Tensor) -> torch.Tensor:
    """The average as all members hold it after it was sent. Raises CompressionError."""
    codec = terms.codec.of_averages
    return codec.extract(codec.compress(average.to(terms.descriptor.dtype)))


def is_equal(terms: Terms, redone: Redone, claimed: torch.Tensor) -> bool:
    """Whether the average is the same bit by bit, as it nearly always is."""
    assert redone.values is not None
    try:
        return torch.equal(encoded(terms, redone.values), claimed)
    except CompressionError:  # no honest reducer could have sent it
        return False


def is_within(terms: Terms, redone: Redone, claimed: torch.Tensor, tolerances: float) -> bool:
    """Whether `claimed` can have come of these inputs, if each operation was off by so many tolerances.

    Codecs round up where a number is a trifle larger, so their own error is in the comparison, not in the tolerance.
    Where a codec takes its levels from the content, these move a little too, and single elements go to the next one.
    """
    assert redone.values is not None and redone.tolerance is not None
    exact, off = redone.values.double(), redone.tolerance.double() * tolerances
    values, middle = claimed.double(), _sent(terms, redone, exact)
    around = torch.stack([_sent(terms, redone, exact - off), middle, _sent(terms, redone, exact + off)])
    low, high = torch.aminmax(around, dim=0)
    if not terms.codec.of_averages.by_content:
        return bool(((values >= low) & (values <= high)).all())
    slack = 2 * off.max()
    strays = (values < low - slack) | (values > high + slack)
    of_codec = 2 * (middle - exact).abs().max() + slack
    return int(strays.sum()) <= tolerances * _STRAYS * values.numel() and bool(
        ((values - exact).abs() <= of_codec * tolerances).all()
    )


def _sent(terms: Terms, redone: Redone, values: torch.Tensor) -> torch.Tensor:
    """The average as all members hold it, after its codec."""
    assert redone.values is not None
    try:
        return encoded(terms, values.to(redone.values.dtype)).double()
    except CompressionError:  # beyond the range of the codec, where the average itself is at its end
        return values


def _values(terms: Terms, each: Input, message: TensorMessage) -> torch.Tensor:
    """Decodes an input. The reducer's own travels nowhere, and is not encoded."""
    codec = NoCompression() if each.sender == terms.reducer else terms.codec
    try:
        if message.header.descriptor() != terms.descriptor:
            raise NoInput("an input of another shape or type")
        values = codec.extract(message)
    except CompressionError as error:
        raise NoInput(f"an input that cannot be decoded: {error}") from error
    if not all_finite(values):
        raise NoInput("an input with NaN or infinity")
    return values
