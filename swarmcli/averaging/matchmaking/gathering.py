"""What a leader keeps of the group that gathers around it, and when it begins. No input or output here.

A plain group begins when everyone expected is there, when it is full, or when time is up. A *standing* group has a
target: its members do work while they wait, and it begins when the sum of their progress reaches the target; until
then it is open for newcomers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from swarmcli.averaging.config import MatchmakingOptions
from swarmcli.averaging.group import MAX_MEMBERS
from swarmcli.averaging.matchmaking.candidates import Candidate, rank_of
from swarmcli.averaging.matchmaking.meeting import Joining
from swarmcli.network.identity import PeerID

MIN_PATIENCE = 0.5  # seconds that even an impatient follower leaves the group open
BEATS_PER_SECOND = 256.0  # that a leader sends to all of its followers together, while the group may soon begin …
BEATS_AT_REST = 64.0  # … and while it stands
BEATS_BEFORE_LOST = 4  # missed ones, after which a leader or a follower is taken for lost
NEARLY = 0.75  # of a standing group's target, from which on it may soon begin
MAX_GATHERED_TOTAL = 512 << 10  # bytes of gathered metadata in one group; it goes to every member


@dataclass(slots=True)
class Follower:
    candidate: Candidate
    joining: Joining
    progress: float


@dataclass(frozen=True, slots=True)
class Decision:
    """Begin, give up for a reason, or look again at `wake_at`."""

    begin: bool = False
    give_up: str = ""
    wake_at: float = math.inf


class Gathering:
    """The followers of one peer, and its deadlines."""

    def __init__(self, options: MatchmakingOptions, *, now: float, opens_at: float, target: float | None) -> None:
        self.options = options
        self.opens_at = opens_at
        self.target = target
        self.own_progress = 0.0
        self.followers: dict[PeerID, Follower] = {}
        self.close_at = max(now, opens_at) + options.min_matchmaking_time
        self.blocked = ""  # why these members cannot begin: none of them can reduce for all
        self._gathered = 0
        self._reached_at = math.inf

    def __len__(self) -> int:
        """Members if it began now, with the leader itself."""
        return 1 + len(self.followers)

    def add(self, candidate: Candidate, joining: Joining, now: float) -> None:
        self.remove(candidate.peer_id)
        self.followers[candidate.peer_id] = Follower(candidate, joining, 0.0)
        self.report(candidate.peer_id, joining.progress)
        self._gathered += len(joining.gathered)
        self.blocked = ""
        self.close_at = min(self.close_at, now + max(joining.patience, MIN_PATIENCE))

    def remove(self, peer: PeerID, search: bytes | None = None) -> None:
        """This follower has gone; with `search`, only if it is that search of it which follows."""
        follower = self.followers.get(peer)
        if follower is not None and search in (None, follower.candidate.search):
            self._gathered -= len(follower.joining.gathered)
            del self.followers[peer]

    def report(self, peer: PeerID, progress: float) -> bool:
        """A peer's cumulative progress, which never shrinks. Returns whether it is a follower.

        Nobody's word counts for more than the whole target: what a member has really done only its weight in the
        round says, which the result tells to everyone.
        """
        follower = self.followers.get(peer)
        if follower is not None:
            follower.progress = max(follower.progress, min(progress, self.target or math.inf))
        return follower is not None

    def clear(self) -> list[PeerID]:
        """Gives all followers up and returns who they were, by rank."""
        former = [follower.candidate.peer_id for follower in self.by_rank()]
        self.followers.clear()
        self._gathered = 0
        return former

    def by_rank(self) -> list[Follower]:
        return sorted(self.followers.values(), key=lambda follower: rank_of(follower.candidate))

    @property
    def is_full(self) -> bool:
        limit = min(self.options.target_group_size or MAX_MEMBERS, MAX_MEMBERS)
        return len(self) >= limit or self._gathered > MAX_GATHERED_TOTAL

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
        only slow, on a busy machine for example, gets as long as for any answer. A standing group that is about to
        begin gives up sooner: its round waits, and who comes late for it takes over the outcome.
        """
        missed = BEATS_BEFORE_LOST * self.beat_interval
        return missed if self._nearly_there else max(missed, self.options.request_timeout)

    @property
    def _nearly_there(self) -> bool:
        return self.target is not None and self.total_progress >= NEARLY * self.target

    @property
    def total_progress(self) -> float:
        return self.own_progress + sum(follower.progress for follower in self.followers.values())

    def renew(self, now: float) -> None:
        """Time was up without a group; the next try begins."""
        self.close_at = max(now, self.opens_at) + self.options.min_matchmaking_time

    def schedule(self, opens_at: float) -> None:
        """The group does not begin before `opens_at`, and time is up so much later or earlier than before."""
        self.close_at = max(self.close_at, opens_at + self.options.min_matchmaking_time)
        self.opens_at = opens_at

    def decide(self, now: float, *, missing: bool, asking: bool, settled_at: float, keep_looking: bool) -> Decision:
        """Whether to begin.

        `missing`: somebody who could still come has not. `asking`: this peer may be about to follow another
        one. `settled_at`: when everyone who is there can have been heard of, if nothing new happens. `keep_looking`:
        with too few members at the end of the time, look on.
        """
        if now < self.opens_at:
            return Decision(wake_at=self.opens_at)
        if self.blocked and now < self.close_at:
            return Decision(wake_at=self.close_at)
        missing = missing or asking
        if self.target is not None:
            return self._decide_standing(now, missing, settled_at)
        full = self.is_full and not asking
        return self._decide_plain(now, full, math.inf if missing else settled_at, keep_looking)

    def _decide_plain(self, now: float, full: bool, complete_at: float, keep_looking: bool) -> Decision:
        enough = len(self) >= self.options.min_group_size
        if enough and (full or now >= min(self.close_at, complete_at)):
            return Decision(begin=True)
        if now < self.close_at:
            return Decision(wake_at=min(self.close_at, complete_at) if enough else self.close_at)
        if keep_looking:
            self.renew(now)
            return Decision(wake_at=self.close_at)
        return Decision(give_up=self._too_few())

    def _decide_standing(self, now: float, missing: bool, settled_at: float) -> Decision:
        assert self.target is not None
        too_few = len(self) < self.options.min_group_size
        # Without those who are missing there would be no group at all, so they get more than the grace.
        if self.total_progress < self.target or (too_few and missing):
            self._reached_at = math.inf
            return Decision()
        self._reached_at = min(self._reached_at, now)
        ends = self._reached_at + self.options.standing_grace if missing else settled_at
        if now < ends:
            return Decision(wake_at=ends)
        # Who gave up here would be looked for in vain by whoever comes a moment later, and the other way round.
        return Decision() if too_few else Decision(begin=True)

    def _too_few(self) -> str:
        return f"only {len(self)} of at least {self.options.min_group_size} peers came together in time"
