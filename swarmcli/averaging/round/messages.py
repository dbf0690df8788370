"""The messages between the members of a group while they average. docs/protocol.md describes the order.

Messages about the outcome of the round are in `consensus/messages.py`.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from swarmcli.averaging.audit.signed import Input
from swarmcli.averaging.audit.verdict import Claim
from swarmcli.averaging.consensus.messages import (
    MAX_PARTS,
    GroupID,
    Hash,
    Index,
    Indices,
    Signature,
    SignedAverages,
    Words,
)
from swarmcli.averaging.group import MAX_MEMBERS
from swarmcli.compression import TensorHeader
from swarmcli.network.identity import SIGNATURE_BYTES

Weights = Annotated[tuple[float, ...], msgspec.Meta(max_length=2 * MAX_MEMBERS)]  # see Average
PartIndex = Annotated[int, msgspec.Meta(ge=0, lt=MAX_PARTS)]
PartIndices = Annotated[tuple[PartIndex, ...], msgspec.Meta(max_length=MAX_PARTS)]


class OpenExchange(msgspec.Struct, frozen=True):
    """Opens the stream between a member and a reducer: by the member, unless the reducer cannot be dialed.

    listed  the leader's signature for the list, see Group
    """

    group_id: GroupID
    by_reducer: bool = False
    listed: Annotated[bytes, msgspec.Meta(max_length=SIGNATURE_BYTES)] = b""


class SenderTerms(msgspec.Struct, frozen=True):
    """First message of a member to a reducer.

    note        why its weight is zero, if that needs an explanation
    samples     in its tensors, where their weight is another number; None: they are the weight
    commitment  in audited runs: the hash of the secret by which it will draw the parts that it checks
    """

    plan: Hash
    weight: float
    note: Words = ""
    commitment: Hash | None = None
    samples: float | None = None


class PartHeader(msgspec.Struct, frozen=True):
    """In front of each part from a member to a reducer; the parts come in the order of the plan. `signature`: in
    audited runs, over the part."""

    tensor: TensorHeader
    signature: Signature | None = None


class AverageHeader(msgspec.Struct, frozen=True):
    """In front of each average from a reducer, in the order of the plan.

    tensor             None if the weights of all senders are zero; there is no payload then
    senders, weights   of the tensors in it
    inputs             in audited runs: hash of the average's inputs
    """

    tensor: TensorHeader | None
    senders: Indices
    weights: Weights
    inputs: Hash | None = None


class Farewell(msgspec.Struct, frozen=True):
    """Last message of a reducer: member that it left out → why; and its signature over the digests of all its averages,
    which the receiver has computed itself."""

    left_out: Annotated[dict[Index, Words], msgspec.Meta(max_length=MAX_MEMBERS)]
    averages: SignedAverages


class DrawnPart(msgspec.Struct, frozen=True):
    """An auditor wants the inputs of a part that its secret and the reducer's signature name: of the reducer a list of
    them, as an answer; of a sender its own, on a stream."""

    group_id: GroupID
    secret: Hash
    averages: SignedAverages
    part: PartIndex


class InputList(msgspec.Struct, frozen=True):
    """A reducer's answer: what it signed for."""

    inputs: Annotated[tuple[Input, ...], msgspec.Meta(max_length=MAX_MEMBERS)]


class InputHeader(msgspec.Struct, frozen=True):
    """In front of an input, as its sender has sent it."""

    tensor: TensorHeader


class Accusation(msgspec.Struct, frozen=True):
    """Opens a stream from an auditor to another member: this reducer's average of this part is false. On the stream
    follow the digests and hashes that the reducer signed, as one payload; the average, decoded; and its inputs."""

    group_id: GroupID
    claim: Claim


class Exhibit(msgspec.Struct, frozen=True):
    """In front of a payload that belongs to an accusation."""


class CopyRequest(msgspec.Struct, frozen=True):
    """Opens a stream from a member that holds averages to one that lacks them; `parts` in rising order."""

    group_id: GroupID
    plan: Hash
    parts: PartIndices


class CopyHeader(msgspec.Struct, frozen=True):
    """In front of each copied average, with its reducer; the payload is the average itself, decoded, and empty without
    senders."""

    reducer: Index
    senders: Indices
    weights: Weights
    digest: Hash
