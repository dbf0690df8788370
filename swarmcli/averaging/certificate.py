"""Voters decide the outcome of a round: what they sign, their quorum, and the certificate that proves the outcome.

Where strangers average, up to f = ⌊(n − 1) / 3⌋ of n voters may be hostile; with `trust="members"`, and where fewer
than four vote, f is 0. A quorum is ⌊(n + f) / 2⌋ + 1: any two quorums share more than f voters, so at least one honest
voter. Keys cost nothing, but addresses do: where strangers listen in four networks or more, n counts networks, and
members that do not listen have no vote.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from typing import Annotated, Literal, TypeAlias

import msgspec

from swarmcli.averaging.config import Trust
from swarmcli.averaging.group import GROUP_ID_BYTES, MAX_MEMBERS, NONCE_BYTES, Group, group_id_of
from swarmcli.network.bounds import MAX_TAG_BYTES
from swarmcli.network.identity import SIGNATURE_BYTES, Identity, PeerID, verify

LEAST_GUARDED = 4  # voters: with fewer f would be zero
DIGEST_BYTES = 32

Hash = Annotated[bytes, msgspec.Meta(min_length=DIGEST_BYTES, max_length=DIGEST_BYTES)]
GroupID = Annotated[bytes, msgspec.Meta(min_length=GROUP_ID_BYTES, max_length=GROUP_ID_BYTES)]
Index = Annotated[int, msgspec.Meta(ge=0, lt=MAX_MEMBERS)]
Indices = Annotated[tuple[Index, ...], msgspec.Meta(max_length=MAX_MEMBERS)]
Signature = Annotated[bytes, msgspec.Meta(min_length=SIGNATURE_BYTES, max_length=SIGNATURE_BYTES)]
Signatures = Annotated[dict[Index, Signature], msgspec.Meta(max_length=MAX_MEMBERS)]
_Network: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=MAX_MEMBERS)]

# What a voter signs about one list. echo: it holds a result with this digest. vote: the round has this result. give-up:
# it will never vote; with the digest NOTHING. An honest voter signs at most one echo, and one vote or one give-up.
Kind: TypeAlias = Literal["echo", "vote", "give-up"]
NOTHING = bytes(DIGEST_BYTES)


def sign_word(identity: Identity, group_id: bytes, kind: Kind, digest: bytes) -> bytes:
    """Returns the signature. The id of a group hashes its list, its tag and each member's own search: no other round of
    any averager has the same id."""
    return identity.sign(kind, group_id, digest)


class DoubleWord(msgspec.Struct, frozen=True, tag=True):
    """A proof: a peer has signed two words about one list, and an honest peer signs only one of the two."""

    culprit: PeerID
    group_id: GroupID
    kinds: tuple[Kind, Kind]
    digests: tuple[Hash, Hash]
    signatures: tuple[Signature, Signature]

    def verify(self) -> bool:
        """Whether it proves what it says; two signatures are checked."""
        words = list(zip(self.kinds, self.digests, strict=True))
        return are_unlike(*words) and all(
            verify(self.culprit, kind, signature, self.group_id, digest)
            for (kind, digest), signature in zip(words, self.signatures, strict=True)
        )

    def words(self) -> str:
        first, second = self.kinds
        return f"it signed an unlike {first} and {second} about round {self.group_id.hex()[:8]}"


def are_unlike(first: tuple[Kind, bytes], second: tuple[Kind, bytes]) -> bool:
    """Whether no honest member signs both: two echoes, two votes, or a vote and a give-up."""
    (kind, _), (other, _) = first, second
    return first != second and (kind == "echo") == (other == "echo")


@dataclass(frozen=True)
class Quorum:
    """The voters of a group, and how many of them decide. Members are indices into the group's list.

    members       how many there are
    auxiliaries   these do not vote
    networks      the number of the network in which each member listens, 0 for one that does not listen, see `Group`;
                  (): unknown, then each voter has one vote
    """

    members: int
    auxiliaries: frozenset[int] = frozenset()
    trust: Trust = "strangers"
    networks: Sequence[int] = ()

    @classmethod
    def of(cls, group: Group, trust: Trust) -> Quorum:
        return cls(len(group), group.auxiliaries, trust, group.networks)

    @cached_property
    def guarded(self) -> bool:
        """Whether f is above 0: the group is safe with a hostile minority."""
        return self.trust == "strangers" and self.members - len(self.auxiliaries) >= LEAST_GUARDED

    @cached_property
    def by_networks(self) -> bool:
        """Whether each network has one vote."""
        able = {self.networks[index] for index in range(len(self.networks)) if index not in self.auxiliaries} - {0}
        return self.guarded and len(able) >= LEAST_GUARDED

    @cached_property
    def weights(self) -> Mapping[int, Fraction | int]:
        """Voter → its weight: the voters of a network have equal shares of its one vote."""
        everyone = [index for index in range(self.members) if index not in self.auxiliaries]
        if not self.by_networks:
            return dict.fromkeys(everyone, 1)
        sharing = Counter(self.networks[index] for index in everyone)
        return {index: Fraction(1, sharing[network]) for index in everyone if (network := self.networks[index])}

    @cached_property
    def voters(self) -> frozenset[int]:
        return frozenset(self.weights)

    def weight(self, members: Iterable[int]) -> Fraction | int:
        return sum(self.weights.get(index, 0) for index in set(members))

    @cached_property
    def total(self) -> int:
        """n: the weight of all voters."""
        return int(self.weight(self.voters))

    @cached_property
    def hostile(self) -> int:
        """f: the most hostile votes with which the group is safe."""
        return (self.total - 1) // 3 if self.guarded else 0

    @cached_property
    def to_decide(self) -> int:
        """The quorum: how many equal votes make a certificate."""
        return (self.total + self.hostile) // 2 + 1

    def decides(self, members: Iterable[int]) -> bool:
        """Whether equal votes of these members make a certificate."""
        return self.weight(members) >= self.to_decide

    def precludes(self, members: Iterable[int]) -> bool:
        """Whether a digest can get no certificate any more if these members have signed something else. It counts that
        f of them may lie, and vote for that digest as well."""
        return self.weight(members) > self.total - self.to_decide + self.hostile


class RoundCertificate(msgspec.Struct, frozen=True):
    """Proves to anyone that a group has committed a result. It names the members, but not their addresses.

    tag, nonce    of the group
    peers         its members, in their order
    auxiliaries   which of them are auxiliaries, by index
    networks      (len(peers),) see `Group`
    rest          hash of the rest of the group
    digest        of the result
    votes         member's index → its signature of a vote for the digest
    """

    tag: Annotated[bytes, msgspec.Meta(max_length=MAX_TAG_BYTES)]
    nonce: Annotated[bytes, msgspec.Meta(min_length=NONCE_BYTES, max_length=NONCE_BYTES)]
    peers: Annotated[tuple[PeerID, ...], msgspec.Meta(min_length=1, max_length=MAX_MEMBERS)]
    auxiliaries: Indices
    networks: Annotated[tuple[_Network, ...], msgspec.Meta(max_length=MAX_MEMBERS)]
    rest: Hash
    trust: Trust
    digest: Hash
    votes: Signatures

    @classmethod
    def of(cls, group: Group, trust: Trust, digest: bytes, votes: Mapping[int, bytes]) -> RoundCertificate:
        peers = tuple(member.peer_id for member in group.members)
        who = peers, tuple(sorted(group.auxiliaries)), group.networks
        return cls(group.tag, group.nonce, *who, group.rest, trust, digest, dict(sorted(votes.items())))

    @property
    def signers(self) -> frozenset[PeerID]:
        """Those who have voted, if the certificate verifies."""
        return frozenset(self.peers[index] for index in self.votes)

    @property
    def group_id(self) -> bytes:
        """32 bytes: the id of the round."""
        auxiliaries = frozenset(self.auxiliaries)
        return group_id_of(self.tag, self.nonce, self.peers, auxiliaries, self.networks, self.rest)

    def verify(self) -> bool:
        """Whether all fields fit together and enough voters have signed. It checks each signature."""
        auxiliaries, count = frozenset(self.auxiliaries), len(self.peers)
        if len(set(self.peers)) != count or len(self.networks) != count or any(index >= count for index in auxiliaries):
            return False
        quorum = Quorum(count, auxiliaries, self.trust, self.networks)
        if not self.votes.keys() <= quorum.voters or not quorum.decides(self.votes):
            return False
        group_id = self.group_id
        return all(verify(self.peers[i], "vote", signed, group_id, self.digest) for i, signed in self.votes.items())


# Whether this peer has itself met the member with this index: a leader may list a key that is no peer's.
Met: TypeAlias = Callable[[int], bool]
