"""When a peer may ask others, and when the group that gathers around it begins. No input or output here.

A plain group begins when everyone expected is there, when it is full, or when time is up. A *preformed* group has a
target: its members do work while they wait, and it begins when the sum of their progress reaches the target; until
then it is open for newcomers.
"""

from __future__ import annotations

import math

from swarmcli.averaging.config import MatchmakingOptions
from swarmcli.averaging.group import MAX_MEMBERS
from swarmcli.averaging.matchmaking.messages import Join, rank_of
from swarmcli.network.identity import PeerID

MIN_SETTLE = 0.015  # seconds of quiet after which peers that start together have met …
SETTLE_FACTOR = 3.0  # … and at least so many times as long as it took to declare and read
SETTLING_SHARE = 0.25  # of min_matchmaking_time goes by at most, while others keep coming, before anybody is asked
MIN_HEDGE = 0.1  # seconds without an answer after which the next in rank is asked as well …
HEDGE = 1 / 6  # … and the part of request_timeout that this is at most
MIN_PATIENCE = 0.5  # seconds that even an impatient follower leaves the group open
BEATS_PER_SECOND = 256.0  # that a leader sends to all of its followers together, while the group may soon begin …
BEATS_AT_REST = 64.0  # … and while it is far from its target
BEATS_BEFORE_LOST = 4  # missed ones, after which a leader or a follower is taken for lost
NEARLY = 0.75  # of a preformed group's target, from which on it may soon begin
MAX_GATHERED_TOTAL = 512 << 10  # bytes of gathered metadata in one group; it goes to every member


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


class Gathering:
    """The followers of one peer, with what they said when they joined, and its deadlines."""

    def __init__(self, options: MatchmakingOptions, target: float | None, now: float) -> None:
        self.options = options
        self.target = target
        self.own_progress = 0.0
        self.followers: dict[PeerID, Join] = {}
        self.opens_at = -math.inf  # the group does not begin before this time
        self.close_at = now + options.min_matchmaking_time
        self.blocked = ""  # why these members cannot begin: none of them can reduce for all
        self._progress: dict[PeerID, float] = {}
        self._reached_at = math.inf

    def __len__(self) -> int:
        """Members if it began now, with the leader itself."""
        return 1 + len(self.followers)

    def add(self, join: Join, now: float) -> None:
        peer = join.candidate.peer_id
        self.remove(peer)
        self.followers[peer] = join
        self.report(peer, join.progress)
        self.blocked = ""
        self.close_at = min(self.close_at, now + max(join.patience, MIN_PATIENCE))

    def remove(self, peer: PeerID, search: bytes | None = None) -> None:
        """This follower has gone; with `search`, only if it is that search of it which follows."""
        if peer in self.followers and search in (None, self.followers[peer].candidate.search):
            del self.followers[peer], self._progress[peer]

    def report(self, peer: PeerID, progress: float) -> bool:
        """A peer's cumulative progress, which never shrinks. Returns whether it is a follower.

        Nobody's word counts for more than the whole target: what a member has really done only its weight in the
        round says, which the result tells to everyone.
        """
        if peer not in self.followers:
            return False
        self._progress[peer] = max(self._progress.get(peer, 0.0), min(progress, self.target or math.inf))
        return True

    def clear(self) -> list[PeerID]:
        """Gives all followers up and returns who they were, by rank."""
        former = [join.candidate.peer_id for join in self.by_rank()]
        self.followers.clear()
        self._progress.clear()
        return former

    def by_rank(self) -> list[Join]:
        return sorted(self.followers.values(), key=lambda join: rank_of(join.candidate))

    @property
    def has_enough(self) -> bool:
        return len(self) >= self.options.min_group_size

    @property
    def is_full(self) -> bool:
        gathered = sum(len(join.offer.gathered) for join in self.followers.values())
        limit = min(self.options.target_group_size or MAX_MEMBERS, MAX_MEMBERS)
        return len(self) >= limit or gathered > MAX_GATHERED_TOTAL

    @property
    def total_progress(self) -> float:
        return self.own_progress + sum(self._progress.values())

    @property
    def _nearly_there(self) -> bool:
        return self.target is not None and self.total_progress >= NEARLY * self.target

    @property
    def beat_interval(self) -> float:
        """Seconds between two heartbeats to the same follower; more often when a lost member would delay a round."""
        soon = self.target is None or self._nearly_there
        rate = BEATS_PER_SECOND if soon else BEATS_AT_REST
        return max(self.options.request_timeout / (12 if soon else 4), len(self.followers) / rate)

    @property
    def patience(self) -> float:
        """Seconds without a sign of life after which leader and followers give each other up.

        Whoever is given up goes to another group, and the two do not merge before their next round. So a peer that is
        only slow, on a busy machine for example, gets as long as for any answer. A preformed group that is about to
        begin gives up sooner: its round waits, and who comes late for it takes over the outcome.
        """
        missed = BEATS_BEFORE_LOST * self.beat_interval
        return missed if self._nearly_there else max(missed, self.options.request_timeout)

    def renew(self, now: float) -> None:
        """Time was up without a group; the next try begins."""
        self.close_at = max(now, self.opens_at) + self.options.min_matchmaking_time

    def schedule(self, opens_at: float) -> None:
        """The group does not begin before `opens_at`, and time is up so much later or earlier than before."""
        self.close_at = max(self.close_at, opens_at + self.options.min_matchmaking_time)
        self.opens_at = opens_at

    def due_at(self, now: float, *, missing: bool, asking: bool, settled_at: float) -> float:
        """When this group is to begin, or to be looked at again, as things stand; infinite: not before something
        happens. Time may be up with too few members.

        `missing`: somebody who could still come has not. `asking`: this peer may be about to follow another
        one. `settled_at`: when everyone who is there can have been heard of, if nothing new happens.
        """
        if now < self.opens_at:
            return self.opens_at
        if self.blocked and now < self.close_at:
            return self.close_at
        if self.target is not None:
            return self._preformed_due_at(now, self.target, missing or asking, settled_at)
        if self.has_enough and self.is_full and not asking:
            return now
        return min(self.close_at, settled_at) if self.has_enough and not (missing or asking) else self.close_at

    def _preformed_due_at(self, now: float, target: float, missing: bool, settled_at: float) -> float:
        # Without those who are missing there may be no group at all, so they get more than the grace.
        if self.total_progress < target or (missing and not self.has_enough):
            self._reached_at = math.inf
            return math.inf
        self._reached_at = min(self._reached_at, now)
        ends = self._reached_at + self.options.standing_grace if missing else settled_at
        # Who gave up here would be looked for in vain by whoever comes a moment later, and the other way round.
        return ends if self.has_enough or now < ends else math.inf
