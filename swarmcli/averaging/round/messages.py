"""What the members of a group say to each other while they average. docs/protocol.md describes the order.

What they say about the outcome of the round is in `ballot_messages.py`.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from swarmcli.averaging.group import GROUP_ID_BYTES, MAX_MEMBERS
from swarmcli.compression import TensorHeader

MAX_WORDS = 500
DIGEST_BYTES = 32
MAX_PARTS = 24_576  # of a plan of which averages are copied: so many digests fit into one message

Hash = Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]
GroupID = Annotated[bytes, msgspec.Meta(min_length=GROUP_ID_BYTES, max_length=GROUP_ID_BYTES)]
Index = Annotated[int, msgspec.Meta(ge=0, lt=MAX_MEMBERS)]
Indices = Annotated[tuple[Index, ...], msgspec.Meta(max_length=MAX_MEMBERS)]
Weights = Annotated[tuple[float, ...], msgspec.Meta(max_length=MAX_MEMBERS)]
Words = Annotated[str, msgspec.Meta(max_length=MAX_WORDS)]
Ballot = Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]
PartIndex = Annotated[int, msgspec.Meta(ge=0, lt=MAX_PARTS)]
Digests = Annotated[bytes, msgspec.Meta(max_length=MAX_PARTS * DIGEST_BYTES)]
PartIndices = Annotated[tuple[PartIndex, ...], msgspec.Meta(max_length=MAX_PARTS)]


class OpenExchange(msgspec.Struct, frozen=True):
    """Opens the stream between a member and a reducer: by the member, unless the reducer cannot be dialed."""

    group_id: GroupID
    by_reducer: bool = False


class SenderTerms(msgspec.Struct, frozen=True):
    """First message of a member to a reducer. `note`: why its weight is zero, if that needs an explanation."""

    plan: Hash
    weight: float
    note: Words = ""


class PartHeader(msgspec.Struct, frozen=True):
    """In front of each part from a member to a reducer; the parts come in the order of the plan."""

    tensor: TensorHeader


class AverageHeader(msgspec.Struct, frozen=True):
    """In front of each average from a reducer, in the order of the plan.

    tensor             None if the weights of all senders are zero; there is no payload then
    senders, weights   whose tensors are in it
    digest             over the payload and the two
    """

    tensor: TensorHeader | None
    senders: Indices
    weights: Weights
    digest: Hash


class Farewell(msgspec.Struct, frozen=True):
    """Last message of a reducer: whom it left out, and why."""

    left_out: Annotated[dict[Index, Words], msgspec.Meta(max_length=MAX_MEMBERS)]


class CopyRequest(msgspec.Struct, frozen=True):
    """Opens a stream from a member that holds averages to one that lacks them; `parts` in rising order."""

    group_id: GroupID
    plan: Hash
    parts: PartIndices


class CopyHeader(msgspec.Struct, frozen=True):
    """In front of each copied average, with who reduced it; the payload is the average itself, decoded, and empty
    without senders."""

    reducer: Index
    senders: Indices
    weights: Weights
    digest: Hash


class AbsenceNotice(msgspec.Struct, frozen=True):
    """From the leader to the reducers: this member is out of my reach; whoever has not heard of it need not wait."""

    group_id: GroupID
    member: Index
    reason: Words


class Noted(msgspec.Struct, frozen=True):
    """The empty answer."""
