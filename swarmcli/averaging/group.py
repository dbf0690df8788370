"""The group of one round: an ordered list of members, the same at all of them.

The leader draws it up and sends it to all members. The group id is a hash of everything in it, so members with the same
id agree on the members, their order, the shares of the work and what each gathers. It is a hash of hashes: a member can
show later who the members were without telling where they could be dialed.
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from functools import cached_property

from swarmcli.averaging.checks import MAX_BANDWIDTH
from swarmcli.averaging.seats import Bid
from swarmcli.network import wire
from swarmcli.network.addresses import bounded
from swarmcli.network.bounds import MAX_TAG_BYTES
from swarmcli.network.identity import SIGNATURE_BYTES, Identity, PeerID, verify
from swarmcli.network.prefix import prefix_of_address
from swarmcli.network.wire.messages import MOST

GROUP_ID_BYTES = 32
NONCE_BYTES = 16
MAX_SEARCH_BYTES = 32
MAX_MEMBERS = 4096
MAX_GATHERED_BYTES = 16 << 10  # of one member


class Dialable(IntEnum):
    """How others reach a peer; a greater value is a better way."""

    NEVER = 0  # it dials others, and is reached over the connections that it made
    OVER_RELAY = 1  # each byte also takes from the relay's rate
    DIRECTLY = 2

    @classmethod
    def of(cls, listening: bool, addresses: Sequence[str]) -> Dialable:
        if listening:
            return cls.DIRECTLY
        return cls.OVER_RELAY if addresses else cls.NEVER


@dataclass(frozen=True, slots=True)
class Member:
    """One peer of a group. Raises ValueError for values that no honest peer has."""

    peer_id: PeerID
    listening: bool = True  # others can dial it directly
    auxiliary: bool = False  # reduces for others and has no tensors of its own in the average
    bandwidth: float = 1.0  # relative to the other members; 0: reduces nothing
    addresses: tuple[str, ...] = ()  # where it can be dialed; at relays if it does not listen
    gathered: bytes = b""  # its `gather`, encoded
    search: bytes = b""  # id of the search with which it came: fresh, so that nobody can put it into an old group again
    ramp: float = math.inf  # its weight counts up to this many times the group's median, see `weights.py`
    bid: Bid = Bid()  # noqa: RUF009  # its word about its line, see `seats.py`
    standing: bool = False  # it says that it was in the round that led to this tag; such members lead in turn
    claim: float = 0.0  # progress towards the target of a preformed group, by its own word when the group began

    def __post_init__(self) -> None:
        if not 0 <= self.bandwidth <= MAX_BANDWIDTH:
            raise ValueError(f"a member's bandwidth must be 0 to {MAX_BANDWIDTH:g}, got {self.bandwidth}")
        if len(self.search) > MAX_SEARCH_BYTES:
            raise ValueError(f"the id of a search has at most {MAX_SEARCH_BYTES} bytes, got {len(self.search)}")
        if not self.ramp >= 1:  # otherwise a leader could let nothing of the others count
            raise ValueError(f"at least the median weight counts of a member, got {self.ramp} times that")
        if not 0 <= self.claim <= MOST:
            raise ValueError(f"a member's claim must be 0 to {MOST:g}, got {self.claim}")
        if len(self.gathered) > MAX_GATHERED_BYTES:
            raise ValueError(f"gathered data has {len(self.gathered)} bytes, the bound is {MAX_GATHERED_BYTES}")
        object.__setattr__(self, "addresses", bounded(self.addresses))

    @property
    def dialable(self) -> Dialable:
        return Dialable.of(self.listening, self.addresses)


def meeting(first: Member, second: Member) -> Dialable:
    """How one of the two reaches the other, which is the one that is easier to dial."""
    return max(first.dialable, second.dialable)


@dataclass(frozen=True)  # without slots, so that its id is computed once
class Group:
    """A group that has begun; its leader sends this to all members. Raises ValueError for what no honest leader sends.

    tag           lineage: only peers with equal tags meet in a group
    nonce         drawn for each group, so that no two rounds share an id
    members       the leader first, then by rank
    part_shares   (len(members),) each member's share of the reducing work, as `shares.py` computed it
    listed        its leader's signature for this list; not in the id
    """

    tag: bytes
    nonce: bytes
    members: tuple[Member, ...]
    part_shares: tuple[float, ...]
    listed: bytes = b""

    def __post_init__(self) -> None:
        if len(self.tag) > MAX_TAG_BYTES:
            raise ValueError(f"a group's tag has at most {MAX_TAG_BYTES} bytes, got {len(self.tag)}")
        if len(self.nonce) != NONCE_BYTES:
            raise ValueError(f"a group's nonce has {NONCE_BYTES} bytes, got {len(self.nonce)}")
        if not 1 <= len(self.members) <= MAX_MEMBERS:
            raise ValueError(f"a group has 1 to {MAX_MEMBERS} members, got {len(self.members)}")
        if len({member.peer_id for member in self.members}) != len(self.members):
            raise ValueError("a group names a member twice")
        if len(self.listed) > SIGNATURE_BYTES:
            raise ValueError(f"a signature has {SIGNATURE_BYTES} bytes, got {len(self.listed)}")
        if len(self.part_shares) != len(self.members):
            raise ValueError(f"{len(self.part_shares)} shares for {len(self.members)} members")
        # The plan divides by their sum.
        if not (all(share >= 0 for share in self.part_shares) and 0 < sum(self.part_shares) < math.inf):
            raise ValueError("shares of the work must be finite, not negative, and not all zero")

    @classmethod
    def form(cls, tag: bytes, members: Sequence[Member], part_shares: Sequence[float], nonce: bytes) -> Group:
        """Draws up a group; the first member is its leader."""
        return cls(tag, nonce, tuple(members), tuple(float(share) for share in part_shares))

    def signed(self, leader: Identity) -> Group:
        """Returns the same group with its leader's signature."""
        return replace(self, listed=leader.sign("list", self.members[0].search, self.group_id))

    def has_listed(self, group_id: bytes, signature: bytes) -> bool:
        """Whether its leader has signed a group of this id in the same search. An honest leader begins one in each."""
        return is_listed(self.leader, self.members[0].search, group_id, signature)

    @cached_property
    def group_id(self) -> bytes:
        """32 bytes: a hash of everything in it."""
        return group_id_of(
            self.tag,
            self.nonce,
            [member.peer_id for member in self.members],
            self.auxiliaries,
            self.networks,
            self.rest,
        )

    @cached_property
    def auxiliaries(self) -> frozenset[int]:
        """Members without tensors of their own in the average, by index."""
        return frozenset(index for index, member in enumerate(self.members) if member.auxiliary)

    @cached_property
    def networks(self) -> tuple[int, ...]:
        """(len(members),) the network of each member that listens, taken from its first address, as a number from 1; 0
        for a member that does not listen."""
        named = [
            prefix_of_address(member.addresses[0]) if member.listening and member.addresses else None
            for member in self.members
        ]
        numbers = {network: number for number, network in enumerate(dict.fromkeys(filter(None, named)), 1)}
        return tuple(0 if network is None else numbers[network] for network in named)

    @cached_property
    def rest(self) -> bytes:
        """32 bytes: a hash of all but the tag, the nonce, the members' ids, which are auxiliaries, and `networks`."""
        return hashlib.sha256(b"".join(_rest(self))).digest()

    @cached_property
    def bids(self) -> dict[PeerID, Bid]:
        """The members' words about their lines."""
        return {member.peer_id: member.bid for member in self.members}

    @cached_property
    def claims(self) -> dict[PeerID, float]:
        """Member → the progress that it claims."""
        return {member.peer_id: member.claim for member in self.members}

    def derived(self, purpose: str) -> Group:
        """Returns the same members and shares under another id, which each member computes by itself."""
        derived = replace(self, nonce=derived_nonce(self.group_id, purpose))
        # These take long to compute in a large group and are the same here: their caches are filled.
        derived.__dict__.update(
            rest=self.rest, auxiliaries=self.auxiliaries, networks=self.networks, _positions=self._positions
        )
        return derived

    @property
    def leader(self) -> PeerID:
        return self.members[0].peer_id

    @cached_property
    def _positions(self) -> dict[PeerID, int]:
        return {member.peer_id: position for position, member in enumerate(self.members)}

    def index_of(self, peer: PeerID) -> int:
        """The peer's position in `members`. Raises KeyError for a stranger."""
        return self._positions[peer]

    def __contains__(self, peer: object) -> bool:
        return peer in self._positions

    def __len__(self) -> int:
        return len(self.members)


def is_listed(leader: PeerID, search: bytes, group_id: bytes, signature: bytes) -> bool:
    """Whether this leader has signed a group of this id in this `search` of its own."""
    return verify(leader, "list", signature, search, group_id)


def group_id_of(
    tag: bytes,
    nonce: bytes,
    peers: Sequence[bytes],
    auxiliaries: Collection[int],
    networks: Sequence[int],
    rest: bytes,
) -> bytes:
    """The id of a group from its members, their networks (which weigh their votes), and a hash of all the rest."""
    roles = bytes(index in auxiliaries for index in range(len(peers))) + struct.pack(f">{len(networks)}H", *networks)
    members = hashlib.sha256(b"swarm group members" + b"".join(peers) + roles).digest()
    return hashlib.sha256(b"swarm group 6" + _counted(tag) + nonce + members + rest).digest()


def derived_nonce(group_id: bytes, purpose: str) -> bytes:
    """The nonce of the group that is derived for this purpose, see `Group.derived`."""
    return hashlib.sha256(b"swarm derived group" + group_id + purpose.encode()).digest()[:NONCE_BYTES]


def _rest(group: Group) -> Iterator[bytes]:
    """Yields the fields; one of variable length comes after its length, so that no two groups yield the same bytes."""
    yield b"swarm group rest"
    yield struct.pack(">Q", len(group.members))
    for member, share in zip(group.members, group.part_shares, strict=True):
        yield struct.pack(">?dddd", member.listening, member.bandwidth, member.ramp, member.claim, share)
        yield struct.pack(">Q", len(member.addresses))
        yield from (_counted(address.encode()) for address in member.addresses)
        yield _counted(member.gathered)
        yield _counted(member.search)
        yield _counted(wire.encode((member.bid, member.standing)))


def _counted(data: bytes) -> bytes:
    return struct.pack(">Q", len(data)) + data
