"""What the members of a group say to each other during a round. docs/protocol.md describes the order."""

from __future__ import annotations

from typing import Annotated

import msgspec

from swarmcli.averaging.group import GROUP_ID_BYTES, MAX_MEMBERS
from swarmcli.averaging.outcome import Aborted, Accept, Committed, Decision, Reject, Vote
from swarmcli.compression import TensorHeader

MAX_WORDS = 500

Hash = Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]
GroupID = Annotated[bytes, msgspec.Meta(min_length=GROUP_ID_BYTES, max_length=GROUP_ID_BYTES)]
Index = Annotated[int, msgspec.Meta(ge=0, lt=MAX_MEMBERS)]
Indices = Annotated[tuple[Index, ...], msgspec.Meta(max_length=MAX_MEMBERS)]
Words = Annotated[str, msgspec.Meta(max_length=MAX_WORDS)]


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
    weights: Annotated[tuple[float, ...], msgspec.Meta(max_length=MAX_MEMBERS)]
    digest: Hash


class Farewell(msgspec.Struct, frozen=True):
    """Last message of a reducer: whom it left out, and why."""

    left_out: Annotated[dict[Index, Words], msgspec.Meta(max_length=MAX_MEMBERS)]


class VoteMessage(msgspec.Struct, frozen=True):
    """A member's vote, to the leader. `digest` is None from an auxiliary that accepts."""

    group_id: GroupID
    accepted: bool
    digest: Hash | None = None
    reason: Words = ""
    suspects: Indices = ()

    @classmethod
    def of(cls, group_id: bytes, vote: Vote) -> VoteMessage:
        if isinstance(vote, Accept):
            return cls(group_id, True, vote.digest)
        return cls(group_id, False, None, vote.reason[:MAX_WORDS], vote.suspects)

    def vote(self) -> Vote:
        return Accept(self.digest) if self.accepted else Reject(self.reason, self.suspects)


class OutcomeQuestion(msgspec.Struct, frozen=True):
    """What became of the round? Answered as soon as the answerer knows, or knows that it never will."""

    group_id: GroupID


class OutcomeAnswer(msgspec.Struct, frozen=True):
    """`digest` is None for a round that was given up."""

    known: bool
    digest: Hash | None = None
    reason: Words = ""
    suspects: Indices = ()

    @classmethod
    def of(cls, decision: Decision | None) -> OutcomeAnswer:
        match decision:
            case None:
                return cls(False)
            case Committed(digest):
                return cls(True, digest)
            case Aborted(reason, suspects):
                return cls(True, None, reason[:MAX_WORDS], suspects)

    def decision(self) -> Decision | None:
        if not self.known:
            return None
        return Committed(self.digest) if self.digest is not None else Aborted(self.reason, self.suspects)


class AbsenceNotice(msgspec.Struct, frozen=True):
    """From the leader to the reducers: this member is out of my reach; whoever has not heard of it need not wait."""

    group_id: GroupID
    member: Index
    reason: Words


class Noted(msgspec.Struct, frozen=True):
    """The empty answer."""
