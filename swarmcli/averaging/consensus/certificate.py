"""Signed votes, and what so many of them prove: to the members of a round, and later to anyone."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Collection, Mapping, Sequence
from typing import Annotated

import msgspec

from swarmcli.averaging.config import Trust
from swarmcli.averaging.consensus.messages import (
    ZERO,
    Aborted,
    Certificate,
    Committed,
    Decision,
    Hash,
    Indices,
    Kind,
)
from swarmcli.averaging.consensus.quorum import Quorum
from swarmcli.averaging.group import MAX_MEMBERS, NONCE_BYTES, Group, derived_nonce, group_id_of
from swarmcli.network.identity import Identity, PeerID, verify
from swarmcli.network.limits import MAX_TAG_BYTES

MOST_DERIVATIONS = 2  # a step of a round, and a try at it
_MAX_PURPOSE = 16


def value_hash(value: Decision) -> bytes:
    """32 bytes that stand for a value where it is signed."""
    return hashlib.sha256(b"swarm decision" + msgspec.msgpack.encode(value)).digest()


def sign_vote(identity: Identity, group_id: bytes, ballot: int, kind: Kind, value: bytes) -> bytes:
    """`value`: its hash."""
    return identity.sign(kind, group_id, struct.pack(">Q", ballot), value)


def is_vote(signature: bytes, peer: PeerID, group_id: bytes, ballot: int, kind: Kind, value: bytes) -> bool:
    """Whether this peer has signed that."""
    return verify(peer, kind, signature, group_id, struct.pack(">Q", ballot), value)


def is_signed(
    votes: Certificate, group_id: bytes, peers: Sequence[PeerID], voters: Collection[int], least: int
) -> bool:
    """Whether at least so many voters have signed it, and no signature is false. The work is one check for each
    signature, up to the first false one."""
    if len(votes.signatures) < least or not votes.signatures.keys() <= set(voters):
        return False
    return all(
        is_vote(signature, peers[member], group_id, votes.ballot, votes.kind, votes.value)
        for member, signature in votes.signatures.items()
    )


def decides(votes: Certificate, group_id: bytes, peers: Sequence[PeerID], quorum: Quorum, value: Decision) -> bool:
    """Whether it proves that this value was chosen."""
    match votes.kind:
        case "confirm" if quorum.guarded:
            least = quorum.to_decide
        case "vote" if quorum.guarded and votes.ballot == ZERO:
            least = quorum.at_once
        case "accept" if not quorum.guarded:
            least = quorum.to_abort if isinstance(value, Aborted) else quorum.to_decide
        case _:
            return False
    return votes.value == value_hash(value) and is_signed(votes, group_id, peers, quorum.voters, least)


class RoundCertificate(msgspec.Struct, frozen=True):
    """Proves to anyone that a group has committed a result. It tells who the members were, and not where.

    tag, nonce   of the group
    peers        its members, in its order; `auxiliaries` of them by index
    rest         hash of the rest of the group
    derivations  what the members did under other ids: steps of the round, and tries at it
    digest       of the result
    votes        for it
    """

    tag: Annotated[bytes, msgspec.Meta(max_length=MAX_TAG_BYTES)]
    nonce: Annotated[bytes, msgspec.Meta(min_length=NONCE_BYTES, max_length=NONCE_BYTES)]
    peers: Annotated[tuple[PeerID, ...], msgspec.Meta(min_length=1, max_length=MAX_MEMBERS)]
    auxiliaries: Indices
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
        return cls(group.tag, group.nonce, peers, auxiliaries, group.rest, trust, tuple(derivations), digest, votes)

    @property
    def members(self) -> tuple[PeerID, ...]:
        return self.peers

    @property
    def signers(self) -> frozenset[PeerID]:
        """Whose votes these are; of a certificate that verifies."""
        return frozenset(self.peers[index] for index in self.votes.signatures)

    @property
    def group_id(self) -> bytes:
        """32 bytes: that of the round."""
        return group_id_of(self.tag, self.nonce, self.peers, frozenset(self.auxiliaries), self.rest)

    @property
    def voted_id(self) -> bytes:
        """That of the step and the try at which the members have voted."""
        group_id = self.group_id
        for purpose in self.derivations:
            nonce = derived_nonce(group_id, purpose)
            group_id = group_id_of(self.tag, nonce, self.peers, frozenset(self.auxiliaries), self.rest)
        return group_id

    def verify(self) -> bool:
        """Whether all of it fits together and is signed by as many as that takes; one check for each signature."""
        auxiliaries = frozenset(self.auxiliaries)
        if len(set(self.peers)) != len(self.peers) or any(index >= len(self.peers) for index in auxiliaries):
            return False
        quorum = Quorum(len(self.peers), auxiliaries, self.trust)
        return decides(self.votes, self.voted_id, self.peers, quorum, Committed(self.digest))


def signed(signatures: Mapping[int, bytes], ballot: int, kind: Kind, value: Decision) -> Certificate:
    """A certificate of these."""
    return Certificate(ballot, kind, value_hash(value), dict(sorted(signatures.items())))
