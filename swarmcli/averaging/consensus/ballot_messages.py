"""What the members of a group say to each other about the outcome of their round; `ballots.py` says what it means."""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

import msgspec

from swarmcli.averaging.consensus.ballots import Promise, Refusal
from swarmcli.averaging.consensus.outcome import Decision
from swarmcli.averaging.round.messages import Ballot, Digests, GroupID, Hash, Indices, Words

Standing: TypeAlias = Literal["running", "expected", "over", "unknown"]


class VoteMessage(msgspec.Struct, frozen=True):
    """A member's word to the leader: the digest of the result that it holds, which is its vote at ballot zero, or
    (None) why it does not come to hold one."""

    group_id: GroupID
    digest: Hash | None = None
    reason: Words = ""


class OutcomeQuestion(msgspec.Struct, frozen=True):
    """What became of the round? Answered as soon as the answerer knows, or knows that it never will."""

    group_id: GroupID


class OutcomeAnswer(msgspec.Struct, frozen=True):
    """`decision` is None if the answerer does not know it and never will."""

    decision: Decision | None = None


class PresenceQuestion(msgspec.Struct, frozen=True):
    """Have you begun this round? Answered at once."""

    group_id: GroupID


class PresenceAnswer(msgspec.Struct, frozen=True):
    """running: it takes part. expected: it will, but still computes. over: it has left. unknown: it knows of none."""

    standing: Standing
    decision: Decision | None = None  # if it knows the outcome


class Report(msgspec.Struct, frozen=True):
    """What a member has of the averages, and could bring to another try.

    digest     of the result, if all of it is here
    plan       fingerprint of the plan of the round, which tells what the parts are
    digests    of the averages that are here, 32 bytes for each part, zeros for one that is not
    reason     why averages are missing
    failed     the reducers whose averages are missing, and those who gave false copies
    """

    digest: Hash | None
    plan: Hash
    digests: Digests = b""
    reason: Words = ""
    failed: Indices = ()


class Prepare(msgspec.Struct, frozen=True):
    """A proposer begins a ballot. Answered once the answerer's own exchange of parts has come to its end."""

    group_id: GroupID
    ballot: Ballot


class PrepareAnswer(msgspec.Struct, frozen=True):
    """What an acceptor says to Prepare.

    decision   the outcome is known here; nothing else counts then
    granted    it is promised; otherwise `promised` is the highest ballot that was
    follows    not granted, because this member of a lower rank leads as seen from here
    accepted   and `accepted_ballot`: what was accepted last
    report     granted, by a member that has not left the round
    """

    decision: Decision | None = None
    granted: bool = False
    promised: Ballot = 0
    follows: Annotated[int, msgspec.Meta(ge=0)] | None = None
    accepted_ballot: Ballot | None = None
    accepted: Decision | None = None
    report: Report | None = None

    @classmethod
    def of(cls, answer: Promise | Refusal) -> PrepareAnswer:
        if isinstance(answer, Refusal):
            return cls(promised=answer.promised)
        return cls(None, True, answer.ballot, None, answer.accepted_ballot, answer.accepted)

    def answer(self) -> Promise | Refusal:
        """Raises ValueError for a promise that no honest acceptor makes."""
        if not self.granted:
            return Refusal(self.promised)
        return Promise(self.promised, self.accepted_ballot, self.accepted)


class Propose(msgspec.Struct, frozen=True):
    """A value is to be accepted; at ballot zero by an auxiliary, to which the leader names the result."""

    group_id: GroupID
    ballot: Ballot
    value: Decision


class ProposeAnswer(msgspec.Struct, frozen=True):
    accepted: bool
    promised: Ballot = 0
    decision: Decision | None = None  # if the outcome is known here


class HoldingsQuestion(msgspec.Struct, frozen=True):
    """Of which averages could you give me copies, if our plans are equal?"""

    group_id: GroupID
    plan: Hash


class HoldingsAnswer(msgspec.Struct, frozen=True):
    digests: Digests = b""  # as in Report
