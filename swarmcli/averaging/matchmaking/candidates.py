"""Whom a peer that looks for a group knows of, in the order in which they would lead. No input or output here.

A peer declares itself in its bucket as long as it has an averager, whether it looks for a group or not. While it looks
it is a *candidate*; between its searches it *holds* the bucket, and may look again. A candidate's rank comes from a
hash over its id, its tag and the number of its search, so leadership falls to another peer in every round; peers that
nobody can dial rank behind all others, since a leader has to be reachable. Requests to join only go up the ranks, so
they cannot run in a circle.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

from swarmcli.averaging.config import check_group_bits
from swarmcli.network.addresses import check_addresses
from swarmcli.network.identity import PeerID
from swarmcli.network.limits import MAX_TAG_BYTES

LIFETIME = 60.0  # seconds that a declaration is believed unless it is heard again
SEARCH_BYTES = 16
MAX_CANDIDATES = 4096
MAX_BACKOFF = 5  # doublings of the time for which an unreachable candidate is passed over

Rank: TypeAlias = tuple[bool, bytes]
Bucket: TypeAlias = tuple[bytes, str]  # tag and group bits


class GroupSizes(Protocol):
    """How large groups may be; the options of the matchmaking are such."""

    @property
    def target_group_size(self) -> int | None: ...

    @property
    def min_group_size(self) -> int: ...


@dataclass(frozen=True, slots=True)
class Candidate:
    """A peer as it declares itself. Raises ValueError for what no honest peer declares."""

    peer_id: PeerID
    search: bytes  # its last search: 8 bytes of swarm time (so that later ones are greater) and 8 drawn at random
    tag: bytes
    listening: bool
    addresses: tuple[str, ...] = ()
    bits: str = ""  # peers of unlike group bits, or of unlike tags, never share a group
    looking: bool = True  # False: its last search has ended, or it has not begun one

    def __post_init__(self) -> None:
        if len(self.search) != SEARCH_BYTES or len(self.tag) > MAX_TAG_BYTES:
            raise ValueError(f"a search has {SEARCH_BYTES} bytes and a tag at most {MAX_TAG_BYTES}")
        check_addresses(self.addresses)
        check_group_bits(self.bits)

    @property
    def bucket(self) -> Bucket:
        return self.tag, self.bits


def search_id(now: float, noise: bytes) -> bytes:
    """The id of a search that begins at swarm time `now`; `noise` is 8 random bytes."""
    return int(max(now, 0.0) * 1e6).to_bytes(8, "big") + noise


def rank_of(candidate: Candidate) -> Rank:
    """Smaller ranks lead."""
    digest = hashlib.sha256(b"swarm rank 1" + candidate.search + candidate.peer_id + candidate.tag).digest()
    return (not candidate.listening, digest)


@dataclass(slots=True)
class Entry:
    """What is known about one candidate's present search."""

    candidate: Candidate
    rank: Rank
    since: float  # loop time at which this search of it became known
    expires: float
    passed_until: float = 0.0  # until then it is passed over
    follows: PeerID | None = None  # the leader that it named …
    follows_until: float = 0.0  # … and how long that is believed
    failures: int = 0  # how often it could not be reached
    invited_at: float = -math.inf
    invitations: int = 0
    coming_until: float = -math.inf  # it said that it would come

    @property
    def peer_id(self) -> PeerID:
        return self.candidate.peer_id


@dataclass(slots=True)
class Roll:
    """The candidates of one bucket that one peer knows of, without itself.

    `finished` holds, for each peer, the search of it that has ended; what others say about it is then out of date.
    """

    bucket: Bucket
    own_id: PeerID
    finished: dict[PeerID, bytes] = field(default_factory=dict)
    entries: dict[PeerID, Entry] = field(default_factory=dict)

    def learn(self, candidate: Candidate, now: float, lifetime: float, *, direct: bool = False) -> bool:
        """Takes in what the candidate itself (`direct`) or somebody else says. Returns whether that was new.

        Whoever speaks for himself is no longer passed over.
        """
        peer = candidate.peer_id
        if candidate.bucket != self.bucket or not candidate.looking or peer == self.own_id:
            return False
        known = self.entries.get(peer)
        if known is not None and known.candidate.search == candidate.search:
            known.expires = max(known.expires, now + lifetime)
            if direct:
                self.heard(peer)
            return False
        if not direct and self._is_old(candidate, known):
            return False
        if known is None and len(self.entries) >= MAX_CANDIDATES:
            return False
        self.entries[peer] = Entry(candidate, rank_of(candidate), since=now, expires=now + lifetime)
        return True

    def _is_old(self, candidate: Candidate, known: Entry | None) -> bool:
        ended = self.finished.get(candidate.peer_id, b"")
        return candidate.search <= max(ended, known.candidate.search if known else b"")

    def finish(self, peer: PeerID) -> None:
        """The search of this peer that is known has ended: it is no candidate until it declares a later one."""
        entry = self.entries.pop(peer, None)
        if entry is not None:
            remember_finished(self.finished, [entry.candidate])

    def pass_over(self, peers: Iterable[PeerID], until: float) -> None:
        """Leaves these peers aside for a while, unless they begin another search."""
        for entry in (self.entries[peer] for peer in peers if peer in self.entries):
            entry.passed_until = max(entry.passed_until, until)

    def fail(self, peer: PeerID, now: float, pause: float) -> None:
        """This peer could not be reached: it is passed over for `pause` seconds, and longer every further time.
        Those who were said to follow it have to find somebody else."""
        entry = self.entries.get(peer)
        if entry is not None:
            self.pass_over([peer], now + pause * 2**entry.failures)
            entry.failures = min(entry.failures + 1, MAX_BACKOFF)
        for other in self.entries.values():
            if other.follows == peer:
                other.follows_until = now

    def heard(self, peer: PeerID) -> None:
        """This peer has spoken, so it can be reached."""
        entry = self.entries.get(peer)
        if entry is not None:
            entry.passed_until, entry.failures = 0.0, 0

    def is_out_of_reach(self, peer: PeerID, now: float) -> bool:
        """Whether this peer was lost here, and has not been heard since."""
        entry = self.entries.get(peer)
        return entry is not None and entry.failures > 0 and entry.passed_until > now

    def names_leader(self, peer: PeerID, leader: PeerID, until: float) -> None:
        """This peer follows another one, or itself. Whoever is followed leads, whatever was said of him before."""
        entry = self.entries.get(peer)
        if entry is not None:
            entry.follows, entry.follows_until = leader, until if leader != peer else 0.0
        if leader in self.entries:
            self.entries[leader].follows_until = 0.0

    def drop_expired(self, now: float) -> None:
        for peer in [peer for peer, entry in self.entries.items() if entry.expires <= now]:
            del self.entries[peer]

    def present(self, now: float) -> list[Entry]:
        """Everyone who is not passed over at the moment, by rank."""
        there = [entry for entry in self.entries.values() if entry.passed_until <= now < entry.expires]
        return sorted(there, key=lambda entry: entry.rank)

    def next_change(self, now: float) -> float:
        """When, by the mere passing of time, `present` would next differ."""
        times = [entry.passed_until for entry in self.entries.values() if entry.passed_until > now]
        return min(times, default=math.inf)


def count_groups(candidates: int, listening: int, target_size: int | None, minimum_size: int) -> int:
    """Into how many groups so many candidates divide: none too large, none too small, each with a listening leader.

    With few listening peers or an awkward remainder some candidates stay without a group.
    """
    if target_size is None or candidates <= target_size:
        return 1
    return max(1, min(math.ceil(candidates / target_size), candidates // minimum_size, listening))


@dataclass(frozen=True, slots=True)
class Plan:
    """Who should lead and who should follow whom, as far as one peer knows."""

    leaders: list[PeerID]  # by rank
    dealt: dict[PeerID, PeerID]  # follower → leader
    crowded: bool  # there is more than one group

    @property
    def usual_size(self) -> float:
        """Members of a group, with its leader."""
        return (len(self.leaders) + len(self.dealt)) / max(1, len(self.leaders))

    def nearest(self, peer: PeerID) -> list[PeerID]:
        """The leaders in the order in which this peer should ask them: its own, then those of the chunks before it."""
        own = peer if peer in self.leaders else self.dealt.get(peer)
        if own is None:
            return list(self.leaders)
        start = self.leaders.index(own)
        return self.leaders[start::-1] + self.leaders[start + 1 :]


def make_plan(
    me: Candidate | None, own_rank: Rank | None, others: Sequence[Entry], sizes: GroupSizes, now: float
) -> Plan:
    """The candidates in order of rank, cut into chunks of even size, each led by its first. `others` come by rank.

    Listening peers and the others are cut apart and each chunk gets its share of both, since a group needs some who
    reduce. Everyone with the same knowledge asks the right leader at once, without a herd of refusals; where
    knowledge differs by a few peers, the ends of the chunks move by as few places, and a follower at a wrong door is
    sent next door. Whoever is known to follow somebody else leads nobody.
    """
    ranked = [(entry.rank, entry.candidate, entry.follows_until <= now) for entry in others]
    if me is not None and own_rank is not None:
        ranked = sorted([*ranked, (own_rank, me, True)], key=lambda item: item[0])
    able = {candidate.peer_id for _, candidate, free in ranked if candidate.listening and free}
    groups = count_groups(len(ranked), len(able), sizes.target_group_size, sizes.min_group_size)
    chunks = _cut([(candidate.peer_id, candidate.listening) for _, candidate, _ in ranked], groups)
    leaders: list[PeerID] = []
    dealt: dict[PeerID, PeerID] = {}
    for chunk in chunks:
        leader = next((peer for peer in chunk if peer in able), None)
        if leader is None and leaders:
            leader = leaders[-1]  # all of this chunk are on their way elsewhere
        if leader is None:
            continue
        if leader in chunk:
            leaders.append(leader)
        dealt.update((peer, leader) for peer in chunk if peer != leader)
    return Plan(leaders, dealt, crowded=groups > 1)


def _cut(ranked: Sequence[tuple[PeerID, bool]], groups: int) -> list[list[PeerID]]:
    """Chunks of candidates given with whether they listen: even in size, and even in listening members."""
    listening = [peer for peer, listens in ranked if listens]
    clients = [peer for peer, listens in ranked if not listens]
    chunks: list[list[PeerID]] = []
    first, second = 0, 0
    for size, share in zip(_even(len(ranked), groups), _even(len(listening), groups), strict=True):
        chunks.append(listening[first : first + share] + clients[second : second + size - share])
        first, second = first + share, second + size - share
    return chunks


def _even(total: int, parts: int) -> list[int]:
    """`total` in so many parts that differ by at most one, the larger ones first."""
    least, more = divmod(total, parts)
    return [least + (part < more) for part in range(parts)]


def leader_of_the_rest(
    roll: Roll, here: Container[PeerID], sizes: GroupSizes, asker: PeerID, now: float
) -> Candidate | None:
    """Who should lead those for whom there is no room among the followers `here`; None if the asker itself."""
    rest = [entry for entry in roll.present(now) if entry.candidate.peer_id not in here]
    leader = make_plan(None, None, rest, sizes, now).dealt.get(asker)
    return roll.entries[leader].candidate if leader is not None else None


def why_nobody_leads(me: Candidate, others: Iterable[Entry], sizes: GroupSizes) -> str:
    """Why no group can come together, if it is that nobody who is there can be dialed; otherwise empty."""
    listening = [me.listening, *(entry.candidate.listening for entry in others)]
    if any(listening) or len(listening) < sizes.min_group_size:
        return ""
    there = f"none of {len(listening)} peers that look for a group can be dialed"
    return f"{there}, so nobody can reduce for the others"


def differing_terms(ours: Mapping[str, str], theirs: Mapping[str, str]) -> tuple[str, ...]:
    """The keys under which two fingerprints differ, or which only one of them has, sorted."""
    return tuple(sorted(key for key in ours.keys() | theirs.keys() if ours.get(key) != theirs.get(key)))


def remember_finished(finished: dict[PeerID, bytes], candidates: Iterable[Candidate], *, keep: int = 4096) -> None:
    """Notes that these searches have ended, and forgets the oldest notes beyond `keep`."""
    for candidate in candidates:
        finished.pop(candidate.peer_id, None)
        finished[candidate.peer_id] = candidate.search
    while len(finished) > keep:
        del finished[next(iter(finished))]
