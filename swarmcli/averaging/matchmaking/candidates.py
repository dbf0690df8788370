"""Whom a peer that looks for a group knows of, in the order in which they would lead. No input or output here.

A peer declares itself in its bucket as long as it has an averager, whether it looks for a group or not. While it looks
it is a *candidate*; between its searches it *holds* the bucket, and may look again. Times are those of the loop.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby, islice

from swarmcli.averaging.config import MatchmakingOptions
from swarmcli.averaging.matchmaking.messages import LIFETIME, Candidate, Rank, rank_of, search_id
from swarmcli.errors import FingerprintError
from swarmcli.network.identity import PeerID
from swarmcli.recent import Recent

MIN_SETTLE = 0.015  # seconds of quiet after which peers that start together have met …
SETTLE_FACTOR = 3.0  # … and at least so many times as long as it took to declare and read
SETTLING_SHARE = 0.25  # of min_matchmaking_time goes by at most, while others keep coming, before anybody is asked
MIN_HEDGE = 0.1  # seconds without an answer after which the next in rank is asked as well …
HEDGE = 1 / 6  # … and the part of request_timeout that this is at most
MAX_CANDIDATES = 4096
MAX_BACKOFF = 5  # doublings of the time for which an unreachable candidate is passed over
MAX_MISSES = 2  # after so many waits in vain a peer is waited for only once it has been in a group with this one
MAX_INVITATIONS = 3  # to one search of one peer


class Memory:
    """What one averager remembers from search to search, of at most MAX_CANDIDATES peers.

    A peer that did not come within a full wait is not waited for again until it declares another search. One that
    declares searches and still stays away could repeat that for ever, hence MAX_MISSES.
    """

    def __init__(self, is_banned: Callable[[PeerID], bool] = lambda peer: False) -> None:
        """`is_banned`: whether nobody is to average with a peer."""
        self.is_banned = is_banned
        self.newcomer = True  # this peer has been in no group yet
        self.mates: frozenset[PeerID] = frozenset()  # who was in its last group, and is expected again for a while
        self.only_mates = False  # of the peers that look for no group now, only mates are waited for
        self.holders: dict[PeerID, Candidate] = {}  # the peers of the bucket, as they last declared themselves
        self._finished: Recent[PeerID, bytes] = Recent(MAX_CANDIDATES)  # peer → its last search known to have ended
        # peer → its search at that time, how often in a row
        self._missed: Recent[PeerID, tuple[bytes, int]] = Recent(MAX_CANDIDATES)

    def read(self, declared: Sequence[Candidate]) -> None:
        """The declarations of the bucket, complete: who is not among them has left."""
        welcome = (candidate for candidate in declared if not self.is_banned(candidate.peer_id))
        self.holders = {candidate.peer_id: candidate for candidate in islice(welcome, MAX_CANDIDATES)}

    def finish(self, peer: PeerID, search: bytes) -> None:
        """This search of that peer, and so all before it, has ended; what others still say about it is out of date."""
        self._finished[peer] = max(search, self._finished.get(peer, b""))

    def has_finished(self, candidate: Candidate) -> bool:
        """Whether this search of it, or a later one, has ended."""
        return candidate.search <= self._finished.get(candidate.peer_id, b"")

    def note_missed(self, peers: Iterable[PeerID]) -> None:
        """These were waited for in vain, or could not be reached."""
        for peer in peers:
            if self.waits_for(peer):
                _, times = self._missed.get(peer, (b"", 0))
                self._missed[peer] = (self._search_of(peer), times + 1)

    def note_present(self, peers: Iterable[PeerID]) -> None:
        """These are in a group with this peer."""
        for peer in peers:
            self._missed.pop(peer, None)

    def waits_for(self, peer: PeerID) -> bool:
        """Whether a group may be kept open for this peer."""
        search, times = self._missed.get(peer, (b"", 0))
        return times == 0 or (times < MAX_MISSES and self._search_of(peer) > search)

    def idle(self) -> set[PeerID]:
        """Holders that look for no group now and may be waited for."""
        idle = (each for each in self.holders.values() if not each.looking or self.has_finished(each))
        return {holder.peer_id for holder in idle if self.waits_for(holder.peer_id)}

    def _search_of(self, peer: PeerID) -> bytes:
        """The last one that is known. A mate may have come to the last group with a later one than this peer has read,
        since a follower reads no declarations."""
        holder = self.holders.get(peer)
        return max(holder.search if holder is not None else b"", self._finished.get(peer, b""))


@dataclass(slots=True)
class Entry:
    """What is known about one candidate's present search."""

    candidate: Candidate
    rank: Rank
    since: float  # when this search of it became known
    own_word: bool = True  # by itself, or by its declaration; otherwise somebody else says so
    expires: float = math.inf
    passed_until: float = 0.0  # until then it is passed over
    failures: int = 0  # how often it could not be reached
    follows: PeerID | None = None  # the leader that it named …
    follows_until: float = 0.0  # … and how long that is believed
    full_until: float = 0.0  # its group has no room, it said
    ask_at: float = 0.0  # it is not asked again before this time
    loyal_since: float = math.inf  # since when it is known to follow one that is lost
    invited_at: float = -math.inf
    invitations: int = 0
    coming_until: float = -math.inf  # it said that it would come

    @property
    def peer_id(self) -> PeerID:
        return self.candidate.peer_id

    def may_be_invited(self, now: float, pause: float) -> bool:
        again = now >= self.invited_at + pause and self.invitations < MAX_INVITATIONS
        return again and self.follows_until <= now

    def hoped_for_until(self, slack: float, patience: float) -> float:
        """How long a group stays open for it. The answer to an invitation is waited for `slack` seconds."""
        if self.invitations:
            # Whoever follows somebody else is brought along by him, or sent here.
            return max(self.coming_until, self.follows_until, self.invited_at + slack)
        return self.since + (patience if self.candidate.dialable else patience / 2)


class Candidates:
    """The candidates of one peer's bucket that it knows of, without itself."""

    def __init__(
        self,
        me: Candidate,
        memory: Memory,
        *,
        only_one: bool = False,
        since: float | None = None,
        shunned: Collection[PeerID] = (),
        queue: Sequence[PeerID] = (),
    ) -> None:
        """`only_one`: there is one round of its tag for all, see `outweigh`; who began another search after `since`
        (swarm time; None: after this one) has had it. `shunned`: who is no candidate. `queue`: see `rank_of`."""
        self.entries: dict[PeerID, Entry] = {}
        self.elsewhere: set[PeerID] = set()  # who has begun without this peer, where there is one round for all
        self._only_one, self._queue = only_one, queue
        self._since = me.search if since is None else min(me.search, search_id(since, bytes(8)))
        self.shunned = frozenset(shunned)
        self._me = me
        self._memory = memory

    def learn(self, candidate: Candidate, now: float, *, direct: bool = False) -> bool:
        """Takes in what the candidate itself (`direct`) or somebody else says. Returns whether that was new.

        Whoever speaks for himself is no longer passed over.
        """
        peer = candidate.peer_id
        own_word = direct or self._memory.holders.get(peer) == candidate
        if self._only_one and own_word and candidate.tag != self._me.tag and candidate.search > self._since:
            self.elsewhere.add(peer)
        if candidate.bucket != self._me.bucket or not candidate.looking or peer == self._me.peer_id:
            return False
        if peer in self.shunned or self._memory.is_banned(peer):
            return False
        known = self.entries.get(peer)
        hearsay = known is not None and own_word and not known.own_word  # what was known
        if known is not None and known.candidate.search == candidate.search and not hearsay:
            known.expires = max(known.expires, now + LIFETIME)
            if direct:
                self.heard(peer)
            return False
        later = known is None or hearsay or candidate.search > known.candidate.search
        if known is not None and known.own_word and not own_word:
            later = False  # or anybody could say of it that it cannot be dialed, in a search that never was
        outdated = not later or self._memory.has_finished(candidate)
        if (outdated and not direct) or (known is None and len(self.entries) >= MAX_CANDIDATES):
            return False
        self.entries[peer] = Entry(candidate, self.rank(candidate), now, own_word, now + LIFETIME)
        self.elsewhere.discard(peer)  # it is back, so its round has failed
        return True

    def rank(self, candidate: Candidate) -> Rank:
        """By which it leads, see `rank_of`."""
        return rank_of(candidate, self._queue)

    def shun(self, peer: PeerID) -> None:
        """This peer is no candidate any more."""
        self.shunned |= {peer}
        self.entries.pop(peer, None)

    def finish(self, peer: PeerID) -> None:
        """The search of this peer that is known has ended: it is no candidate until it declares a later one."""
        entry = self.entries.pop(peer, None)
        if entry is not None and entry.own_word:  # others may name a search to come: no later one would count then
            self._memory.finish(peer, entry.candidate.search)

    def note_begun(self, peer: PeerID, gone: Sequence[PeerID], until: float) -> None:
        """A group has begun with this peer and those who are `gone`; they are passed over meanwhile."""
        told = self._me.peer_id not in gone
        if not self._only_one:
            self.finish(peer)
        elif told:
            # Mates count if they are known, or anybody could be named.
            self.elsewhere |= {peer, *(mate for mate in gone if mate in self.entries)}
        self.pass_over([peer], until)  # where there is one round, it is asked again then: its round may have failed
        # If this peer is among those who are gone, the leader was lost before it had told everyone, and those who have
        # not heard either are whom to look for now.
        if told:
            self.pass_over(gone, until)

    def outweigh(self, followers: Collection[PeerID]) -> bool:
        """Whether at least as many as this peer and its followers have begun without them.

        Where there is one round for all, two groups of one tag that both begin would be two averages, and separate
        their members for good. So a group that would be no larger than what has begun already gives up, and its
        members ask those others how it ended. A smaller round does not stop this peer's group: its members will have
        to come here, whatever they make of it; and few that merely say that they have begun cannot hold up many. Where
        it is known who was in the round that led here, these count alone: keys that say so cost nothing.
        """
        begun = self.elsewhere.intersection(self._queue) if self._queue else self.elsewhere
        return len(begun.difference(followers)) >= 1 + len(followers)

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


@dataclass(frozen=True, slots=True)
class Plan:
    """Who should lead and who should follow whom, as far as one peer knows."""

    leaders: list[PeerID]  # by rank
    leader_of: dict[PeerID, PeerID]  # of each follower
    crowded: bool  # there is more than one group
    rest: bool = False  # the last group is not full, and waits for those who are still to come

    @property
    def usual_size(self) -> float:
        """Members of a group, with its leader."""
        return (len(self.leaders) + len(self.leader_of)) / max(1, len(self.leaders))

    def nearest(self, peer: PeerID) -> list[PeerID]:
        """The leaders in the order in which this peer should ask them: its own, then those of the chunks before it."""
        own = peer if peer in self.leaders else self.leader_of.get(peer)
        if own is None:
            return list(self.leaders)
        start = self.leaders.index(own)
        return self.leaders[start::-1] + self.leaders[start + 1 :]


def make_plan(
    ranked: Sequence[Entry],
    options: MatchmakingOptions,
    now: float,
    connected: Callable[[PeerID], bool] = lambda peer: False,
    coming: float = 0,
) -> Plan:
    """The candidates in order of rank, cut into chunks of even size, each led by its first.

    Peers that can be dialed directly, over relays and not at all are cut apart and each chunk gets its share of all
    three, since a group needs some who reduce. Everyone with the same knowledge asks the right leader at once, without
    a herd of refusals; where knowledge differs by a few peers, the ends of the chunks move by as few positions, and a
    follower that asks the wrong leader asks the next one. Whoever is known to follow somebody else leads nobody. Where
    nobody can be dialed, those who are `connected` lead each other.

    Where a remainder and those who may still be `coming` would fill a group, it is not shared: whoever has searched the
    longest is in a full group, which begins at once, and the others wait together. So whoever is left over has a seat
    in the next group.
    """
    can_lead = [entry for entry in ranked if entry.candidate.dialable]
    if not can_lead and any(connected(entry.peer_id) for entry in ranked):
        can_lead = list(ranked)
    able = {entry.peer_id for entry in can_lead if entry.follows_until <= now}
    size = options.target_group_size
    chunks, rest = _cut(ranked, count_groups(len(ranked), len(able), size, options.min_group_size)), False
    if size is not None and len(ranked) > size and size - len(ranked) % size <= min(coming, size - 1):
        full = len(ranked) // size
        last = sorted(entry.candidate.search for entry in ranked)[full * size - 1]
        oldest = [entry for entry in ranked if entry.candidate.search <= last]
        if rest := sum(entry.peer_id in able for entry in oldest) >= full:
            chunks = [*_cut(oldest, full), [entry.peer_id for entry in ranked if entry.candidate.search > last]]
    leaders: list[PeerID] = []
    leader_of: dict[PeerID, PeerID] = {}
    for chunk in chunks:
        leader = next((peer for peer in chunk if peer in able), None)
        if leader is not None:
            leaders.append(leader)
        elif leaders:
            leader = leaders[-1]  # all of this chunk are on their way elsewhere
        else:
            continue
        leader_of.update((peer, leader) for peer in chunk if peer != leader)
    return Plan(leaders, leader_of, crowded=len(chunks) > 1, rest=rest)


def count_groups(candidates: int, able: int, target_size: int | None, minimum_size: int) -> int:
    """Into how many groups so many candidates divide: none too large, none too small, each with one who is `able` to
    lead.

    With few of these or an awkward remainder some candidates stay without a group.
    """
    if target_size is None or candidates <= target_size:
        return 1
    return max(1, min(math.ceil(candidates / target_size), candidates // minimum_size, able))


def _cut(ranked: Sequence[Entry], groups: int) -> list[list[PeerID]]:
    """Chunks of the candidates: even in size, and even in those who can be dialed directly, or at all."""
    chunks: list[list[PeerID]] = [[] for _ in range(groups)]
    dealt = 0
    for _, alike in groupby(ranked, key=lambda entry: entry.candidate.dialable):
        peers = [entry.peer_id for entry in alike]
        dealt += len(peers)
        hand = iter(peers)
        for chunk, size in zip(chunks, _even(dealt, groups), strict=True):
            chunk.extend(islice(hand, size - len(chunk)))
    return chunks


def _even(total: int, parts: int) -> list[int]:
    """`total` in so many parts that differ by at most one, the larger ones first."""
    least, more = divmod(total, parts)
    return [least + (part < more) for part in range(parts)]


class Settling:
    """How long ago the last news of other candidates came, measured by how long it takes to declare and to read.

    Where several groups may form, those who start together first hear of each other, so that all of them
    divide everyone in the same way: nobody is asked before a reading has brought nothing new for a while.
    """

    def __init__(self, options: MatchmakingOptions, now: float) -> None:
        self.quiet = MIN_SETTLE  # seconds without news after which things have settled
        self._options = options
        self._crowd = options.target_group_size is not None  # several groups may form
        self._first_read = math.inf
        self._last_read = -math.inf
        self._news_at = now
        self._calm = False  # the last reading brought nothing new

    def news(self, now: float) -> None:
        self._news_at = now

    def on_read(self, now: float, duration: float, *, crowd: bool) -> None:
        """The declarations were read; it took `duration` seconds to declare and read. `crowd`: they are more than fit
        into one group."""
        self._crowd = crowd
        self._calm = self._first_read < math.inf and self._news_at <= self._last_read
        self._last_read = now
        if self._first_read == math.inf:
            self._first_read = self._news_at = now
            # Two that start together learn of each other within the time that the slower takes for this.
            self.quiet = max(MIN_SETTLE, SETTLE_FACTOR * duration)

    @property
    def trip(self) -> float:
        """Seconds that it takes to declare and to read."""
        return self.quiet / SETTLE_FACTOR

    @property
    def calm(self) -> bool:
        """Whether no more readings are needed before anybody is asked."""
        return self._calm or not self._crowd

    @property
    def hedge(self) -> float:
        """Seconds after which an answer is late: a few round trips, as the first reading has measured them."""
        return min(HEDGE * self._options.request_timeout, max(MIN_HEDGE, self.quiet))

    @property
    def ready_at(self) -> float:
        """When to ask and to invite."""
        if not self._crowd:
            return -math.inf
        if self._calm:
            return self._news_at + self.quiet
        return self._first_read + SETTLING_SHARE * self._options.min_matchmaking_time

    @property
    def settled_at(self) -> float:
        """When everyone who is there can have been heard of, if nothing new happens; infinite before a reading."""
        if self._first_read == math.inf:
            return math.inf
        return max(self._news_at + self.quiet, self.ready_at)


class Conflicts:
    """Peers that look for the same group with other terms."""

    def __init__(self) -> None:
        self.agreed = False  # somebody with this peer's terms has answered it: whoever differs is not the run
        self._found: dict[PeerID, tuple[tuple[str, ...], float]] = {}

    def note(self, peer: PeerID, keys: tuple[str, ...], since: float) -> bool:
        """The terms of a peer that came up at swarm time `since` differ under `keys`. Returns whether that is new."""
        new = peer not in self._found
        known = self._found.get(peer, (keys, math.inf))
        self._found[peer] = (tuple(sorted(keys)), min(since, known[1]))
        return new

    def cover(self, others: Iterable[Entry]) -> bool:
        """Whether all of these follow somebody whose terms differ, so that none is left to form a group with."""
        return all(entry.follows in self._found for entry in others)

    def error(self, since: float, enough: int) -> FingerprintError | None:
        """The error if so many of these peers name the same keys and came up before `since`, and nobody agrees with
        this one: then they are the run, not we."""
        elders: dict[tuple[str, ...], list[PeerID]] = {}
        for peer, (keys, theirs) in self._found.items():
            if theirs < since and not self.agreed:
                elders.setdefault(keys, []).append(peer)
        keys, peers = max(elders.items(), key=lambda item: len(item[1]), default=((), []))
        if len(peers) < enough:
            return None
        names = ", ".join(peer.short for peer in peers)
        return FingerprintError(f"refused by {names}: what must agree differs in {', '.join(keys)}", keys)
