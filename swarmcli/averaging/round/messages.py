"""What the members of a group say to each other while they average. docs/protocol.md describes the order.

What they say about the outcome of the round is in `consensus/messages.py`.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from swarmcli.averaging.consensus.messages import MAX_PARTS, GroupID, Hash, Index, Indices, SignedAverages, Words
from swarmcli.averaging.group import MAX_MEMBERS
from swarmcli.compression import TensorHeader

Weights = Annotated[tuple[float, ...], msgspec.Meta(max_length=MAX_MEMBERS)]
PartIndex = Annotated[int, msgspec.Meta(ge=0, lt=MAX_PARTS)]
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
    """

    tensor: TensorHeader | None
    senders: Indices
    weights: Weights


class Farewell(msgspec.Struct, frozen=True):
    """Last message of a reducer: whom it left out, and why; and its signature over the digests of all its averages,
    which the receiver has computed from what came."""

    left_out: Annotated[dict[Index, Words], msgspec.Meta(max_length=MAX_MEMBERS)]
    averages: SignedAverages


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
