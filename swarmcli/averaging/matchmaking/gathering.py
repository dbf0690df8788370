"""The group that gathers around a peer: its followers, the peers that could still come, and when it begins. No I/O.

A plain group begins when all expected peers are there, when it is full, or when time is up. A *preformed* group has a
target: its members do work while they wait, and it begins when the sum of their progress reaches the target; until
then it is open for newcomers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping

from swarmcli.averaging.config import MatchmakingOptions
from swarmcli.averaging.group import MAX_MEMBERS, Group
from swarmcli.averaging.matchmaking.candidates import Candidates, Entry, FollowPlan, Memory
from swarmcli.averaging.matchmaking.messages import Join
from swarmcli.averaging.seats import Bid, Seats, decide
from swarmcli.network import wire
from swarmcli.network.identity import PeerID

MAX_LISTED = 768 << 10  # bytes that followers may take of a group's list, which goes to every member in one message


class Gathering:
    """The followers of one peer, with their joins, the peers for which it waits, and its deadlines."""

    def __init__(
        self,
        me: PeerID,
        memory: Memory,
        options: MatchmakingOptions,
        target: float | None,
        *,
        connected: Callable[[PeerID], bool],
        now: float,
        bid: Bid = Bid(),  # noqa: B008  # frozen
        shunned: frozenset[PeerID] = frozenset(),
        count: Callable[[Mapping[PeerID, float]], float] = lambda claims: math.fsum(claims.values()),
    ) -> None:
        """`bid`: of this peer itself. `shunned`: peers for which the group does not wait. `count`: how much of the
        members' claims counts towards the target."""
        self.options = options
        self.target = target
        self.mates = set(memory.mates - {me})  # of the last group, without those that are found lost
        # A preformed group works while it waits; it would wait at every end for peers that only hold the bucket.
        self.awaits_holders = target is None and not memory.only_mates
        self.seen: set[PeerID] = set()  # peers that have looked for such a group since this search began
        self.own_progress = 0.0
        self.followers: dict[PeerID, Join] = {}
        self.opens_at = -math.inf  # the group does not begin before this time
        self.close_at = now + options.min_matchmaking_time
        self.blocked = ""  # why these members cannot begin: none of them can reduce for all
        self._me, self._shunned, self._count = me, shunned, count
        self._memory = memory
        self._connected = connected
        self._progress: dict[PeerID, float] = {}
        self._listed: dict[PeerID, int] = {}  # bytes that each follower takes of the list
        self._crowded_out: set[PeerID] = set()  # the group does not wait for them, since its list has no room
        self._bid, self._began = bid, now
        self._seats: Seats | None = None  # of the members so far; None: to be decided anew
        self._reached_at = math.inf

    def __len__(self) -> int:
        """Members if it began now, with the leader itself."""
        return 1 + len(self.followers)

    def add(self, join: Join, now: float) -> bool:
        """Takes a follower in. Returns False if the group's list has no room for it: the largest entries go.

        Keys cost nothing. If the first to come had the room, some dozens of keys would keep all others out.
        """
        peer = join.candidate.peer_id
        self.remove(peer)
        self.followers[peer], self._seats = join, None
        self._listed[peer] = len(wire.encode((join.candidate, join.offer)))  # the entry says no more
        self.report(peer, join.progress)
        self.blocked = ""
        self.close_at = min(self.close_at, now + max(join.patience, self.options.search.min_patience))
        while sum(self._listed.values()) > MAX_LISTED:
            largest = max(reversed(self._listed), key=self._listed.__getitem__)  # among equals the last to come
            self._crowded_out.add(largest)
            self.remove(largest)
        return peer in self.followers

    def remove(self, peer: PeerID, search: bytes | None = None) -> None:
        """This follower has gone; with `search`, only if it follows with that search."""
        if peer in self.followers and search in (None, self.followers[peer].candidate.search):
            del self.followers[peer], self._progress[peer], self._listed[peer]
            self._seats = None

    def report(self, peer: PeerID, progress: float) -> bool:
        """A peer's cumulative progress, which never shrinks. Returns whether it is a follower.

        A claim counts for the whole target at most: only the member's weight in the round says what it has really done,
        and the result shows that to all members.
        """
        if peer in self.followers:
            self._progress[peer] = max(self._progress.get(peer, 0.0), min(progress, self.target or math.inf))
        return peer in self.followers

    def clear(self) -> list[PeerID]:
        """Gives all followers up and returns them."""
        former = list(self.followers)
        for peer in former:
            self.remove(peer)
        return former

    @property
    def has_enough(self) -> bool:
        return len(self) >= self.options.min_group_size

    @property
    def is_full(self) -> bool:
        return len(self) >= min(self.options.target_group_size or MAX_MEMBERS, MAX_MEMBERS)

    @property
    def _usual_seats(self) -> Seats:
        if self.target is None:
            return Seats()
        if self._seats is None:
            bids = {self._me: self._bid} | {peer: join.offer.bid for peer, join in self.followers.items()}
            self._seats = decide(bids, self.target)
        return self._seats

    def seats(self, now: float) -> Seats:
        """The seats in a group that begins now. If the seated members do not reach the target in far more than their
        usual time, all members get one."""
        return self._usual_seats.for_all if now >= self._overdue_at else self._usual_seats

    def allows(self, group: Group, now: float) -> bool:
        """Whether this peer comes to the same seats as the leader of the group."""
        seats = decide(group.bids, self.target) if self.target is not None else Seats()
        overdue = now >= self._began + seats.overdue() - self.options.search.overdue_slack
        allowed = [seats, seats.for_all] if overdue else [seats]
        return any(group.unseated == each.unseated.keys() and group.planned == each.planned for each in allowed)

    @property
    def _overdue_at(self) -> float:
        return self._began + self._usual_seats.overdue() if self._usual_seats.unseated else math.inf

    @property
    def total_progress(self) -> float:
        """The progress of the seated members."""
        return self._progress_without(self._usual_seats.unseated)

    @property
    def progress(self) -> dict[PeerID, float]:
        """Member → the progress that it claims."""
        return {self._me: self.own_progress} | self._progress

    def _progress_without(self, unseated: Collection[PeerID]) -> float:
        claims = {peer: samples for peer, samples in self.progress.items() if peer not in unseated}
        total = math.fsum(claims.values())
        return total if total < self.options.search.nearly * (self.target or math.inf) else self._count(claims)

    @property
    def _nearly_there(self) -> bool:
        return self.target is not None and self.total_progress >= self.options.search.nearly * self.target

    @property
    def beat_interval(self) -> float:
        """Seconds between two heartbeats to the same follower; more often when a lost member would delay a round."""
        soon = self.target is None or self._nearly_there
        rate = self.options.search.beats_per_second if soon else self.options.search.beats_at_rest
        return max(self.options.request_timeout / (12 if soon else 4), len(self.followers) / rate)

    @property
    def patience(self) -> float:
        """Seconds without a sign of life after which leader and followers give each other up.

        A follower that is given up goes to another group, and the two do not merge before their next round. So a peer
        that is only slow, on a busy machine for example, gets as long as for any answer. A preformed group that is
        about to begin gives up sooner: its round waits, and a peer that comes late takes over the outcome.
        """
        missed = self.options.search.beats_before_lost * self.beat_interval
        return missed if self._nearly_there else max(missed, self.options.request_timeout)

    # Peers that could still come

    def awaited(self) -> set[PeerID]:
        """Peers that could still come, though they have not looked for a group since this search began: mates of the
        last round, and, unless only those are expected, holders of the bucket."""
        awaited = set(self.mates)
        if self.awaits_holders:
            awaited = (awaited | self._memory.idle()) - self.seen
        return awaited.difference(self.followers, (self._me,), self._shunned, self._crowded_out)

    def expected(self, plan: FollowPlan, known: Candidates, now: float) -> list[Entry]:
        """The candidates that should follow this peer and are not here yet."""
        own = (peer for peer, leader in plan.leader_of.items() if leader == self._me)
        entries = [known.entries[peer] for peer in own if peer not in self.followers.keys() | self._crowded_out]
        # With several groups a follower of another leader belongs there; otherwise its leader will bring it along.
        return [entry for entry in entries if not (plan.crowded and entry.follows_until > now)]

    def open_until(
        self, plan: FollowPlan, expected: Iterable[Entry], asked: dict[PeerID, float], hedge: float
    ) -> list[float]:
        """How long the group stays open for each peer that is expected, or was asked and has not answered."""
        one_for_all = self.awaits_holders and not plan.crowded
        patience = self.options.request_timeout

        def slack(peer: PeerID) -> float:
            # Where there is one group for all, a slow peer would be left to a group of its own, so it gets as long as
            # an answer may take. A peer without a connection may not be there at all: it gets less.
            if not one_for_all:
                return hedge
            return patience if self._connected(peer) else self.options.search.unconnected * patience

        waited_for = (entry for entry in expected if self._memory.waits_for(entry.peer_id))
        times = [entry.hoped_for_until(slack(entry.peer_id), patience) for entry in waited_for]
        if one_for_all:
            times += [since + slack(peer) for peer, since in asked.items()]
        return times

    def to_invite(self, expected: Iterable[Entry], now: float) -> list[PeerID]:
        """The peers among these to invite now, which counts as done."""
        pause, options = self.options.request_timeout / 2, self.options.search
        able = (each for each in expected if each.candidate.dialable or self._connected(each.peer_id))
        chosen = [entry for entry in able if entry.may_be_invited(now, pause, options.max_invitations)]
        chosen = chosen[: options.invitations_at_once]
        for entry in chosen:
            entry.invited_at = now
            entry.invitations += 1
        return [entry.peer_id for entry in chosen]

    # When it begins

    def renew(self, now: float) -> None:
        """Time was up without a group; the next try begins."""
        self.close_at = max(now, self.opens_at) + self.options.min_matchmaking_time

    def schedule(self, opens_at: float) -> None:
        """The group does not begin before `opens_at`, and time is up no sooner than min_matchmaking_time after that."""
        self.close_at = max(self.close_at, opens_at + self.options.min_matchmaking_time)
        self.opens_at = opens_at

    def due_at(self, now: float, *, missing: bool, asking: bool, settled_at: float) -> float:
        """When this group is to begin, or to be looked at again, as things stand; infinite: not before something
        happens. Time may be up with too few members.

        `missing`: a peer that could still come has not. `asking`: this peer may be about to follow another one.
        `settled_at`: when this peer can have heard of all candidates, if nothing new happens.
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
        # Without the missing peers there may be no group at all, so they get more than the grace.
        if self._progress_without(self.seats(now).unseated) < target or (missing and not self.has_enough):
            self._reached_at = math.inf
            return self._overdue_at if now < self._overdue_at else math.inf
        self._reached_at = min(self._reached_at, now)
        ends = self._reached_at + self.options.preformed_grace if missing else settled_at
        # If this peer gave up here, one that comes a moment later would look for it in vain, and the other way round.
        return ends if self.has_enough or now < ends else math.inf
