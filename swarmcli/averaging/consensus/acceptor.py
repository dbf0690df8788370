"""What this member has promised, accepted and learned in a round. It outlives the member's part in the round.

A member that has left (cancelled, undecided, done) goes on answering for its votes as long as its process lives, or is
silent for ever: one that forgot a promise and answered again could contradict itself.
"""

from __future__ import annotations

from swarmcli.averaging.consensus.ballots import ZERO, Acceptor, Refusal, proposer_of
from swarmcli.averaging.consensus.messages import Committed, Decision, PrepareAnswer, ProposeAnswer
from swarmcli.averaging.group import Group
from swarmcli.errors import CallRefused
from swarmcli.network import PeerID

_FURTHEST = 1000  # turns that a ballot may be ahead of what was promised: nobody may use them up for everyone


class RoundVotes:
    """One member's side of the ballots of one round."""

    def __init__(self, group: Group, me: int) -> None:
        self.group, self.me = group, me
        self.acceptor = Acceptor()
        self.decision: Decision | None = None
        self.over = False  # this member takes no part in the round any more

    @property
    def auxiliary(self) -> bool:
        return self.group.members[self.me].auxiliary

    def learn(self, decision: Decision) -> None:
        """Decisions never change: whoever knows one knows the same, and the first word stands."""
        if self.decision is None:
            self.decision = decision

    def member(self, peer: PeerID) -> int:
        """Raises CallRefused for a stranger."""
        if peer not in self.group:
            raise CallRefused("stranger", "only members of the group take part in its round")
        return self.group.index_of(peer)

    def check_proposer(self, peer: PeerID, ballot: int) -> None:
        """Raises CallRefused for a ballot that is not the asker's, or one that is out of all proportion."""
        owner = 0 if ballot == ZERO else proposer_of(ballot, len(self.group))
        if self.member(peer) != owner:
            raise CallRefused("ballot", f"ballot {ballot} belongs to another member")
        if ballot > self.acceptor.promised + _FURTHEST * len(self.group):
            raise CallRefused("ballot", f"ballot {ballot} is far beyond those that were seen here")

    def prepare(self, ballot: int) -> PrepareAnswer:
        """Promises nothing once the outcome is known, but says it."""
        if self.decision is not None:
            return PrepareAnswer(self.decision)
        answer = self.acceptor.prepare(ballot)
        if isinstance(answer, Refusal):
            return PrepareAnswer(promised=answer.promised)
        return PrepareAnswer(promise=answer, promised=answer.ballot)

    def accept(self, ballot: int, value: Decision, held: bool) -> ProposeAnswer:
        """Accepts a value, a result only if it is `held` here. Auxiliaries hold none and accept any."""
        if self.decision is not None:
            return ProposeAnswer(self.decision == value, self.acceptor.promised, self.decision)
        match value:
            case Committed(digest) if ballot == ZERO:
                accepted = self.auxiliary and self.acceptor.accept_zero(digest)
            case Committed():
                accepted = (self.auxiliary or held) and self.acceptor.accept(ballot, value)
            case _:
                accepted = self.acceptor.accept(ballot, value)
        return ProposeAnswer(accepted, self.acceptor.promised)
