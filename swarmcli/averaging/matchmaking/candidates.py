"""The peers that a searching peer knows of, in the order in which they would lead. No input or output here.

A peer declares itself in its bucket as long as it has an averager, whether it looks for a group or not. While it looks
it is a *candidate*; between its searches it *holds* the bucket, and may look again. Times are those of the loop.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby, islice

from swarmcli.averaging.config import MatchmakingOptions, SearchOptions
from swarmcli.averaging.matchmaking.messages import LIFETIME, Candidate, Rank, rank_of, search_id
from swarmcli.errors import FingerprintError
from swarmcli.network.identity import PeerID
from swarmcli.recent import Recent

MAX_CANDIDATES = 4096


class Memory:
    """One averager's memory from search to search, of at most MAX_CANDIDATES peers.

    A group does not wait again for a peer that did not come within a full wait, until that peer declares another
    search. A peer that declares searches and still stays away could repeat that for ever, hence `max_misses`.
    """

    def __init__(
        self,
        is_banned: Callable[[PeerID], bool] = lambda peer: False,
        options: SearchOptions = SearchOptions(),  # noqa: B008  # frozen
    ) -> None:
        """`is_banned`: whether a peer is banned from the run."""
        self.is_banned, self.options = is_banned, options
        self.newcomer = True  # this peer has been in no group yet
        self.mates: frozenset[PeerID] = frozenset()  # members of its last group, which it expects again for a while
        self.only_mates = False  # of the peers that look for no group now, only mates are waited for
        self.holders: dict[PeerID, Candidate] = {}  # the peers of the bucket, as they last declared themselves
        self._finished: Recent[PeerID, bytes] = Recent(MAX_CANDIDATES)  # peer → its last search known to have ended
        # peer → its search at that time, how often in a row
        self._missed: Recent[PeerID, tuple[bytes, int]] = Recent(MAX_CANDIDATES)

    def read(self, declared: Sequence[Candidate]) -> None:
        """The declarations of the bucket, complete: a holder that is not among them has left."""
        welcome = (candidate for candidate in declared if not self.is_banned(candidate.peer_id))
        self.holders = {candidate.peer_id: candidate for candidate in islice(welcome, MAX_CANDIDATES)}

    def finish(self, peer: PeerID, search: bytes) -> None:
        """This search of that peer, and so all before it, has ended; others' words about it are out of date."""
        self._finished[peer] = max(search, self._finished.get(peer, b""))

    def has_finished(self, candidate: Candidate) -> bool:
        """Whether this search of it, or a later one, has ended."""
        return candidate.search <= self._finished.get(candidate.peer_id, b"")

    def note_missed(self, peers: Iterable[PeerID]) -> None:
        """A group waited in vain for these peers, or they could not be reached."""
        for peer in peers:
            if self.waits_for(peer):
                _, times = self._missed.get(peer, (b"", 0))
                self._missed[peer] = (self._search_of(peer), times + 1)

    def note_present(self, peers: Iterable[PeerID]) -> None:
        """These peers are in a group with this one."""
        for peer in peers:
            self._missed.pop(peer, None)

    def waits_for(self, peer: PeerID) -> bool:
        """Whether a group may stay open for this peer."""
        search, times = self._missed.get(peer, (b"", 0))
        return times == 0 or (times < self.options.max_misses and self._search_of(peer) > search)

    def idle(self) -> set[PeerID]:
        """Holders that look for no group now, and for which a group may wait."""
        idle = (each for each in self.holders.values() if not each.looking or self.has_finished(each))
        return {holder.peer_id for holder in idle if self.waits_for(holder.peer_id)}

    def _search_of(self, peer: PeerID) -> bytes:
        """The last known search of a peer. A mate may have come to the last group with a later one than this peer has
        read, since a follower reads no declarations."""
        holder = self.holders.get(peer)
        return max(holder.search if holder is not None else b"", self._finished.get(peer, b""))


@dataclass(slots=True)
class Entry:
    """One candidate's present search, as this peer knows it."""

    candidate: Candidate
    rank: Rank
    since: float  # when this search of it became known
    own_word: bool = True  # by itself, or by its declaration; otherwise another peer says so
    expires: float = math.inf
    passed_until: float = 0.0  # until then this peer passes it over
    failures: int = 0  # how often it could not be reached
    follows: PeerID | None = None  # the leader that it named …
    follows_until: float = 0.0  # … and how long this peer believes that
    full_until: float = 0.0  # its group has no room, it said
    ask_at: float = 0.0  # this peer does not ask it again before this time
    loyal_since: float = math.inf  # since when it is known to follow a lost leader
    invited_at: float = -math.inf
    invitations: int = 0
    coming_until: float = -math.inf  # it said that it would come

    @property
    def peer_id(self) -> PeerID:
        return self.candidate.peer_id

    def may_be_invited(self, now: float, pause: float, most: int) -> bool:
        again = now >= self.invited_at + pause and self.invitations < most
        return again and self.follows_until <= now

    def hoped_for_until(self, slack: float, patience: float) -> float:
        """How long a group stays open for it. The group waits `slack` seconds for the answer to an invitation."""
        if self.invitations:
            # A candidate that follows another leader comes with that leader, or is sent here.
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
        """`only_one`: there is one round of its tag for all, see `outweigh`; a peer that began another search after
        `since` (swarm time; None: after this one) has had it. `shunned`: peers that are no candidates. `queue`: see
        `rank_of`."""
        self.entries: dict[PeerID, Entry] = {}
        self.elsewhere: set[PeerID] = set()  # peers that have begun without this one, where there is one round for all
        self._only_one, self._queue = only_one, queue
        self._since = me.search if since is None else min(me.search, search_id(since, bytes(8)))
        self.shunned = frozenset(shunned)
        self._me = me
        self._memory = memory

    def learn(self, candidate: Candidate, now: float, *, direct: bool = False) -> bool:
        """Takes in the word of the candidate itself (`direct`) or of another peer. Returns whether that was new.

        A candidate that speaks for itself is no longer passed over.
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
        hearsay = known is not None and own_word and not known.own_word  # the entry so far
        if known is not None and known.candidate.search == candidate.search and not hearsay:
            known.expires = max(known.expires, now + LIFETIME)
            if direct:
                self.heard(peer)
            return False
        later = known is None or hearsay or candidate.search > known.candidate.search
        if known is not None and known.own_word and not own_word:
            later = False  # or any peer could say of it that it cannot be dialed, in a search that never was
        outdated = not later or self._memory.has_finished(candidate)
        if (outdated and not direct) or (known is None and len(self.entries) >= MAX_CANDIDATES):
            return False
        self.entries[peer] = Entry(candidate, self.rank(candidate), now, own_word, now + LIFETIME)
        self.elsewhere.discard(peer)  # it is back, so its round has failed
        return True

    def rank(self, candidate: Candidate) -> Rank:
        """The rank of a candidate, see `rank_of`."""
        return rank_of(candidate, self._queue)

    def shun(self, peer: PeerID) -> None:
        """This peer is no candidate any more."""
        self.shunned |= {peer}
        self.entries.pop(peer, None)

    def finish(self, peer: PeerID) -> None:
        """The known search of this peer has ended: it is no candidate until it declares a later one."""
        entry = self.entries.pop(peer, None)
        if entry is not None and entry.own_word:  # others may name a search to come: no later one would count then
            self._memory.finish(peer, entry.candidate.search)

    def note_begun(self, peer: PeerID, gone: Sequence[PeerID], until: float) -> None:
        """A group has begun with this peer and those that are `gone`; they are passed over until `until`."""
        told = self._me.peer_id not in gone
        if not self._only_one:
            self.finish(peer)
        elif told:
            # Only known peers count, or a liar could name any.
            self.elsewhere |= {peer, *(mate for mate in gone if mate in self.entries)}
        self.pass_over([peer], until)  # where there is one round, this peer asks it again then: it may have failed
        # If this peer is among the gone, the leader was lost before it had told all members: then it looks for those
        # that have not heard either.
        if told:
            self.pass_over(gone, until)

    def outweigh(self, followers: Collection[PeerID]) -> bool:
        """Whether at least as many as this peer and its followers have begun without them.

        Where there is one round for all, two groups of one tag that both begin would be two averages, and separate
        their members for good. So a group that would be no larger than the one that has begun gives up, and its members
        ask the others how that ended. A smaller round does not stop this peer's group: its members will have to come
        here, however it ends; and few peers that merely say that they have begun cannot hold up many. Where this peer
        knows the members of the round that led here, only these count: keys cost nothing.
        """
        begun = self.elsewhere.intersection(self._queue) if self._queue else self.elsewhere
        return len(begun.difference(followers)) >= 1 + len(followers)

    def pass_over(self, peers: Iterable[PeerID], until: float) -> None:
        """Leaves these peers aside for a while, unless they begin another search."""
        for entry in (self.entries[peer] for peer in peers if peer in self.entries):
            entry.passed_until = max(entry.passed_until, until)

    def fail(self, peer: PeerID, now: float, pause: float) -> None:
        """This peer could not be reached: it is passed over for `pause` seconds, and longer every further time. The
        peers that follow it, by others' word, have to find another leader."""
        entry = self.entries.get(peer)
        if entry is not None:
            self.pass_over([peer], now + pause * 2**entry.failures)
            entry.failures = min(entry.failures + 1, self._memory.options.max_backoff)
        for other in self.entries.values():
            if other.follows == peer:
                other.follows_until = now

    def heard(self, peer: PeerID) -> None:
        """This peer has spoken, so it can be reached."""
        entry = self.entries.get(peer)
        if entry is not None:
            entry.passed_until, entry.failures = 0.0, 0

    def is_out_of_reach(self, peer: PeerID, now: float) -> bool:
        """Whether this peer was lost here, and has not spoken since."""
        entry = self.entries.get(peer)
        return entry is not None and entry.failures > 0 and entry.passed_until > now

    def names_leader(self, peer: PeerID, leader: PeerID, until: float) -> None:
        """This peer follows another one, or itself. A peer that others follow leads, in spite of earlier words."""
        entry = self.entries.get(peer)
        if entry is not None:
            entry.follows, entry.follows_until = leader, until if leader != peer else 0.0
        if leader in self.entries:
            self.entries[leader].follows_until = 0.0

    def drop_expired(self, now: float) -> None:
        for peer in [peer for peer, entry in self.entries.items() if entry.expires <= now]:
            del self.entries[peer]

    def present(self, now: float) -> list[Entry]:
        """All candidates that are not passed over at the moment, by rank."""
        there = [entry for entry in self.entries.values() if entry.passed_until <= now < entry.expires]
        return sorted(there, key=lambda entry: entry.rank)

    def next_change(self, now: float) -> float:
        """When, by the mere passing of time, `present` would next differ."""
        times = [entry.passed_until for entry in self.entries.values() if entry.passed_until > now]
        return min(times, default=math.inf)


@dataclass(frozen=True, slots=True)
class FollowPlan:
    """The leaders and their followers, as one peer would have them by all that it knows."""

    leaders: list[PeerID]  # by rank
    leader_of: dict[PeerID, PeerID]  # of each follower
    crowded: bool  # there is more than one group
    rest: bool = False  # the last group is not full, and waits for peers that are still to come

    @property
    def usual_size(self) -> float:
        """Members of a group, with its leader."""
        return (len(self.leaders) + len(self.leader_of)) / max(1, len(self.leaders))

    def nearest(self, peer: PeerID) -> list[PeerID]:
        """The leaders in the order in which this peer should ask them: its own, then those before it, then the rest."""
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
) -> FollowPlan:
    """The candidates in order of rank, cut into chunks of even size, each led by its first.

    Peers that can be dialed directly, over relays and not at all are cut apart and each chunk gets its share of all
    three, since a group needs reducers. All peers with the same knowledge ask the right leader at once, without a herd
    of refusals; where knowledge differs by a few peers, the ends of the chunks move by as few positions, and a follower
    that asks the wrong leader asks the next one. A peer that follows another one leads nobody. Where no peer can be
    dialed, `connected` ones lead each other.

    Where a remainder and the peers that may still be `coming` would fill a group, it is not shared: the peers that have
    searched the longest get full groups, which begin at once, and the others wait together. So a peer that is left over
    has a seat in the next group.
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
            leader = leaders[-1]  # all peers of this chunk are on their way to other leaders
        else:
            continue
        leader_of.update((peer, leader) for peer in chunk if peer != leader)
    return FollowPlan(leaders, leader_of, crowded=len(chunks) > 1, rest=rest)


def count_groups(candidates: int, able: int, target_size: int | None, minimum_size: int) -> int:
    """The number of groups for so many candidates: none too large, none too small, each with a peer that is `able` to
    lead.

    With few of these or an awkward remainder some candidates stay without a group.
    """
    if target_size is None or candidates <= target_size:
        return 1
    return max(1, min(math.ceil(candidates / target_size), candidates // minimum_size, able))


def _cut(ranked: Sequence[Entry], groups: int) -> list[list[PeerID]]:
    """Chunks of the candidates: even in size, and even in peers that can be dialed directly, or at all."""
    chunks: list[list[PeerID]] = [[] for _ in range(groups)]
    dealt = 0
    for _, alike in groupby(ranked, key=lambda entry: entry.candidate.dialable):
        peers = [entry.peer_id for entry in alike]
        dealt += len(peers)
        hand = iter(peers)
        least, more = divmod(dealt, groups)
        for index, chunk in enumerate(chunks):
            chunk.extend(islice(hand, least + (index < more) - len(chunk)))
    return chunks


class Settling:
    """How long ago the last news of other candidates came, measured by how long it takes to declare and to read.

    Where several groups may form, peers that start together first hear of each other, so that all of them divide the
    candidates in the same way: a peer asks no other before a reading has brought nothing new for a while.
    """

    def __init__(self, options: MatchmakingOptions, now: float) -> None:
        self.quiet = options.search.min_settle  # seconds without news after which things have settled
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
            # Two peers that start together learn of each other within the time that the slower takes for this.
            self.quiet = max(self._options.search.min_settle, self._options.search.settle_factor * duration)

    @property
    def trip(self) -> float:
        """Seconds that it takes to declare and to read."""
        return self.quiet / self._options.search.settle_factor

    @property
    def calm(self) -> bool:
        """Whether this peer needs no more readings before it asks another one."""
        return self._calm or not self._crowd

    @property
    def hedge(self) -> float:
        """Seconds after which an answer is late: a few round trips, as the first reading has measured them."""
        search = self._options.search
        return min(search.hedge * self._options.request_timeout, max(search.min_hedge, self.quiet))

    @property
    def ready_at(self) -> float:
        """When to ask and to invite."""
        if not self._crowd:
            return -math.inf
        if self._calm:
            return self._news_at + self.quiet
        return self._first_read + self._options.search.settling_share * self._options.min_matchmaking_time

    @property
    def settled_at(self) -> float:
        """When this peer can have heard of all candidates, if nothing new happens; infinite before a reading."""
        if self._first_read == math.inf:
            return math.inf
        return max(self._news_at + self.quiet, self.ready_at)


class Conflicts:
    """Peers that look for the same group with other terms."""

    def __init__(self) -> None:
        self.agreed = False  # a peer with this one's terms has answered it: peers that differ are not the run
        self._found: dict[PeerID, tuple[tuple[str, ...], float]] = {}

    def note(self, peer: PeerID, keys: tuple[str, ...], since: float) -> bool:
        """The terms of a peer that came up at swarm time `since` differ under `keys`. Returns whether that is new."""
        new = peer not in self._found
        known = self._found.get(peer, (keys, math.inf))
        self._found[peer] = (tuple(sorted(keys)), min(since, known[1]))
        return new

    def cover(self, others: Iterable[Entry]) -> bool:
        """Whether all of these follow a leader whose terms differ, so that none is left to form a group with."""
        return all(entry.follows in self._found for entry in others)

    def error(self, since: float, enough: int) -> FingerprintError | None:
        """The error if so many of these peers name the same keys and came up before `since`, and no peer agrees with
        this one: then they are the run, and this peer is not."""
        elders: dict[tuple[str, ...], list[PeerID]] = {}
        for peer, (keys, theirs) in self._found.items():
            if theirs < since and not self.agreed:
                elders.setdefault(keys, []).append(peer)
        keys, peers = max(elders.items(), key=lambda item: len(item[1]), default=((), []))
        if len(peers) < enough:
            return None
        names = ", ".join(peer.short for peer in peers)
        return FingerprintError(f"refused by {names}: what must agree differs in {', '.join(keys)}", keys)
