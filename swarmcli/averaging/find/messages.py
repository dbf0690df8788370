"""The messages between peers that look for a group. Bounds are checked while decoding.

follower                                     leader
   │── Join ────────────────────────────────▶│  the call stays open; a follower that hangs up leaves
   │── Beat: so much done ──────────────────▶│  again and again, to a leader that waits
   │◀─ Pulse: I am here, with so many ───────│
   │◀─ Answer: the group, or whom to ask ────│  ends the call
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeAlias

import msgspec

from swarmcli.averaging.checks import MAX_BANDWIDTH
from swarmcli.averaging.config import check_group_bits, check_terms
from swarmcli.averaging.group import MAX_GATHERED_BYTES, MAX_MEMBERS, Dialable, Member
from swarmcli.averaging.seats import NOISE, Bid
from swarmcli.network.addresses import bounded
from swarmcli.network.bounds import MAX_TAG_BYTES
from swarmcli.network.identity import PeerID
from swarmcli.network.wire.messages import Amount, Moment

SEARCH_BYTES = 16
MAX_GONE = 64  # most members that an answer names of a group that is full or has begun
MAX_REASON = 500  # characters

Rank: TypeAlias = tuple[bool, int, int, bytes]
Bucket: TypeAlias = tuple[bytes, str]  # tag and group bits
Bandwidth = Annotated[float, msgspec.Meta(ge=0, le=MAX_BANDWIDTH)]
Verdict: TypeAlias = Literal["begins", "ask", "lead", "full", "begun", "cannot_lead", "terms"]


@dataclass(frozen=True, slots=True)
class Candidate:
    """A peer as it declares itself. Raises ValueError for values that no honest peer declares."""

    peer_id: PeerID
    search: bytes  # its last search: 8 bytes of swarm time (so that later ones are greater) and 8 drawn at random
    tag: bytes
    listening: bool  # it can be dialed directly
    addresses: tuple[str, ...] = ()  # at relays if it does not listen
    bits: str = ""  # peers of unlike group bits, or of unlike tags, never share a group
    looking: bool = True  # False: its last search has ended, or it has not begun one
    standing: bool = False  # it says that it was in the round that led to this tag

    def __post_init__(self) -> None:
        if len(self.search) != SEARCH_BYTES or len(self.tag) > MAX_TAG_BYTES:
            raise ValueError(f"a search has {SEARCH_BYTES} bytes and a tag at most {MAX_TAG_BYTES}")
        object.__setattr__(self, "addresses", bounded(self.addresses))
        check_group_bits(self.bits)

    @property
    def bucket(self) -> Bucket:
        return self.tag, self.bits

    @property
    def dialable(self) -> Dialable:
        return Dialable.of(self.listening, self.addresses)


def search_id(now: float, noise: bytes) -> bytes:
    """The id of a search that begins at swarm time `now`; `noise` is 8 random bytes."""
    return int(max(now, 0.0) * 1e6).to_bytes(8, "big") + noise


def rank_of(candidate: Candidate, queue: Sequence[PeerID] = ()) -> Rank:
    """Smaller ranks lead.

    `queue`: the members of the round that led to this tag, in the order in which they lead the next one; () if this
    peer was not among them. They lead in turn, so nothing that a peer chooses brings its turn nearer, and they rank
    before newcomers. Among the others those that can be dialed directly rank before those that are reached over relays,
    and those that have looked for longer before those that come later. A peer that cannot be dialed ranks last, since a
    leader has to be reachable.
    """
    place = place_in(queue, candidate.peer_id, candidate.standing)
    return (not candidate.dialable, place, -candidate.dialable, candidate.search)


def place_in(queue: Sequence[PeerID], peer: PeerID, standing: bool) -> int:
    """A peer's place in the queue. `standing`: it says that it was in that round. Whoever was not there believes it;
    whoever was there knows."""
    if not standing or (queue and peer not in queue):
        return MAX_MEMBERS
    return queue.index(peer) if queue else 0


class Offer(msgspec.Struct, frozen=True):
    """What a peer offers to a group, and the data that it gathers."""

    bandwidth: Bandwidth | None = None  # relative, as its user gave it
    measured: Bandwidth | None = None  # bytes per second, from past rounds
    auxiliary: bool = False
    gathered: Annotated[bytes, msgspec.Meta(max_length=MAX_GATHERED_BYTES)] = b""
    bid: Bid = Bid()


class Join(msgspec.Struct, frozen=True):
    """To a peer that ranks before the sender: "may I follow you?" To one after it: "I am here, and lead." """

    candidate: Candidate
    offer: Offer
    terms: dict[str, str]  # the sender's
    since: Moment  # swarm time at which the sender came up
    patience: Amount = 0.0  # seconds that it would still wait for a group that is not complete
    progress: Amount = 0.0  # see Beat

    def __post_init__(self) -> None:
        check_terms(self.terms)

    def member(self, bandwidth: float, ramp: float, claim: float) -> Member:
        """The sender's entry in a group's list: what it offers, and these three that the leader adds."""
        who, offer = self.candidate, self.offer
        reach, brought = (who.listening, offer.auxiliary, bandwidth, who.addresses), (offer.gathered, who.search)
        return Member(who.peer_id, *reach, *brought, ramp, offer.bid, who.standing, claim)

    def is_outdated(self, me: Candidate, bid: Bid) -> bool:
        """Whether the sender, which would now say `me` and `bid`, has other addresses, or another line, than it
        said."""
        said, now = self.offer.bid.seconds, bid.seconds
        moved = max(said, now) > NOISE and not 0.5 < (now or 1e-9) / (said or 1e-9) < 2.0
        return moved or set(me.addresses) != set(self.candidate.addresses)


class Answer(msgspec.Struct, frozen=True):
    """Ends the call of a Join.

    begins        the group of the answerer begins, with the sender
    ask           the answerer follows `to`, or asks it at the moment
    lead          the sender ranks before the answerer, which asks it
    full          the answerer's group has no room; the members that are `gone` are in it
    begun         the answerer's group has begun without the sender, with the members that are `gone`
    cannot_lead   the answerer cannot be dialed, not even over a relay, and leads no peer
    terms         the two peers' terms differ under `keys`; the answerer came up at swarm time `since`
    """

    verdict: Verdict
    to: Candidate | None = None
    group: msgspec.Raw = msgspec.Raw(b"\xc0")  # a Group, encoded once for all members; else nil
    keys: tuple[str, ...] = ()
    since: Moment = 0.0
    gone: Annotated[tuple[PeerID, ...], msgspec.Meta(max_length=MAX_GONE)] = ()


class Beat(msgspec.Struct, frozen=True):
    """From a follower to its leader: how much it has done so far (cumulative) towards the group's target."""

    search: bytes  # the follower's
    progress: Amount


class Pulse(msgspec.Struct, frozen=True):
    """The answer to a Beat: the leader is there."""

    members: Annotated[int, msgspec.Meta(ge=0, le=MAX_MEMBERS)] = 0  # in its group so far; 0: the sender is not in it
    unreduced: Annotated[str, msgspec.Meta(max_length=MAX_REASON)] = ""  # why it cannot begin: no member could reduce


METHODS: dict[type, tuple[str, type]] = {Join: ("join", Answer), Beat: ("beat", Pulse)}


def method_name(prefix: str, message: type[Any]) -> str:
    """The name carries the prefix, since averagers of several prefixes share an endpoint."""
    return f"find/{METHODS[message][0]}/{prefix}"


def differing_terms(ours: Mapping[str, str], theirs: Mapping[str, str]) -> tuple[str, ...]:
    """The keys under which two peers' terms differ, or which only one of them has, sorted."""
    return tuple(sorted(key for key in ours.keys() | theirs.keys() if ours.get(key) != theirs.get(key)))
