"""What the members of a group say to each other about the outcome of their round; `ballots.py` says what it means."""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

import msgspec

from swarmcli.averaging.agreement.ballots import Promise, Refusal
from swarmcli.averaging.agreement.outcome import Aborted, Committed, Decision
from swarmcli.averaging.allreduce.messages import (
    MAX_PARTS,
    MAX_WORDS,
    Ballot,
    GroupID,
    Hash,
    Indices,
    PartIndices,
    Words,
)

DIGEST_BYTES = 32

Digests = Annotated[bytes, msgspec.Meta(max_length=MAX_PARTS * DIGEST_BYTES)]
Standing: TypeAlias = Literal["running", "expected", "over", "unknown"]


class Verdict(msgspec.Struct, frozen=True):
    """Committed, or given up (`digest` is None then) with the reason."""

    digest: Hash | None = None
    reason: Words = ""
    suspects: Indices = ()

    @classmethod
    def of(cls, decision: Decision) -> Verdict:
        match decision:
            case Committed(digest):
                return cls(digest)
            case Aborted(reason, suspects):
                return cls(None, reason[:MAX_WORDS], suspects)

    def decision(self) -> Decision:
        return Committed(self.digest) if self.digest is not None else Aborted(self.reason, self.suspects)


class VoteMessage(msgspec.Struct, frozen=True):
    """A member's word to the leader: the digest of the result that it holds, which is its vote at ballot zero, or
    (None) why it does not come to hold one, and whose fault that seems to be."""

    group_id: GroupID
    digest: Hash | None = None
    reason: Words = ""
    suspects: Indices = ()


class OutcomeQuestion(msgspec.Struct, frozen=True):
    """What became of the round? Answered as soon as the answerer knows, or knows that it never will."""

    group_id: GroupID


class OutcomeAnswer(msgspec.Struct, frozen=True):
    """`verdict` is None if the answerer does not know it and never will."""

    verdict: Verdict | None = None

    @classmethod
    def of(cls, decision: Decision | None) -> OutcomeAnswer:
        return cls(None if decision is None else Verdict.of(decision))

    def decision(self) -> Decision | None:
        return None if self.verdict is None else self.verdict.decision()


class PresenceQuestion(msgspec.Struct, frozen=True):
    """Have you begun this round? Answered at once."""

    group_id: GroupID


class PresenceAnswer(msgspec.Struct, frozen=True):
    """running: it takes part. expected: it will, but still computes. over: it has left. unknown: it knows of none."""

    standing: Standing
    verdict: Verdict | None = None  # if it knows the outcome


class Prepare(msgspec.Struct, frozen=True):
    """A proposer begins a ballot. Answered once the answerer's own exchange of parts has come to its end."""

    group_id: GroupID
    ballot: Ballot


class PrepareAnswer(msgspec.Struct, frozen=True):
    """What an acceptor says to Prepare.

    verdict    the outcome is known here; nothing else counts then
    granted    it is promised; otherwise `promised` is the highest ballot that was
    follows    not granted, because this member of a lower rank leads as seen from here
    accepted   and `accepted_ballot`: what was accepted last
    digests    granted: of the averages that are here, 32 bytes for each part, zeros for one that is not. Empty from
               a member that takes no part in a repair any more
    plan       to which these parts belong: members with another one cannot help each other
    reason     and `suspects`: why parts are missing
    """

    verdict: Verdict | None = None
    granted: bool = False
    promised: Ballot = 0
    follows: Annotated[int, msgspec.Meta(ge=0)] | None = None
    accepted_ballot: Ballot | None = None
    accepted: Verdict | None = None
    digests: Digests = b""
    plan: Hash | None = None
    reason: Words = ""
    suspects: Indices = ()

    @classmethod
    def of(cls, answer: Promise | Refusal) -> PrepareAnswer:
        if isinstance(answer, Refusal):
            return cls(promised=answer.promised)
        accepted = None if answer.accepted is None else Verdict.of(answer.accepted)
        return cls(None, True, answer.ballot, None, answer.accepted_ballot, accepted)

    def answer(self) -> Promise | Refusal:
        """Raises ValueError for a promise that no honest acceptor makes."""
        if not self.granted:
            return Refusal(self.promised)
        return Promise(self.promised, self.accepted_ballot, None if self.accepted is None else self.accepted.decision())


class Propose(msgspec.Struct, frozen=True):
    """A value is to be accepted; at ballot zero by an auxiliary, to which the leader names the result."""

    group_id: GroupID
    ballot: Ballot
    value: Verdict


class ProposeAnswer(msgspec.Struct, frozen=True):
    accepted: bool
    promised: Ballot = 0
    verdict: Verdict | None = None  # if the outcome is known here


class Repair(msgspec.Struct, frozen=True):
    """A proposer tells those who promised how to come to one result.

    members   who takes part
    digests   of the averages to hold in the end, 32 bytes for each part; zeros: it is reduced again
    parts     that someone lacks, in rising order
    sources   for each of them who gives it, or reduces it again
    """

    group_id: GroupID
    ballot: Ballot
    members: Indices
    digests: Digests
    parts: PartIndices
    sources: Annotated[tuple[Annotated[int, msgspec.Meta(ge=0)], ...], msgspec.Meta(max_length=MAX_PARTS)]


class RepairAnswer(msgspec.Struct, frozen=True):
    """The digest of the result that is here now, or why there is none."""

    digest: Hash | None = None
    reason: Words = ""
    suspects: Indices = ()


class HoldingsQuestion(msgspec.Struct, frozen=True):
    """Of which averages could you give me copies, if our plans are equal?"""

    group_id: GroupID
    plan: Hash


class HoldingsAnswer(msgspec.Struct, frozen=True):
    digests: Digests = b""  # as in PrepareAnswer
