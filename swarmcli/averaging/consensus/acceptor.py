"""One member's promises, votes and decision in a round. They outlive the member's part in the round.

A member that has left (cancelled, undecided, done) goes on answering for its votes as long as its process lives, or is
silent for ever: a member that forgot a promise and answered again could contradict itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from swarmcli.averaging.config import Trust
from swarmcli.averaging.consensus.ballots import ZERO, Acceptor, Refusal, proposer_of
from swarmcli.averaging.consensus.certificate import DoubleVote, Electorate, sign_vote, value_hash
from swarmcli.averaging.consensus.messages import (
    MAX_UNLIKE,
    Certificate,
    Committed,
    Decided,
    Decision,
    Kind,
    PrepareAnswer,
    Prepared,
    Propose,
    ProposeAnswer,
)
from swarmcli.averaging.consensus.quorum import Quorum
from swarmcli.averaging.consensus.strangers import GuardedAcceptor
from swarmcli.averaging.group import Group
from swarmcli.errors import CallRefused
from swarmcli.network import Identity, PeerID
from swarmcli.network.prefix import Prefix, prefix_of_address

_FURTHEST = 1000  # turns that a ballot may be ahead of the last promise: no member may use them up for all


class Met:
    """The members of a group that this one has met in this round: only their votes count in a guarded group, since a
    leader may list keys. A voter for a network is met by a connection from or to there, or by `found`."""

    def __init__(
        self, group: Group, me: int, quorum: Quorum, network_of: Callable[[PeerID], Prefix | None] | None
    ) -> None:
        self._group, self._me, self._quorum, self._network_of = group, me, quorum, network_of
        self._met = {me}

    def __call__(self, member: int) -> bool:
        if self._network_of is None or not self._quorum.guarded or member in self._met:
            return True
        if member not in self._quorum.voters:
            return False
        mine, its = self._group.members[self._me], self._group.members[member]
        if not (self._quorum.by_networks or mine.listening or its.listening):
            return True  # neither can dial the other: the listed member's word counts
        network, networks = self._network_of(its.peer_id), self._group.networks
        neighbours = not self._quorum.by_networks or networks[member] == networks[self._me]
        if network is not None and (neighbours or network == prefix_of_address(its.addresses[0])):
            self._met.add(member)
        return member in self._met

    def found(self, member: int) -> None:
        """A member has answered at the address by which it votes."""
        self._met.add(member)


class RoundVotes:
    """One member's side of the ballots of one round."""

    def __init__(
        self,
        group: Group,
        identity: Identity,
        trust: Trust = "strangers",
        accuse: Callable[[DoubleVote], None] = lambda proof: None,
        network_of: Callable[[PeerID], Prefix | None] | None = None,
    ) -> None:
        """`accuse` gets the proof against a member that votes twice. `network_of`: the network of a connected peer;
        None: all listed members count as met. Raises KeyError if `identity` is not a member."""
        self.group, self.me = group, group.index_of(identity.peer_id)
        peers = [member.peer_id for member in group.members]
        self.quorum = Quorum(len(group), group.auxiliaries, trust, group.networks)
        self.met = Met(group, self.me, self.quorum, network_of)
        self.electorate = Electorate(group.group_id, peers, self.quorum, self.met)
        self.plain = Acceptor()
        self.guarded = GuardedAcceptor(self.electorate, identity) if self.quorum.guarded else None
        self.decided: Decided | None = None
        self.begun = False  # this member has taken up its part in the round, or has declined it
        self.over = False  # this member takes no part in the round any more
        self._identity, self._accuse = identity, accuse

    @property
    def acceptor(self) -> Acceptor | GuardedAcceptor:
        return self.plain if self.guarded is None else self.guarded

    @property
    def decision(self) -> Decision | None:
        return None if self.decided is None else self.decided.decision

    @property
    def votes(self) -> bool:
        """Whether this member has a vote."""
        return self.me in self.quorum.voters

    @property
    def auxiliary(self) -> bool:
        return self.group.members[self.me].auxiliary

    @property
    def evidence(self) -> tuple[DoubleVote, ...]:
        """The proofs against members that have voted twice."""
        return () if self.guarded is None else tuple(self.guarded.twice.values())

    @property
    def void(self) -> bool:
        """Whether more members voted twice than a quorum allows for: then this member votes for nothing any more."""
        return self.guarded is not None and self.guarded.void

    @property
    def twice(self) -> tuple[Certificate, ...]:
        """The votes of members that voted twice, as many as an answer takes."""
        shown = []
        for proof in self.evidence[: MAX_UNLIKE // 2]:
            culprit, both = self.group.index_of(proof.culprit), zip(proof.values, proof.signatures, strict=True)
            shown += [Certificate(proof.ballot, proof.kind, value, {culprit: signed}) for value, signed in both]
        return tuple(shown)

    def learn(self, decided: Decided) -> bool:
        """Believes a decision that its votes prove. Decisions never change: the first one stands. Returns whether one
        is known."""
        believed = self.guarded is None or self.guarded.believes(decided)
        if self.decided is None and believed and self.electorate.is_decided(decided):
            self.decided = decided
        return self.decided is not None

    def member(self, peer: PeerID) -> int:
        """Raises CallRefused for a stranger."""
        if peer not in self.group:
            raise CallRefused("stranger", "only members of the group take part in its round")
        index = self.group.index_of(peer)
        self.met(index)  # while it is connected
        return index

    def check_proposer(self, peer: PeerID, ballot: int) -> None:
        """Raises CallRefused for a ballot that is not the asker's, or that is far ahead of all others."""
        owner = 0 if ballot == ZERO else proposer_of(ballot, len(self.group))
        if self.member(peer) != owner:
            raise CallRefused("ballot", f"ballot {ballot} belongs to another member")
        if ballot > self.acceptor.promised + _FURTHEST * len(self.group):
            raise CallRefused("ballot", f"ballot {ballot} is far beyond those that were seen here")

    # Votes

    @property
    def kind(self) -> Kind:
        """The kind of votes in this group."""
        return "accept" if self.guarded is None else "vote"

    def sign(self, ballot: int, kind: Kind, value: Decision) -> bytes:
        return sign_vote(self._identity, self.group.group_id, ballot, kind, value_hash(value))

    def is_vote(self, member: int, ballot: int, value: Decision, signature: bytes) -> bool:
        """Whether this is the member's vote, and it has one."""
        return self.electorate.is_vote(member, ballot, self.kind, value_hash(value), signature)

    def vote_zero(self, digest: bytes) -> bytes | None:
        """Accepts the result that is here at ballot zero. None: this member does not vote any more, or has no vote."""
        if not self.votes or not self.acceptor.accept_zero(digest):
            return None
        signature = self.sign(ZERO, self.kind, Committed(digest))
        if self.guarded is not None:
            self.note(Certificate(ZERO, "vote", value_hash(Committed(digest)), {self.me: signature}))
        return signature

    def prepare(self, ballot: int) -> PrepareAnswer:
        """Promises, unless the outcome is known: then the answer says it."""
        if self.decided is not None:
            return PrepareAnswer(self.decided)
        if not self.votes or self.void:
            return PrepareAnswer(twice=self.twice)
        answer = self.acceptor.prepare(ballot)
        if isinstance(answer, Refusal):
            return PrepareAnswer(promised=answer.promised)
        if self.guarded is None:
            return PrepareAnswer(promise=answer, promised=answer.ballot)  # type: ignore[arg-type]
        prepared = None if answer.prepared is None else self.guarded.prepared  # type: ignore[union-attr]
        return PrepareAnswer(signed=answer, promised=answer.ballot, prepared=prepared)  # type: ignore[arg-type]

    def accept(self, proposed: Propose, held: bool) -> ProposeAnswer:
        """Accepts a value; a result only if it is `held` here. Auxiliaries hold no result and accept any."""
        ballot, value = proposed.ballot, proposed.value
        if self.decided is not None:
            return ProposeAnswer(promised=self.acceptor.promised, decided=self.decided)
        may = not isinstance(value, Committed) or self.auxiliary or held
        if not may or not self.votes:
            accepted = False
        elif self.guarded is not None:
            accepted = self.guarded.accept(ballot, value, proposed.promises, proposed.prepared)
        elif ballot == ZERO:
            accepted = isinstance(value, Committed) and self.auxiliary and self.plain.accept_zero(value.digest)
        else:
            accepted = self.plain.accept(ballot, value)
        signature = self.sign(ballot, self.kind, value) if accepted else None
        return ProposeAnswer(signature, self.acceptor.promised)

    # Certificates of a guarded group

    def see(self, prepared: Prepared) -> bool:
        """Another member shows a certificate. Returns whether it is valid; never raises."""
        if self.guarded is None or not self.electorate.is_prepared(prepared):
            return False
        for proof in self.guarded.see(prepared):
            self._accuse(proof)
        return True

    def note_all(self, shown: Iterable[Certificate]) -> None:
        for votes in shown:
            self.note(votes)

    def note(self, votes: Certificate) -> None:
        """Another member shows votes; those without voters' signatures are passed over."""
        if self.guarded is None or votes.kind != "vote" or not self.electorate.is_signed(votes):
            return
        for proof in self.guarded.note(votes):
            self._accuse(proof)
