"""The messages between the members of a group in a round. docs/protocol.md describes the order.

What members sign about its outcome is in `averaging/certificate.py`, and how they show it in `outcome.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Literal, TypeAlias

import msgspec

from swarmcli.averaging.audit.signed import Input, SignedAverages
from swarmcli.averaging.audit.verdict import PartClaim
from swarmcli.averaging.certificate import GroupID, Hash, Index, Indices, Signature
from swarmcli.averaging.group import MAX_MEMBERS
from swarmcli.averaging.round.outcome import Known, Seen
from swarmcli.compression import TensorHeader
from swarmcli.errors import ProtocolViolation
from swarmcli.memory import unwritten
from swarmcli.network.identity import SIGNATURE_BYTES

MAX_WORDS = 500  # characters
Words = Annotated[str, msgspec.Meta(max_length=MAX_WORDS)]
Weights = Annotated[tuple[float, ...], msgspec.Meta(max_length=2 * MAX_MEMBERS)]  # see Average
PartIndex = Annotated[int, msgspec.Meta(ge=0, lt=1 << 40)]

# unknown: it knows no such round. expected: it will take part, and still computes. running: it takes part. over: it has
# left, or knows the outcome.
Standing: TypeAlias = Literal["unknown", "expected", "running", "over"]


class RoundWord(msgspec.Struct, frozen=True):
    """What a member tells another one about their round; the other answers with the same, at once.

    busy     it may yet vote: members without a result wait for it
    settled  it knows the outcome
    failed   reducers whose averages did not come to it
    reason   why it lacks averages
    seen     whose words about the outcome it has; None: it asks for the standing alone
    known    its own words that the other one seems to lack; in the answer to one that asks, all words that one lacks
    asks     the answer is to bring all words that it lacks
    """

    group_id: GroupID
    standing: Standing
    busy: bool = False
    settled: bool = False
    failed: Indices = ()
    reason: Words = ""
    seen: Seen | None = None
    known: Known = ()
    asks: bool = False


class OpenExchange(msgspec.Struct, frozen=True):
    """Opens the stream between a member and a reducer. The member opens it, unless it is easier to dial than the
    reducer.

    listed  the leader's signature for the list, see Group
    """

    group_id: GroupID
    by_reducer: bool = False
    listed: Annotated[bytes, msgspec.Meta(max_length=SIGNATURE_BYTES)] = b""


class SenderTerms(msgspec.Struct, frozen=True):
    """First message of a member to a reducer.

    note        why its weight is zero, if that needs an explanation
    samples     from which its tensors were computed; None: equal to the weight
    commitment  in audited runs: the hash of the secret by which it will draw the parts that it checks
    """

    plan: Hash
    weight: float
    note: Words = ""
    commitment: Hash | None = None
    samples: float | None = None


class PartHeader(msgspec.Struct, frozen=True):
    """Comes before each part from a member to a reducer; the parts come in the order of the plan. `signature`: in
    audited runs, over the part."""

    tensor: TensorHeader
    signature: Signature | None = None


class AverageHeader(msgspec.Struct, frozen=True):
    """Comes before each average from a reducer, in the order of the plan.

    tensor             None if the weights of all senders are zero; there is no payload then
    senders, weights   of the tensors in it
    inputs             in audited runs: hash of the average's inputs
    """

    tensor: TensorHeader | None
    senders: Indices
    weights: Weights
    inputs: Hash | None = None


class Farewell(msgspec.Struct, frozen=True):
    """Last message of a reducer: why it left members out, and its signature over the digests of all its averages, which
    the receiver has computed itself."""

    left_out: Annotated[dict[Index, Words], msgspec.Meta(max_length=MAX_MEMBERS)]
    averages: SignedAverages


class DrawnPart(msgspec.Struct, frozen=True):
    """An auditor asks for the inputs of a part that its secret and the reducer's signature name. The reducer answers
    with a list of them, a sender sends its own input on a stream."""

    group_id: GroupID
    secret: Hash
    averages: SignedAverages
    part: PartIndex


class InputList(msgspec.Struct, frozen=True):
    """A reducer's answer: the inputs for which it has signed."""

    inputs: Annotated[tuple[Input, ...], msgspec.Meta(max_length=MAX_MEMBERS)]


class InputHeader(msgspec.Struct, frozen=True):
    """Comes before an input, which is as its sender sent it."""

    tensor: TensorHeader


class Accusation(msgspec.Struct, frozen=True):
    """Opens a stream from an auditor to another member, and says that a reducer's average of a part is false. On the
    stream follow the digests and hashes that the reducer signed, as one payload; the decoded average; and its inputs.
    """

    group_id: GroupID
    claim: PartClaim


class Exhibit(msgspec.Struct, frozen=True):
    """Comes before a payload of an accusation."""


class CopyRequest(msgspec.Struct, frozen=True):
    """Opens a stream from a member that lacks averages to one that holds all of them."""

    group_id: GroupID
    plan: Hash


class CopyTable(msgspec.Struct, frozen=True):
    """First answer to a CopyRequest, with the reducers' signatures. The payload: the digests of all parts, and in
    audited runs as many hashes of their inputs."""

    signed: Annotated[dict[Index, SignedAverages], msgspec.Meta(max_length=MAX_MEMBERS)]


class CopyHeld(msgspec.Struct, frozen=True):
    """Comes before the digests of the averages that the asking member holds, zeros for each that it lacks. The other
    member then sends those that differ, in their order."""


class CopyHeader(msgspec.Struct, frozen=True):
    """Comes before each copied average; the payload is the decoded average, empty if it has no senders."""

    senders: Indices
    weights: Weights


def at_most(most: int) -> Callable[[object, int], memoryview]:
    """Returns a function that gives memory for a payload, or raises ProtocolViolation for one above `most` bytes."""

    def into(header: object, size: int) -> memoryview:
        if size > most:
            raise ProtocolViolation(f"a payload of {size} bytes")
        return unwritten(size)

    return into
