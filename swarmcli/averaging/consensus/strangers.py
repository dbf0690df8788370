"""How the members of a round agree while a minority of them lies, without I/O, clock or randomness.

n voters, of whom at most f = ⌊(n − 1) / 3⌋ are hostile; n − f are a quorum, and any two quorums have an honest voter in
common. (Voters of one network share one vote, and only those count that were met, see `quorum.py` and `Met`.) The
pieces are known: one round of votes where all agree (Zyzzyva, 2007; SBFT, 2019), two phases where they do not (PBFT,
1999), and proposers in turn, as in `ballots.py`.

    ballot zero   every voter votes once for the result that it holds
                  n equal votes                                    decide, with no further message
                  n − f equal votes                                are a certificate
    above zero    a proposer has n − f promises, shows them, and proposes a value that follows from them
                  n − f votes for it                               are a certificate
    certificate   every voter compares it with all others, then confirms it; n − f confirms decide

An honest voter votes once in a ballot, so no ballot has two certificates, and a decision in one ballot binds all later
ones: among any n − f promises is one of an honest voter that confirmed it, or |promises| − f of voters that voted for
it at ballot zero.

With more than f hostile voters there can be two certificates. But each has honest votes in it as long as fewer than
n − f voters are hostile. Before an honest voter confirms a certificate, it shows it to all others, and each of them has
answered that it stands by nothing unlike. So honest voters never confirm two unlike values, as long as their messages
reach each other while they compare (`comparing.py` says how long that is).
"""

from __future__ import annotations

from collections.abc import Mapping

from swarmcli.averaging.consensus.ballots import Blocked, Bound, Free, Outbid, Refusal, State, Waiting
from swarmcli.averaging.consensus.certificate import DoubleVote, Electorate, sign_promise, signed, value_hash
from swarmcli.averaging.consensus.messages import (
    MAX_UNLIKE,
    ZERO,
    Certificate,
    Committed,
    Decided,
    Decision,
    Kind,
    Prepared,
    SignedPromise,
)
from swarmcli.network.identity import Identity, PeerID

_BALLOTS_SEEN = 16  # whose votes are kept, to find members that vote twice


class SeenVotes:
    """The votes of others that arrived here, in certificates or by themselves: they show members that vote twice."""

    def __init__(self, electorate: Electorate) -> None:
        self._electorate = electorate
        self._votes: dict[tuple[int, Kind], dict[int, tuple[bytes, bytes]]] = {}

    def note(self, votes: Certificate) -> list[DoubleVote]:
        """Notes votes, which are valid. Returns proof against each author that has voted for another value."""
        ballot, kind = votes.ballot, votes.kind
        known = self._votes.setdefault((ballot, kind), {})
        while len(self._votes) > _BALLOTS_SEEN:
            # The ballot with the fewest voters goes, the oldest first: one member can vote in any number of ballots.
            del self._votes[min(self._votes.keys() - {(ballot, kind)}, key=lambda each: len(self._votes[each]))]
        found = []
        for member, signature in votes.signatures.items():
            value, earlier = known.setdefault(member, (votes.value, signature))
            if value != votes.value:
                culprit, group_id = self._electorate.peers[member], self._electorate.group_id
                found.append(DoubleVote(culprit, group_id, ballot, kind, (value, votes.value), (earlier, signature)))
        return found

    def unlike(self, votes: Certificate) -> tuple[Certificate, ...]:
        """The votes for other values in the same ballot, by its authors or others."""
        others: dict[bytes, dict[int, bytes]] = {}
        for member, (value, signature) in self._votes.get((votes.ballot, votes.kind), {}).items():
            if value != votes.value:
                others.setdefault(value, {})[member] = signature
        found = [Certificate(votes.ballot, votes.kind, value, signatures) for value, signatures in others.items()]
        return tuple(found[:MAX_UNLIKE])


class GuardedAcceptor:
    """One voter's promises, votes and confirms. It never takes any back."""

    def __init__(self, electorate: Electorate, identity: Identity) -> None:
        self.promised = ZERO
        self.zero: bytes | None = None  # the digest that it voted for at ballot zero
        self.prepared: Prepared | None = None  # the highest certificate that it has seen
        self.standing: Prepared | None = None  # the certificate that it compares with others, or has confirmed
        self.twice: dict[PeerID, DoubleVote] = {}  # members that voted twice
        self.seen = SeenVotes(electorate)
        self._electorate, self._identity = electorate, identity
        self._shown: set[bytes] = set()  # values of all certificates that it has seen
        self._voted: tuple[int, bytes] | None = None  # last, above zero
        self._confirmed = False  # `standing`

    @property
    def void(self) -> bool:
        """Whether more members voted twice than quorums allow for: then no certificate proves anything any more. Up to
        f such members change nothing, since any two quorums have an honest voter in common: the round goes on."""
        quorum = self._electorate.quorum
        return quorum.weight(map(self._electorate.peers.index, self.twice)) > quorum.hostile

    def accept_zero(self, digest: bytes) -> bool:
        """Votes for a result at ballot zero. False: a higher ballot was promised, or another result voted for."""
        if self.zero is None and self.promised == ZERO and not self.void:
            self.zero = digest
        return self.zero == digest

    def prepare(self, ballot: int) -> SignedPromise | Refusal:
        """Promises to vote in no lower ballot, and tells the value that binds. Asked again, it promises again."""
        prepared = self.prepared
        if prepared is not None and prepared.votes.ballot >= ballot:
            return Refusal(max(self.promised, prepared.votes.ballot))
        if ballot <= ZERO or ballot < self.promised:
            return Refusal(self.promised)
        self.promised = ballot
        promise = SignedPromise(
            ballot,
            None if prepared is None else prepared.votes.ballot,
            None if prepared is None else prepared.votes.value,
            self.zero,
            bytes(64),
        )
        return sign_promise(self._identity, self._electorate.group_id, promise)

    def accept(
        self, ballot: int, value: Decision, promises: Mapping[int, SignedPromise], prepared: Prepared | None
    ) -> bool:
        """Votes for a value above ballot zero, if it follows from the promises. False: it does not, or a higher ballot
        was promised, or it has voted for another value in this one."""
        if ballot <= ZERO or ballot < self.promised or self.void:
            return False
        hashed = value_hash(value)
        if self._voted is not None and self._voted[0] == ballot:
            return self._voted[1] == hashed
        if not follows(ballot, value, promises, prepared, self._electorate):
            return False
        self.promised, self._voted = ballot, (ballot, hashed)
        return True

    # Certificates, which are valid

    def see(self, prepared: Prepared) -> list[DoubleVote]:
        """Another member shows a certificate: from here on promises tell it. Returns new proofs of double votes."""
        if self.prepared is None or prepared.votes.ballot > self.prepared.votes.ballot:
            self.prepared = prepared
        if len(self._shown) < 2:  # two unlike values tell everything
            self._shown.add(prepared.votes.value)
        return self.note(prepared.votes)

    def note(self, votes: Certificate) -> list[DoubleVote]:
        """Another member shows votes by themselves. Returns new proofs of double votes."""
        found = [proof for proof in self.seen.note(votes) if proof.culprit not in self.twice]
        self.twice |= {proof.culprit: proof for proof in found}
        return found

    def compare(self, prepared: Prepared) -> bool:
        """Begins to compare a certificate with the others. False: this voter must not confirm it."""
        self.see(prepared)
        if not self._is_current(prepared) or (self._confirmed and self._is_unlike(prepared)):
            return False
        self.standing = prepared
        return True

    def contradicts(self, prepared: Prepared) -> Prepared | None:
        """The certificate that this voter stands by instead of one that another voter compares."""
        return self.standing if self._is_unlike(prepared) else None

    def confirm(self, prepared: Prepared) -> bool:
        """All others have answered. False: something came between.

        Only the comparison that began last counts: while an earlier one was withdrawn, this voter may have told others
        that it stands by nothing.
        """
        if not self._is_current(prepared) or self.standing is not prepared:
            return False
        self._confirmed = True
        return True

    def withdraw(self, prepared: Prepared) -> None:
        """Another voter stands by another value: this one does not confirm, and stands by nothing."""
        if not self._confirmed and self.standing is prepared:
            self.standing = None

    def believes(self, decided: Decided) -> bool:
        """Whether this voter follows a proved decision. It does not follow one by votes alone, which nobody compared,
        once another voter has shown a certificate for another value. That takes more than f hostile voters."""
        return decided.votes.kind != "vote" or self._shown <= {decided.votes.value}

    def _is_current(self, prepared: Prepared) -> bool:
        ballot = prepared.votes.ballot
        newest = self.prepared is None or self.prepared.votes.ballot <= ballot
        return not self.void and self.promised <= ballot and newest

    def _is_unlike(self, prepared: Prepared) -> bool:
        return self.standing is None or self.standing.votes.value != prepared.votes.value


def follows(
    ballot: int,
    value: Decision,
    promises: Mapping[int, SignedPromise],
    prepared: Prepared | None,
    electorate: Electorate,
) -> bool:
    """Whether a proposer may propose this, as it shows: a quorum's promises, and the highest certificate of them."""
    if not electorate.decides(promises):
        return False
    for member, promise in promises.items():
        if promise.ballot != ballot or not electorate.is_promise(member, promise):
            return False
    highest = _highest(promises)
    if highest is not None and not (
        prepared is not None and prepared.votes.ballot == highest and electorate.is_prepared(prepared)
    ):
        return False
    bound = binding(promises, prepared if highest is not None else None, electorate)
    return bound is None or bound == value_hash(value)


def binding(promises: Mapping[int, SignedPromise], prepared: Prepared | None, electorate: Electorate) -> bytes | None:
    """The hash of the only value that may be proposed, since it may have been decided; None: any one may.

    `prepared`: the highest certificate of the promises. If a result was decided by all votes at ballot zero, all
    honest voters have voted for it, and at most f of the promises are not of these.
    """
    if prepared is not None:
        return prepared.votes.value
    counted, quorum = electorate.counted(promises), electorate.quorum
    for digest in {promises[member].zero for member in counted}:
        others = quorum.weight(member for member in counted if promises[member].zero != digest)
        if digest is not None and others <= quorum.hostile:
            return value_hash(Committed(digest))
    return None


def _highest(promises: Mapping[int, SignedPromise]) -> int | None:
    return max((promise.prepared for promise in promises.values() if promise.prepared is not None), default=None)


class GuardedTally:
    """The leader's count of ballot zero. Votes are valid when they come here."""

    def __init__(self, electorate: Electorate) -> None:
        self._electorate, self._quorum = electorate, electorate.quorum
        self._votes: dict[int, tuple[bytes, bytes]] = {}
        self._lost: set[int] = set()

    def accept(self, member: int, digest: bytes, signature: bytes) -> None:
        """The first vote of each stands."""
        self._votes.setdefault(member, (digest, signature))

    def lose(self, member: int) -> None:
        """A voter will not vote. A vote that still arrives counts."""
        self._lost.add(member)

    @property
    def decided(self) -> Decided | None:
        """The decision, if all voters have voted for one result."""
        best = self._best()
        return Decided(*best) if best is not None and len(best[1].signatures) == self._quorum.at_once else None

    @property
    def prepared(self) -> Prepared | None:
        """The certificate, if a quorum has voted for one result."""
        best = self._best()
        return Prepared(*best) if best is not None and self._electorate.decides(best[1].signatures) else None

    @property
    def complete(self) -> bool:
        """Whether nobody else is expected to vote."""
        return self._quorum.voters <= self._votes.keys() | self._lost

    @property
    def hopeless(self) -> bool:
        """Whether no quorum can come together any more."""
        best, missing = self._best(), self._quorum.voters - self._votes.keys() - self._lost
        return not self._quorum.decides(missing if best is None else missing | best[1].signatures.keys())

    def _best(self) -> tuple[Committed, Certificate] | None:
        by_digest: dict[bytes, dict[int, bytes]] = {}
        for member, (digest, signature) in self._votes.items():
            by_digest.setdefault(digest, {})[member] = signature
        if not by_digest:
            return None
        digest, supporters = max(by_digest.items(), key=lambda item: self._quorum.weight(item[1]))
        return Committed(digest), signed(supporters, ZERO, "vote", Committed(digest))


class GuardedProposal:
    """One ballot above zero at its proposer. A ballot is used once."""

    def __init__(self, ballot: int, electorate: Electorate) -> None:
        self.ballot = ballot
        self.value: Decision | None = None  # once proposed
        self.promises: dict[int, SignedPromise] = {}
        self.prepared: Prepared | None = None  # the highest certificate of the promises
        self._electorate, self._quorum = electorate, electorate.quorum
        self._votes: dict[int, bytes] = {}
        self._lost: set[int] = set()
        self._highest = ballot

    def promise(self, member: int, promise: SignedPromise, prepared: Prepared | None) -> None:
        """A voter promises, and shows the certificate of which it speaks. A voter with an invalid promise is lost."""
        if self.value is not None or promise.ballot != self.ballot:
            return
        shown = None if prepared is None else (prepared.votes.ballot, prepared.votes.value)
        claimed = None if promise.prepared is None else (promise.prepared, promise.value)
        valid = shown == claimed and self._electorate.is_promise(member, promise)
        if not valid or (prepared is not None and not self._electorate.is_prepared(prepared)):
            self.lose(member)
            return
        self.promises.setdefault(member, promise)
        if prepared is not None and (self.prepared is None or prepared.votes.ballot > self.prepared.votes.ballot):
            self.prepared = prepared

    def refuse(self, member: int, refusal: Refusal) -> None:
        """Any phase: this voter does not take part in this ballot."""
        self._highest = max(self._highest, refusal.promised)
        self._lost.add(member)

    def lose(self, member: int) -> None:
        """A voter is out of reach, or does not accept. An answer that still arrives counts."""
        self._lost.add(member)

    @property
    def state(self) -> State:
        """Before `propose` the values that may be proposed; after it whether a quorum can still vote."""
        answered = self.promises.keys() if self.value is None else self._votes.keys()
        if not self._electorate.decides(answered):
            if self._quorum.decides(self._quorum.voters - (self._lost - answered)):
                return Waiting()
            return Outbid(self._highest) if self._highest > self.ballot else Blocked()
        return self._choice() if self.value is None else Waiting()

    @property
    def may_abort(self) -> bool:
        """Whether the round may be given up in this ballot."""
        return self.value is None and self.state == Free()

    def propose(self, value: Decision) -> None:
        """From here on the ballot stands for this value. Raises ValueError if it does not follow."""
        if self.value is None and self.state in (Free(), Bound(value)):
            self.value = value
        elif self.value != value:
            raise ValueError(f"ballot {self.ballot} must not propose {value}: {self.value or self.state}")

    def voted(self, member: int, signature: bytes) -> None:
        """A voter accepts the proposed value; its signature is valid."""
        self._votes[member] = signature

    @property
    def certificate(self) -> Prepared | None:
        """The certificate, if a quorum has voted for the value."""
        if self.value is None or not self._electorate.decides(self._votes):
            return None
        return Prepared(self.value, signed(self._votes, self.ballot, "vote", self.value))

    def _choice(self) -> State:
        bound = binding(self.promises, self.prepared, self._electorate)
        if bound is None:
            return Free()
        if self.prepared is not None:
            return Bound(self.prepared.value)
        digests = {promise.zero for promise in self.promises.values() if promise.zero is not None}
        return Bound(next(Committed(digest) for digest in digests if value_hash(Committed(digest)) == bound))


class Confirms:
    """A proposer's count of the confirms of one certificate."""

    def __init__(self, prepared: Prepared, electorate: Electorate) -> None:
        self.prepared, self._electorate = prepared, electorate
        self._confirms: dict[int, bytes] = {}
        self._lost: set[int] = set()

    def add(self, member: int, signature: bytes) -> None:
        """A voter confirms; its signature is valid."""
        self._confirms[member] = signature

    def lose(self, member: int) -> None:
        """A voter does not confirm. A confirm that still arrives counts."""
        self._lost.add(member)

    @property
    def hopeless(self) -> bool:
        quorum = self._electorate.quorum
        return not quorum.decides(quorum.voters - (self._lost - self._confirms.keys()))

    @property
    def decided(self) -> Decided | None:
        if not self._electorate.decides(self._confirms):
            return None
        value, ballot = self.prepared.value, self.prepared.votes.ballot
        return Decided(value, signed(self._confirms, ballot, "confirm", value))
