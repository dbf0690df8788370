"""The peers that a searching peer knows of, in the order in which they would lead. No input or output here.

A peer declares itself in its bucket as long as it has an averager, whether it looks for a group or not. While it looks
it is a *candidate*; between its searches it *holds* the bucket, and may look again. Only its own word counts: its
declaration, and what it says to this peer. Times are those of the loop.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, islice

from swarmcli.averaging.config import MatchmakingOptions
from swarmcli.averaging.find.messages import Candidate, Rank, rank_of, search_id
from swarmcli.errors import FingerprintError
from swarmcli.network.identity import PeerID
from swarmcli.recent import Recent

MAX_CANDIDATES = 4096
LIFETIME = 60.0  # seconds for which peers believe a declaration, unless they read it again
MAX_MISSES = 2  # waits in vain, after which a peer counts only once it has been in a group with this one
MAX_BACKOFF = 5  # doublings of the time for which an unreachable candidate is passed over
MIN_SETTLE = 0.015  # seconds of quiet after which peers that start together have met …
SETTLE_FACTOR = 3.0  # … and at least so many times the time that it took to declare and read
SETTLING_SHARE = 0.25  # of min_matchmaking_time at most, before a peer asks while others keep coming


class Memory:
    """One averager's memory from search to search, of at most MAX_CANDIDATES peers.

    A group does not wait again for a peer that did not come within a full wait, until that peer declares another
    search. A peer that declares searches and still stays away could repeat that for ever, hence MAX_MISSES.
    """

    def __init__(self, is_banned: Callable[[PeerID], bool] = lambda peer: False) -> None:
        """`is_banned`: whether a peer is banned from the run."""
        self.is_banned = is_banned
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
        """This search of that peer, and so all before it, has ended; declarations of it are out of date."""
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
        return times == 0 or (times < MAX_MISSES and self._search_of(peer) > search)

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
    expires: float = math.inf
    follows: PeerID | None = None  # the leader that it named …
    follows_until: float = 0.0  # … and how long this peer believes that
    full_until: float = 0.0  # its group has no room, it said
    told_at: float = -math.inf  # when this peer last told it that it leads

    @property
    def peer_id(self) -> PeerID:
        return self.candidate.peer_id


class Candidates:
    """The candidates of one peer's bucket that it knows of, without itself."""

    def __init__(
        self,
        me: Candidate,
        memory: Memory,
        *,
        only_one: bool = False,
        since: float | None = None,
        queue: Sequence[PeerID] = (),
        out: Mapping[PeerID, float] | None = None,
    ) -> None:
        """`only_one`: there is one round of its tag for all, see `outweigh`; a peer that began another search after
        `since` (swarm time; None: after this one) has had it. `queue`: see `rank_of`. `out`: see below."""
        self.entries: dict[PeerID, Entry] = {}
        self.out = dict(out or {})  # peers that may not be in a group with this one → until then
        self.elsewhere: set[PeerID] = set()  # peers that have begun without this one, where there is one round for all
        self._passed: Recent[PeerID, float] = Recent(MAX_CANDIDATES)  # peer, passed over unless it speaks → until then
        self._failures: Recent[PeerID, int] = Recent(MAX_CANDIDATES)  # how often it was out of reach
        self._only_one, self._queue = only_one, queue
        self._since = me.search if since is None else min(me.search, search_id(since, bytes(8)))
        self._me = me
        self._memory = memory

    def learn(self, candidate: Candidate, now: float, *, direct: bool = False) -> bool:
        """Takes in the declaration of a candidate, or what it says to this peer itself (`direct`): that puts an older
        search in the place of a later one, and ends that it is passed over. Returns whether it was new."""
        peer = candidate.peer_id
        if self._only_one and candidate.tag != self._me.tag and candidate.search > self._since:
            self.elsewhere.add(peer)
        if candidate.bucket != self._me.bucket or not candidate.looking or peer == self._me.peer_id:
            return False
        if self._memory.is_banned(peer):
            return False
        known = self.entries.get(peer)
        if known is not None and known.candidate.search == candidate.search:
            known.expires = max(known.expires, now + LIFETIME)
            if direct:
                self._heard(peer)
            return False
        later = known is None or candidate.search > known.candidate.search
        outdated = not later or self._memory.has_finished(candidate)
        if (outdated and not direct) or (known is None and len(self.entries) >= MAX_CANDIDATES):
            return False
        self.entries[peer] = Entry(candidate, self.rank(candidate), now, now + LIFETIME)
        self._heard(peer)
        self.elsewhere.discard(peer)  # it is back, so its round has failed
        return True

    def rank(self, candidate: Candidate) -> Rank:
        """The rank of a candidate, see `rank_of`."""
        return rank_of(candidate, self._queue)

    def finish(self, peer: PeerID) -> None:
        """The known search of this peer has ended: it is no candidate until it declares a later one."""
        if (entry := self.entries.pop(peer, None)) is not None:
            self._memory.finish(peer, entry.candidate.search)

    def note_begun(self, peer: PeerID, gone: Sequence[PeerID], until: float) -> None:
        """A group has begun with this peer and those that are `gone`; they are passed over until `until`."""
        told = self._me.peer_id not in gone
        if not self._only_one:
            self.finish(peer)
        elif told:
            # Only known peers count, or a liar could name any.
            self.elsewhere |= {peer, *(mate for mate in gone if mate in self.entries)}
        # Where there is one round, this peer asks it again then: it may have failed. If this peer is among the gone,
        # the leader was lost before it had told all members: then it looks for those that have not heard either.
        self.pass_over([peer, *(gone if told else ())], until)

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
        """Leaves these peers aside for a while, unless they speak or begin another search."""
        for peer in peers:
            self._passed[peer] = max(self._passed.get(peer, 0.0), until)

    def fail(self, peer: PeerID, now: float, pause: float) -> None:
        """This peer could not be reached: it is passed over for `pause` seconds, and longer every further time. The
        peers that follow it, by their word, have to find another leader."""
        failures = self._failures.get(peer, 0)
        self.pass_over([peer], now + pause * 2**failures)
        self._failures[peer] = min(failures + 1, MAX_BACKOFF)
        for other in self.entries.values():
            if other.follows == peer:
                other.follows_until = now

    def is_passed_over(self, peer: PeerID, now: float) -> bool:
        """Whether this peer is left aside, and has not spoken since."""
        return self._passed.get(peer, 0.0) > now

    def _heard(self, peer: PeerID) -> None:
        self._passed.pop(peer, None)
        self._failures.pop(peer, None)

    def is_out(self, peer: PeerID, now: float) -> bool:
        """Whether this peer may not be in a group with this one yet."""
        return self.out.get(peer, 0.0) > now

    def present(self, now: float) -> list[Entry]:
        """All candidates that are not passed over at the moment, by rank."""
        there = (
            entry
            for peer, entry in self.entries.items()
            if now < entry.expires and not (self.is_out(peer, now) or self.is_passed_over(peer, now))
        )
        return sorted(there, key=lambda entry: entry.rank)

    def next_change(self, now: float) -> float:
        """When, by the mere passing of time, `present` or who may lead would next differ."""
        believed = (when for entry in self.entries.values() for when in (entry.follows_until, entry.full_until))
        times = (*self.out.values(), *self._passed.values(), *believed)
        return min((when for when in times if when > now), default=math.inf)


@dataclass(frozen=True, slots=True)
class FollowPlan:
    """The leaders and their followers, as one peer would have them by all that it knows."""

    leaders: list[PeerID]  # by rank
    leader_of: dict[PeerID, PeerID]  # of each follower
    crowded: bool  # there is more than one group
    rest: bool = False  # the last group is not full, and waits for peers that are still to come

    def nearest(self, peer: PeerID) -> list[PeerID]:
        """The leaders in the order in which this peer should ask them: its own, then those before it, then the others.
        If the last group waits, its own alone: the seats elsewhere are of peers that have searched for longer."""
        own = self.leader_of.get(peer)
        if own is None:
            return list(self.leaders)
        if self.rest:
            return [own]
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
    searched the longest get full groups, which begin at once, and the others wait together.
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
        self.quiet = MIN_SETTLE  # seconds without news after which things have settled
        self._longest = SETTLING_SHARE * options.min_matchmaking_time
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
            self.quiet = max(MIN_SETTLE, SETTLE_FACTOR * duration)

    @property
    def trip(self) -> float:
        """Seconds that it takes to declare and to read."""
        return self.quiet / SETTLE_FACTOR

    @property
    def calm(self) -> bool:
        """Whether this peer needs no more readings before it asks another one."""
        return self._calm or not self._crowd

    @property
    def ready_at(self) -> float:
        """When to ask others."""
        if not self._crowd:
            return -math.inf
        return self._news_at + self.quiet if self._calm else self._first_read + self._longest

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
        self._found[peer] = tuple(sorted(keys)), since
        return new

    def cover(self, others: Iterable[Entry]) -> bool:
        """Whether all of these follow a leader whose terms differ, so that none is left to form a group with."""
        return all(entry.follows in self._found for entry in others)

    def error(self, since: float, enough: int) -> FingerprintError | None:
        """The error if so many of these peers came up before `since`, name the same keys, and no peer agrees with this
        one: then they are the run, and this peer is not."""
        elders = Counter(keys for keys, theirs in self._found.values() if theirs < since and not self.agreed)
        if not elders or max(elders.values()) < enough:
            return None
        (keys, count), *_ = elders.most_common(1)
        return FingerprintError(f"refused by {count} peers: what must agree differs in {', '.join(keys)}", keys)
