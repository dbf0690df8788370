"""Whether an average follows from its inputs: it is computed again, and compared.

Reducers of audited runs add in the order of members, with operations that IEEE 754 fixes to the last bit. So an auditor
usually gets an honest average again bit by bit. In case two processors differ all the same, there is a tolerance: some
last digits of the largest input, element by element. A lie within it moves no element by more than a few millionths of
the members' values. An auditor accuses beyond a larger multiple of it than that beyond which others judge an average
false: so they do not take an honest accusation for a lie.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated

import msgspec
import torch

from swarmcli.averaging.aggregators.base import Aggregator, sum_type
from swarmcli.averaging.audit.signed import (
    Exchange,
    Input,
    SignedAverages,
    averages_root,
    digest_of,
    inputs_hash,
    part_hash,
    why_unsound,
)
from swarmcli.averaging.certificate import DIGEST_BYTES, Indices
from swarmcli.averaging.group import MAX_MEMBERS
from swarmcli.compression import CompressionBase, NoCompression, TensorDescriptor, TensorMessage
from swarmcli.compression.base import all_finite
from swarmcli.errors import CompressionError
from swarmcli.network.identity import PeerID

# Tolerances: an average further off than the first counts as false, and an auditor accuses beyond the second.
FALSE_BEYOND, ACCUSED_BEYOND = 2, 4

_ROUNDINGS = 8  # roundings of one operation each, for every sender
_STRAYS = 1 / 64  # of the elements may be off by a level of the codec, for each tolerance


@dataclass(frozen=True)
class Terms:
    """How a part is averaged, as every member of the group knows by its own plan and options.

    place    of the part among those of its reducer
    senders  the most that could have come
    """

    part: int
    place: int
    reducer: int
    senders: int
    descriptor: TensorDescriptor
    codec: CompressionBase
    aggregator: Aggregator


class PartClaim(msgspec.Struct, frozen=True):
    """What a reducer says of one part.

    senders, weights   of the inputs in the average
    inputs             signed by their senders; the aggregator may have left some out of the average
    averages           its signature for all its averages, with their inputs
    """

    part: Annotated[int, msgspec.Meta(ge=0, lt=1 << 40)]
    senders: Indices
    weights: Annotated[tuple[float, ...], msgspec.Meta(max_length=2 * MAX_MEMBERS)]
    inputs: Annotated[tuple[Input, ...], msgspec.Meta(max_length=MAX_MEMBERS)]
    averages: SignedAverages


@dataclass(frozen=True)
class FalseAverage:
    """A claim that a reducer signed for an average that does not follow from the inputs for which it signed.

    members    of the group
    tables     digests of all the reducer's averages, 32 bytes each, then as many hashes of their inputs
    average    after decoding (of NoCompression); None without senders
    messages   sender → the content of its input. If the list of inputs proves a lie by itself, they may be missing
    """

    where: Exchange
    members: tuple[PeerID, ...]
    terms: Terms
    claim: PartClaim
    tables: bytes
    average: TensorMessage | None
    messages: Mapping[int, TensorMessage]

    @property
    def culprit(self) -> PeerID:
        return self.members[self.terms.reducer]

    def verify(self, beyond: float = FALSE_BEYOND) -> bool:
        """Returns whether this proves the lie: computes the average of the part again. `beyond`: tolerances. Never
        raises, whatever the fields hold."""
        inputs, part = self.claim.inputs, self.terms.part
        if not self.is_signed():
            return False
        if why_unsound(inputs, part, self.members, self.where):
            return True  # no honest reducer signs for such inputs
        if not all(each.sender in self.messages and self.shows(each) for each in inputs):
            return False
        try:
            return not self._comes_of(redo(self.terms, inputs, self.messages), beyond)
        except _Unaveragable:
            return True

    def words(self) -> str:
        return f"its average of part {self.terms.part} does not come of the inputs that it signed for"

    def is_signed(self) -> bool:
        """Whether the reducer has signed for this average and these inputs."""
        claim, half, place = self.claim, len(self.tables) // 2, self.terms.place * DIGEST_BYTES
        digests, inputs = self.tables[:half], self.tables[half:]
        signed = digest_of(self.terms.part, claim.senders, claim.weights, self.average), inputs_hash(claim.inputs)
        return (
            (digests[place : place + DIGEST_BYTES], inputs[place : place + DIGEST_BYTES]) == signed
            and claim.averages.root == averages_root(digests, inputs)
            and claim.averages.is_by(self.culprit, self.where.prefix, self.where.group_id)
        )

    def shows(self, given: Input) -> bool:
        """Whether the content of this input in `messages` is what its sender has signed."""
        return part_hash(self.messages[given.sender]) == given.content

    def _comes_of(self, redone: Redone, beyond: float) -> bool:
        claim, descriptor = self.claim, self.terms.descriptor
        count = len(redone.weights)  # samples may follow the weights
        if claim.senders != tuple(redone.weights) or claim.weights[:count] != tuple(redone.weights.values()):
            return False
        if not count or self.average is None:
            return not count and self.average is None
        try:
            values = NoCompression().extract(self.average).reshape(-1)
        except CompressionError:
            return False  # the reducer has signed the digest of something that is no average
        fits = values.dtype is descriptor.dtype and values.numel() == descriptor.numel
        return fits and _is_within(self.terms, redone, values.double(), beyond)


@dataclass(frozen=True)
class Redone:
    """An average, computed again.

    weights    sender in the average → its weight
    values     (numel,) the average
    tolerance  (numel,) of each element
    """

    weights: dict[int, float]
    values: torch.Tensor
    tolerance: torch.Tensor


class _Unaveragable(Exception):
    """An input that a reducer signed for cannot be averaged: no honest reducer would have signed."""


def redo(terms: Terms, inputs: Sequence[Input], messages: Mapping[int, TensorMessage]) -> Redone:
    """Computes the average again. Raises _Unaveragable."""
    kind, numel = sum_type(terms.descriptor.dtype), terms.descriptor.numel
    largest = torch.zeros(numel, dtype=kind)
    if not inputs:
        return Redone({}, largest, largest)
    part = terms.aggregator.part(torch.empty(numel, dtype=kind), terms.senders, ordered=True)
    for each in inputs:
        values = _values(terms, each.sender, messages[each.sender])
        torch.maximum(largest, values.to(kind).abs(), out=largest)
        part.add(values, each.counts, each.sender)
    average, left_out = part.finish()
    torch.maximum(largest, average.abs(), out=largest)
    tolerance = largest.mul_(_ROUNDINGS * (len(inputs) + 4) * torch.finfo(kind).eps)
    return Redone({each.sender: each.counts for each in inputs if each.sender not in left_out}, average, tolerance)


def _is_within(terms: Terms, redone: Redone, claimed: torch.Tensor, tolerances: float) -> bool:
    """Whether `claimed` can follow from these inputs if the average was off by `tolerances` tolerances.

    A number that is a trifle larger may be rounded up by the codec, so both ends of the tolerance go through the codec
    here. If a codec takes its levels from the content, these move a little too, and single elements go to the next one.
    """
    exact, off = redone.values.double(), redone.tolerance.double() * tolerances
    middle = _sent(terms, redone, exact)
    around = torch.stack([_sent(terms, redone, exact - off), middle, _sent(terms, redone, exact + off)])
    low, high = torch.aminmax(around, dim=0)
    if not terms.codec.of_averages.by_content:
        return bool(((claimed >= low) & (claimed <= high)).all())
    slack = 2 * off.max()
    strays = (claimed < low - slack) | (claimed > high + slack)
    of_codec = 2 * (middle - exact).abs().max() + slack
    return int(strays.sum()) <= tolerances * _STRAYS * claimed.numel() and bool(
        ((claimed - exact).abs() <= of_codec * tolerances).all()
    )


def _sent(terms: Terms, redone: Redone, values: torch.Tensor) -> torch.Tensor:
    """The average as all members hold it, after its codec."""
    codec = terms.codec.of_averages
    try:
        return codec.extract(codec.compress(values.to(redone.values.dtype).to(terms.descriptor.dtype))).double()
    except CompressionError:  # beyond the range of the codec, where the average itself is at its end
        return values


def _values(terms: Terms, sender: int, message: TensorMessage) -> torch.Tensor:
    """Decodes an input. The reducer's own did not travel in the round, so it has no codec."""
    codec = NoCompression() if sender == terms.reducer else terms.codec
    try:
        if message.header.descriptor() != terms.descriptor:
            raise _Unaveragable
        values = codec.extract(message)
    except CompressionError as error:
        raise _Unaveragable from error
    if not all_finite(values):
        raise _Unaveragable
    return values
