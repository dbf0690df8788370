"""Signed votes, and certificates of them: they prove decisions to the members of a round, and later to anyone."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Annotated, TypeAlias

import msgspec

from swarmcli.averaging.config import Trust
from swarmcli.averaging.consensus.messages import (
    ZERO,
    Aborted,
    Ballot,
    Certificate,
    Committed,
    Decided,
    Decision,
    GroupID,
    Hash,
    Indices,
    Kind,
    Prepared,
    Signature,
    SignedPromise,
)
from swarmcli.averaging.consensus.quorum import Quorum
from swarmcli.averaging.group import MAX_MEMBERS, NONCE_BYTES, Group, derived_nonce, group_id_of
from swarmcli.network.identity import Identity, PeerID, verify
from swarmcli.network.limits import MAX_TAG_BYTES

MOST_DERIVATIONS = 2  # a step of a round, and a try at it
_MAX_PURPOSE = 16
_Network: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=MAX_MEMBERS)]
_MOST_REMEMBERED = 4 * MAX_MEMBERS  # valid votes of one group


def value_hash(value: Decision) -> bytes:
    """32 bytes that stand for a value where it is signed."""
    return hashlib.sha256(b"swarm decision" + msgspec.msgpack.encode(value)).digest()


def sign_vote(identity: Identity, group_id: bytes, ballot: int, kind: Kind, value: bytes) -> bytes:
    """`value`: its hash."""
    return identity.sign(kind, group_id, struct.pack(">Q", ballot), value)


def is_vote(signature: bytes, peer: PeerID, group_id: bytes, ballot: int, kind: Kind, value: bytes) -> bool:
    """Whether this is the peer's signature for that vote."""
    return verify(peer, kind, signature, group_id, struct.pack(">Q", ballot), value)


class DoubleVote(msgspec.Struct, frozen=True, tag=True):
    """A peer has signed two unlike values in one ballot of one group: `values` are their hashes."""

    culprit: PeerID
    group_id: GroupID
    ballot: Ballot
    kind: Kind
    values: tuple[Hash, Hash]
    signatures: tuple[Signature, Signature]

    def verify(self) -> bool:
        """Whether it proves what it says; two signatures are checked."""
        return self.values[0] != self.values[1] and all(
            is_vote(signature, self.culprit, self.group_id, self.ballot, self.kind, value)
            for value, signature in zip(self.values, self.signatures, strict=True)
        )

    def words(self) -> str:
        return f"it voted twice in ballot {self.ballot} of round {self.group_id.hex()[:8]}"


class Electorate:
    """The voters of one group, and their signatures."""

    def __init__(
        self,
        group_id: bytes,
        peers: Sequence[PeerID],
        quorum: Quorum,
        met: Callable[[int], bool] = lambda member: True,
    ) -> None:
        """`met`: whether the local member has met another one, which may be no more than a key: only its vote counts
        then."""
        self.group_id, self.peers, self.quorum, self.met = group_id, peers, quorum, met
        self._valid: set[tuple[int, int, Kind, bytes, bytes]] = set()

    def is_vote(self, member: int, ballot: int, kind: Kind, value: bytes, signature: bytes) -> bool:
        """`value`: its hash. A vote that was found valid is not checked again: each member shows the same ones."""
        vote = (member, ballot, kind, value, signature)
        if vote in self._valid:
            return True
        valid = member in self.quorum.voters and is_vote(
            signature, self.peers[member], self.group_id, ballot, kind, value
        )
        if valid and len(self._valid) < _MOST_REMEMBERED:
            self._valid.add(vote)
        return valid

    def counted(self, members: Iterable[int]) -> set[int]:
        """The members among them whose votes count."""
        return {member for member in members if member in self.quorum.voters and self.met(member)}

    def decides(self, members: Iterable[int]) -> bool:
        """Whether the members among them whose votes count are a quorum."""
        return self.quorum.decides(self.counted(members))

    def is_prepared(self, prepared: Prepared, *, thin: bool = False) -> bool:
        """Whether a quorum has voted for it; `thin`: members that may be no more than keys count too."""
        votes = prepared.votes
        return (
            votes.kind == "vote"
            and (votes.ballot > ZERO or isinstance(prepared.value, Committed))
            and votes.value == value_hash(prepared.value)
            and (self.quorum.decides(votes.signatures) if thin else self.decides(votes.signatures))
            and self.is_signed(votes)
        )

    def is_decided(self, decided: Decided, *, thin: bool = False) -> bool:
        """Whether it proves that the value was chosen; `thin`: members that may be no more than keys count too."""
        votes, signers = decided.votes, decided.votes.signatures.keys()
        return (
            choose(votes, self.quorum, decided.decision, signers if thin else self.counted(signers))
            and votes.value == value_hash(decided.decision)
            and self.is_signed(votes)
        )

    def is_signed(self, votes: Certificate) -> bool:
        """Whether voters have signed it, and no signature is false. The work is one check for each signature, up to the
        first false one."""
        return bool(votes.signatures) and all(
            self.is_vote(member, votes.ballot, votes.kind, votes.value, signature)
            for member, signature in votes.signatures.items()
        )

    def is_promise(self, member: int, promise: SignedPromise) -> bool:
        """Whether this voter has signed the promise, and it makes sense."""
        return (
            member in self.quorum.voters
            and (promise.prepared is None) == (promise.value is None)
            and (promise.prepared is None or promise.prepared < promise.ballot)
            and verify(self.peers[member], "promise", promise.signature, *_promised(self.group_id, promise))
        )


def sign_promise(identity: Identity, group_id: bytes, promise: SignedPromise) -> SignedPromise:
    """The same with its signature."""
    signature = identity.sign("promise", *_promised(group_id, promise))
    return msgspec.structs.replace(promise, signature=signature)


def _promised(group_id: bytes, promise: SignedPromise) -> tuple[bytes, ...]:
    prepared = b"" if promise.prepared is None else struct.pack(">Q", promise.prepared)
    return group_id, struct.pack(">Q", promise.ballot), prepared, promise.value or b"", promise.zero or b""


def choose(votes: Certificate, quorum: Quorum, value: Decision, signers: Collection[int]) -> bool:
    """Whether these signers' votes choose the value."""
    match votes.kind:
        case "confirm" if quorum.guarded:
            return quorum.decides(signers)
        case "vote" if quorum.guarded and votes.ballot == ZERO and isinstance(value, Committed):
            return quorum.voters <= set(signers)
        case "accept" if not quorum.guarded:
            return len(signers) >= (quorum.to_abort if isinstance(value, Aborted) else quorum.to_decide)
    return False


class RoundCertificate(msgspec.Struct, frozen=True):
    """Proves to anyone that a group has committed a result. It names the members, and not their addresses.

    tag, nonce   of the group
    peers        its members, in its order; `auxiliaries` of them by index; `networks`: see `Group`
    rest         hash of the rest of the group
    derivations  steps of the round and tries at it, which the members did under other ids
    digest       of the result
    votes        for it
    """

    tag: Annotated[bytes, msgspec.Meta(max_length=MAX_TAG_BYTES)]
    nonce: Annotated[bytes, msgspec.Meta(min_length=NONCE_BYTES, max_length=NONCE_BYTES)]
    peers: Annotated[tuple[PeerID, ...], msgspec.Meta(min_length=1, max_length=MAX_MEMBERS)]
    auxiliaries: Indices
    networks: Annotated[tuple[_Network, ...], msgspec.Meta(max_length=MAX_MEMBERS)]
    rest: Hash
    trust: Trust
    derivations: Annotated[
        tuple[Annotated[str, msgspec.Meta(max_length=_MAX_PURPOSE)], ...], msgspec.Meta(max_length=MOST_DERIVATIONS)
    ]
    digest: Hash
    votes: Certificate

    @classmethod
    def of(
        cls, group: Group, trust: Trust, derivations: Sequence[str], digest: bytes, votes: Certificate
    ) -> RoundCertificate:
        """`group`: the round's own, from which that of the votes is derived."""
        peers = tuple(member.peer_id for member in group.members)
        auxiliaries = tuple(sorted(group.auxiliaries))
        who = peers, auxiliaries, group.networks
        return cls(group.tag, group.nonce, *who, group.rest, trust, tuple(derivations), digest, votes)

    @property
    def signers(self) -> frozenset[PeerID]:
        """The voters, of a certificate that verifies."""
        return frozenset(self.peers[index] for index in self.votes.signatures)

    @property
    def group_id(self) -> bytes:
        """32 bytes: the id of the round."""
        return self._id(self.nonce)

    def _id(self, nonce: bytes) -> bytes:
        return group_id_of(self.tag, nonce, self.peers, frozenset(self.auxiliaries), self.networks, self.rest)

    @property
    def voted_id(self) -> bytes:
        """The id of the step and the try at which the members have voted."""
        group_id = self.group_id
        for purpose in self.derivations:
            group_id = self._id(derived_nonce(group_id, purpose))
        return group_id

    def verify(self) -> bool:
        """Whether all fields fit together and enough voters have signed; one check for each signature."""
        auxiliaries = frozenset(self.auxiliaries)
        count = len(self.peers)
        if len(set(self.peers)) != count or len(self.networks) != count or any(index >= count for index in auxiliaries):
            return False
        electorate = Electorate(self.voted_id, self.peers, Quorum(count, auxiliaries, self.trust, self.networks))
        return electorate.is_decided(Decided(Committed(self.digest), self.votes))


def signed(signatures: Mapping[int, bytes], ballot: int, kind: Kind, value: Decision) -> Certificate:
    """A certificate of these signatures."""
    return Certificate(ballot, kind, value_hash(value), dict(sorted(signatures.items())))
