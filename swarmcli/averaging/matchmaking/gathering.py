"""The group that gathers around a peer: who is in it, who could still come, and when it begins. No I/O here.

A plain group begins when everyone expected is there, when it is full, or when time is up. A *preformed* group has a
target: its members do work while they wait, and it begins when the sum of their progress reaches the target; until
then it is open for newcomers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping

from swarmcli.averaging.config import MatchmakingOptions
from swarmcli.averaging.group import MAX_MEMBERS, Group
from swarmcli.averaging.matchmaking.candidates import Candidates, Entry, Memory, Plan
from swarmcli.averaging.matchmaking.messages import Join
from swarmcli.averaging.seats import Bid, Seats, decide
from swarmcli.network import wire
from swarmcli.network.identity import PeerID

UNCONNECTED = 1 / 3  # of request_timeout, for the answer of a peer to which there is no connection
INVITATIONS_AT_ONCE = 16
MIN_PATIENCE = 0.5  # seconds that even an impatient follower leaves the group open
BEATS_PER_SECOND = 256.0  # that a leader sends to all of its followers together, while the group may soon begin …
BEATS_AT_REST = 64.0  # … and while it is far from its target
BEATS_BEFORE_LOST = 4  # missed ones, after which a leader or a follower is taken for lost
NEARLY = 0.75  # of a preformed group's target, from which on it may soon begin
OVERDUE_SLACK = 2.0  # seconds by which searches of one group begin one after the other
MAX_LISTED = 768 << 10  # bytes that followers may take of a group's list, which goes to every member in one message


class Gathering:
    """The followers of one peer, with what they said when they joined, those whom it waits for, and its deadlines."""

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
        """`bid`: of this peer itself. `shunned`: who is not waited for. `count`: how much of what members claim counts
        towards the target."""
        self.options = options
        self.target = target
        self.mates = set(memory.mates - {me})  # of the last group, without those who are found lost
        # A preformed group works while it waits; whoever only holds the bucket would be waited for at every end.
        self.awaits_holders = target is None and not memory.only_mates
        self.seen: set[PeerID] = set()  # who has looked for such a group since this search began
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
        self._crowded_out: set[PeerID] = set()  # whom the group does not wait for, since its list has no room for them
        self._bid, self._began = bid, now
        self._seats: Seats | None = None  # of those who are here; None: to be decided anew
        self._reached_at = math.inf

    def __len__(self) -> int:
        """Members if it began now, with the leader itself."""
        return 1 + len(self.followers)

    def add(self, join: Join, now: float) -> bool:
        """Takes this one in. Returns False if the group's list has no room for it: those go who take the most.

        Keys cost nothing. If whoever comes first had the room, some dozens of them would keep everybody out.
        """
        peer = join.candidate.peer_id
        self.remove(peer)
        self.followers[peer], self._seats = join, None
        self._listed[peer] = len(wire.encode((join.candidate, join.offer)))  # the entry says no more
        self.report(peer, join.progress)
        self.blocked = ""
        self.close_at = min(self.close_at, now + max(join.patience, MIN_PATIENCE))
        while sum(self._listed.values()) > MAX_LISTED:
            largest = max(reversed(self._listed), key=self._listed.__getitem__)  # of equals the last to come
            self._crowded_out.add(largest)
            self.remove(largest)
        return peer in self.followers

    def remove(self, peer: PeerID, search: bytes | None = None) -> None:
        """This follower has gone; with `search`, only if it is that search of it which follows."""
        if peer in self.followers and search in (None, self.followers[peer].candidate.search):
            del self.followers[peer], self._progress[peer], self._listed[peer]
            self._seats = None

    def report(self, peer: PeerID, progress: float) -> bool:
        """A peer's cumulative progress, which never shrinks. Returns whether it is a follower.

        Nobody's word counts for more than the whole target: what a member has really done only its weight in the
        round says, which the result tells to everyone.
        """
        if peer in self.followers:
            self._progress[peer] = max(self._progress.get(peer, 0.0), min(progress, self.target or math.inf))
        return peer in self.followers

    def clear(self) -> list[PeerID]:
        """Gives all followers up and returns who they were."""
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
        """Who may send in a group that begins now. Where those who have a seat do not come to the target in far more
        than their usual time, everybody may."""
        return self._usual_seats.for_all if now >= self._overdue_at else self._usual_seats

    def allows(self, group: Group, now: float) -> bool:
        """Whether a leader has given the seats of its group to those who are to have them, as this peer finds."""
        seats = decide(group.bids, self.target) if self.target is not None else Seats()
        overdue = now >= self._began + seats.overdue() - OVERDUE_SLACK
        allowed = [seats, seats.for_all] if overdue else [seats]
        return any(group.unseated == each.unseated.keys() and group.planned == each.planned for each in allowed)

    @property
    def _overdue_at(self) -> float:
        return self._began + self._usual_seats.overdue() if self._usual_seats.unseated else math.inf

    @property
    def total_progress(self) -> float:
        """Of those who may send."""
        return self._progress_without(self._usual_seats.unseated)

    @property
    def progress(self) -> dict[PeerID, float]:
        """What each member claims to have done."""
        return {self._me: self.own_progress} | self._progress

    def _progress_without(self, unseated: Collection[PeerID]) -> float:
        claims = {peer: samples for peer, samples in self.progress.items() if peer not in unseated}
        total = math.fsum(claims.values())
        return total if total < NEARLY * (self.target or math.inf) else self._count(claims)

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

    # Who could still come

    def awaited(self) -> set[PeerID]:
        """Who could still come, though it has not looked for a group since this search began: a mate of the last round,
        or, unless only those are expected, whoever holds the bucket."""
        awaited = set(self.mates)
        if self.awaits_holders:
            awaited = (awaited | self._memory.idle()) - self.seen
        return awaited.difference(self.followers, (self._me,), self._shunned, self._crowded_out)

    def expected(self, plan: Plan, known: Candidates, now: float) -> list[Entry]:
        """The candidates that should follow this peer and are not here yet."""
        own = (peer for peer, leader in plan.leader_of.items() if leader == self._me)
        entries = [known.entries[peer] for peer in own if peer not in self.followers.keys() | self._crowded_out]
        # With several groups whoever follows another leader belongs there; otherwise its leader will bring it along.
        return [entry for entry in entries if not (plan.crowded and entry.follows_until > now)]

    def open_until(
        self, plan: Plan, expected: Iterable[Entry], asked: dict[PeerID, float], hedge: float
    ) -> list[float]:
        """How long the group stays open for each who is expected, or was asked and has not answered."""
        one_for_all = self.awaits_holders and not plan.crowded
        patience = self.options.request_timeout

        def slack(peer: PeerID) -> float:
            # Where there is one group for all, whoever is slow would be left to a group of its own, so it gets as
            # long as an answer may take. Nobody says that a peer without a connection is there at all: it gets less.
            if not one_for_all:
                return hedge
            return patience if self._connected(peer) else UNCONNECTED * patience

        waited_for = (entry for entry in expected if self._memory.waits_for(entry.peer_id))
        times = [entry.hoped_for_until(slack(entry.peer_id), patience) for entry in waited_for]
        if one_for_all:
            times += [since + slack(peer) for peer, since in asked.items()]
        return times

    def to_invite(self, expected: Iterable[Entry], now: float) -> list[PeerID]:
        """Whom of these to invite now, which counts as done."""
        pause = self.options.request_timeout / 2
        able = (each for each in expected if each.candidate.dialable or self._connected(each.peer_id))
        chosen = [entry for entry in able if entry.may_be_invited(now, pause)][:INVITATIONS_AT_ONCE]
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
        if self._progress_without(self.seats(now).unseated) < target or (missing and not self.has_enough):
            self._reached_at = math.inf
            return self._overdue_at if now < self._overdue_at else math.inf
        self._reached_at = min(self._reached_at, now)
        ends = self._reached_at + self.options.preformed_grace if missing else settled_at
        # Who gave up here would be looked for in vain by whoever comes a moment later, and the other way round.
        return ends if self.has_enough or now < ends else math.inf
