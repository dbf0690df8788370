"""Where the followers of a leader wait: who has come, who has room, and when the group begins.

A plain group begins when all expected peers are there, when it is full, or when time is up. A *preformed* group has a
target: its members do work while they wait, and it begins when the sum of their progress reaches the target; until
then it is open for newcomers. No input or output here: a follower's call ends when its future gets the answer.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from swarmcli.averaging.config import MatchmakingOptions
from swarmcli.averaging.find.messages import MAX_GONE, Answer, Candidate, Join
from swarmcli.averaging.group import MAX_MEMBERS
from swarmcli.averaging.seats import Lines, Seats
from swarmcli.averaging.weights import Experience
from swarmcli.errors import CallRefused
from swarmcli.network import wire
from swarmcli.network.identity import PeerID
from swarmcli.network.prefix import Prefix

MAX_LISTED = 768 << 10  # most bytes of followers in a group's list, which goes to every member in one message
GRACE = 1.0  # seconds for which a preformed group that has reached its target waits for missing members
MIN_PATIENCE = 0.5  # seconds for which even an impatient follower leaves the group open
BEAT_INTERVAL = 0.75  # least seconds between two beats of a follower: with the wait for an answer a loss shows in 4 s …
BEATS_PER_SECOND = 64.0  # … and most beats of all followers of a leader together


def beat_interval(members: int) -> float:
    """Seconds between two beats of each follower in a group of `members`."""
    return max(BEAT_INTERVAL, members / BEATS_PER_SECOND)


@dataclass(slots=True)
class OpenCall:
    """A follower whose call is open."""

    join: Join
    nbytes: int  # that its entry takes of the group's list
    progress: float = 0.0
    silent: int = 0  # looks since its last beat: counted, not timed, since a leader that was frozen has not waited
    answer: asyncio.Future[Answer] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


@dataclass(frozen=True, slots=True)
class EvenShare:
    """The number of groups that a crowd forms, and the least and the most members of one leader's group."""

    groups: int
    least: int
    most: int


class Lobby:
    """The followers of one peer in one search, and the deadlines of their group."""

    def __init__(
        self,
        own: Join,
        options: MatchmakingOptions,
        target: float | None,
        now: float,
        lines: Lines,
        experience: Experience,
    ) -> None:
        """`own`: this peer's join. `target`: of a preformed group; None: a plain one. `lines`: of the others, as this
        peer saw them. `experience`: tells how much of the members' claims counts towards the target."""
        self.options, self.target = options, target
        self.followers: dict[PeerID, OpenCall] = {}
        self.own_progress = 0.0
        self.opens_at = -math.inf  # the group does not begin before this time
        self.close_at = now + options.min_matchmaking_time
        self.blocked = ""  # why these members cannot begin, if none of them can reduce for all
        self._own, self._lines, self._experience, self._began = own, lines, experience, now
        self._reached_at = math.inf

    def __len__(self) -> int:
        """The members that the group has so far, with the leader itself."""
        return 1 + len(self.followers)

    # Followers come and go

    def admit(self, join: Join, now: float) -> asyncio.Future[Answer]:
        """Takes a follower in. If the group's list is too long then, the calls of the followers with the largest
        entries end, perhaps this one's.

        Keys cost nothing: if the first to come had the room, some dozens of keys would keep all others out.
        """
        peer = join.candidate.peer_id
        if peer in self.followers:
            self._end(peer, Answer("full"))
        new = OpenCall(join, len(wire.encode((join.candidate, join.offer))))  # the entry holds no more
        self.followers[peer] = new
        self.report(peer, join.progress)
        self.blocked = ""
        self.close_at = min(self.close_at, now + max(join.patience, MIN_PATIENCE))
        while sum(each.nbytes for each in self.followers.values()) > MAX_LISTED:
            # Of equally large ones the last to come.
            largest = max(reversed(self.followers), key=lambda peer: self.followers[peer].nbytes)
            self._end(largest, Answer("full"))
        return new.answer

    def turns_away(self, candidate: Candidate, known: Iterable[Candidate], place: int) -> Answer | None:
        """Returns the answer to a candidate for which the group has no room; None: there is room.

        More candidates than fit into one group share out evenly among as few groups as can be. Those that can be dialed
        directly, over relays, and not at all each do so too, since each group needs reducers. `known`: all that look,
        or may look, and are in no other group. `place`: of this leader, see `share`.
        """
        here, kind = self._candidates, candidate.dialable
        everyone = {each.peer_id: each for each in (*known, *here, candidate)}.values()
        share = self._share(len(everyone), place)
        if len(here) >= share.most:
            return Answer("full", gone=tuple(self.followers)[:MAX_GONE])
        alike, of_kind = (sum(each.dialable == kind for each in among) for among in (here, everyone))
        return Answer("full") if alike >= math.ceil(of_kind / share.groups) else None

    def share(self, known: Iterable[Candidate], place: int) -> EvenShare:
        """The share of this leader's group in all these candidates and those that are here; `place` leaders come before
        it. If the groups cannot all have the same size, the first ones take one more: otherwise the last peer would
        find them all full."""
        return self._share(len({each.peer_id for each in (*known, *self._candidates)}), place)

    def _share(self, everyone: int, place: int) -> EvenShare:
        most = min(self.options.target_group_size or MAX_MEMBERS, MAX_MEMBERS)
        groups = max(1, min(math.ceil(everyone / most), everyone // self.options.min_group_size))
        if groups == 1:
            return EvenShare(1, most, most)
        least, over = divmod(everyone, groups)
        return EvenShare(groups, least, min(most, least + (place < over)))

    def has_seat_for(self, peer: PeerID, network_of: Callable[[PeerID], Prefix | None]) -> bool:
        """Whether the network of this peer has seats left: identities cost nothing, but addresses in several networks
        do. Local networks and this machine are not counted."""
        limit, network = self.options.seats_per_network, network_of(peer)
        if limit is None or network is None or network.shared:
            return True
        return sum(network_of(other) == network for other in self.followers) < limit

    def remove(self, peer: PeerID, call: asyncio.Future[Answer] | None = None) -> None:
        """A follower has hung up, or is lost. Without effect if `call` is given and is not its present one."""
        waiting = self.followers.get(peer)
        if waiting is not None and call in (None, waiting.answer):
            self._end(peer, CallRefused("idle", "this peer does not count on you any more"))

    def send_all(self, answer: Answer | CallRefused) -> None:
        """Ends all calls with this answer."""
        for peer in list(self.followers):
            self._end(peer, answer)

    def report(self, peer: PeerID, progress: float) -> bool:
        """Takes in a peer's cumulative progress, which never shrinks. Returns whether the peer is a follower.

        A claim counts for the whole target at most: only the member's weight in the round says what it has really done,
        and the result shows that to all members.
        """
        if (waiting := self.followers.get(peer)) is not None:
            waiting.progress = max(waiting.progress, min(progress, self.target or math.inf))
            waiting.silent = 0
        return waiting is not None

    def look(self, patience: Callable[[PeerID], float]) -> list[PeerID]:
        """Call it once for each beat that is due. Returns the followers that were silent for longer than `patience`, in
        seconds."""
        for waiting in self.followers.values():
            waiting.silent += 1
        beat = beat_interval(len(self))
        return [peer for peer, each in self.followers.items() if (each.silent - 1) * beat > patience(peer)]

    def _end(self, peer: PeerID, answer: Answer | CallRefused) -> None:
        call = self.followers.pop(peer).answer
        if call.done():
            return
        if isinstance(answer, Answer):
            call.set_result(answer)
        else:
            call.set_exception(answer)
            call.exception()  # marks it as retrieved: nobody may wait for it any more

    @property
    def _candidates(self) -> list[Candidate]:
        return [self._own.candidate, *(waiting.join.candidate for waiting in self.followers.values())]

    # The group as it stands

    @property
    def has_enough(self) -> bool:
        return len(self) >= self.options.min_group_size

    @property
    def progress(self) -> dict[PeerID, float]:
        """Member → the progress that it claims."""
        claims = {peer: waiting.progress for peer, waiting in self.followers.items()}
        return {self._own.candidate.peer_id: self.own_progress} | claims

    @property
    def seats(self) -> Seats:
        """For which members this peer waits as their leader."""
        bids = {peer: waiting.join.offer.bid for peer, waiting in self.followers.items()}
        return self._lines.seats({self._own.candidate.peer_id: self._own.offer.bid} | bids, self.target)

    def _overdue_at(self, seats: Seats) -> float:
        """When everybody's progress counts, since members with seats alone do not reach the target (loop time)."""
        return self._began + seats.overdue if seats.unwaited else math.inf

    # When it begins

    def renew(self, now: float) -> None:
        """Time was up without a group; the next try begins."""
        self.close_at = max(now, self.opens_at) + self.options.min_matchmaking_time

    def schedule(self, opens_at: float) -> None:
        """The group does not begin before `opens_at`, and time is up no sooner than min_matchmaking_time after that."""
        self.close_at = max(self.close_at, opens_at + self.options.min_matchmaking_time)
        self.opens_at = opens_at

    def due_at(self, now: float, *, missing: bool, full: bool, settled_at: float) -> float:
        """When this group is to begin, or to be looked at again, as things stand (loop time); infinite: not before
        something happens. Time may be up with too few members.

        `missing`: a peer that could still come has not. `full`: no more are to come. `settled_at`: when this peer has
        heard of all candidates, if nothing new happens.
        """
        if now < self.opens_at:
            return self.opens_at
        if self.blocked and now < self.close_at:
            return self.close_at
        if self.target is not None:
            return self._preformed_due_at(now, self.target, missing, settled_at)
        if self.has_enough and full:
            return now
        return min(self.close_at, settled_at) if self.has_enough and not missing else self.close_at

    def _preformed_due_at(self, now: float, target: float, missing: bool, settled_at: float) -> float:
        claims = self.progress
        seats = self.seats if math.fsum(claims.values()) >= target else Seats()  # if all fall short, seats are moot
        unwaited = seats.unwaited if now < self._overdue_at(seats) else ()
        seated = {peer: samples for peer, samples in claims.items() if peer not in unwaited}
        # Without the missing peers there may be no group at all, so they get more than the grace.
        if self._experience.count(seated) < target or (missing and not self.has_enough):
            self._reached_at = math.inf
            return self._overdue_at(seats)
        self._reached_at = min(self._reached_at, now)
        ends = self._reached_at + GRACE if missing else settled_at
        # With too few members it waits on: if it gave up, a peer that comes a moment later would look for it in vain.
        return ends if self.has_enough or now < ends else math.inf
