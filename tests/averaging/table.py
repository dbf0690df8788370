"""Searches around one table: messages travel with random delays, declarations lie on a shared board.

A driver of `Search` without any network, so that thousands of schedules can be tried. Time is a number here. Peers may
sit down again and again, in one bucket or another: all of them share one board, one delay and one set of seats.
"""

from __future__ import annotations

import heapq
import itertools
import math
import random
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from swarmcli.averaging.config import MatchmakingOptions
from swarmcli.averaging.control import RoundRequest
from swarmcli.averaging.matchmaking.candidates import Memory
from swarmcli.averaging.matchmaking.messages import (
    Answer,
    Bucket,
    Candidate,
    GroupInvitation,
    Heartbeat,
    Join,
    Offer,
    search_id,
)
from swarmcli.averaging.matchmaking.search import Search
from swarmcli.network.identity import PeerID

FIRST_PAUSE, LAST_PAUSE = 0.1, 3.0  # between reads of the board; each is twice as long as the one before


def peer_id(number: int) -> PeerID:
    return PeerID(number.to_bytes(32, "big"))


def join_of(candidate: Candidate, patience: float = 1.0, progress: float = 0.0, gathered: bytes = b"") -> Join:
    """What this candidate says when it asks to join."""
    return Join(candidate, Offer(gathered=gathered), {}, 0.0, patience, progress)


@dataclass
class Seat:
    """One peer at the table."""

    search: Search
    alive: bool = True
    doom: str = ""  # the step at which it dies as a leader, see Table.doom
    heard: bool = True  # its death is
    group: list[PeerID] | None = None
    gave_up: str = ""
    began_at: float = 0.0
    formed_at: float = math.nan
    read_took: float = 0.0
    pause: float = FIRST_PAUSE
    wake: float = math.inf


@dataclass
class Table:
    seed: int
    options: MatchmakingOptions = field(default_factory=MatchmakingOptions)
    delay: Callable[[random.Random], float] = lambda rng: rng.uniform(0.005, 0.03)
    read_delay: Callable[[random.Random], float] = lambda rng: rng.uniform(0.03, 0.1)
    now: float = 0.0
    messages: int = 0

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.board: dict[PeerID, Candidate] = {}  # each peer has one declaration, which names its bucket
        self.seats: dict[PeerID, Seat] = {}  # the present one of each peer
        self.on_group: Callable[[Seat], None] = lambda seat: None  # called for the leader of each group that begins
        self._memory: defaultdict[PeerID, Memory] = defaultdict(Memory)
        self._away: dict[tuple[PeerID, Bucket], tuple[PeerID, ...]] = {}  # whose group of that bucket has begun
        self.sees: dict[PeerID, frozenset[PeerID]] = {}  # whose declarations this one finds, if not all
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()

    # What happens at the table

    def sit(self, number: int, *, at: float = 0.0, bits: str = "") -> Seat:
        """A peer begins to look for a group at time `at`."""
        peer = peer_id(number)
        me = Candidate(peer, search_id(at, self.random.randbytes(8)), b"", True, bits=bits)
        memory, connected = self._memory[peer], self._connected(peer)
        search = Search(join_of(me), memory, self.options, RoundRequest(), now=at, connected=connected)
        seat = self.seats[peer] = Seat(search, began_at=at)
        self._at(at, lambda: self._begin(seat))
        return seat

    def hold(self, number: int, bits: str = "") -> None:
        """A peer declares itself and does not look for a group yet."""
        peer = peer_id(number)
        self.board[peer] = Candidate(peer, bytes(16), b"", True, bits=bits, looking=False)

    def rest(self, number: int, bits: str = "") -> None:
        """A peer whose group has begun declares in which bucket it will look next; others read it a little later."""
        seat = self.seats[peer_id(number)]
        me = replace(seat.search.me, bits=bits, looking=False)
        self._away[me.peer_id, seat.search.me.bucket] = tuple(seat.group or ())
        self._memory[me.peer_id].note_present(seat.group or ())
        for mate in seat.group or ():
            seat.search.known.finish(mate)
        self._at(self.now + self.read_delay(self.random) / 2, lambda: self._declare(me))

    def _declare(self, candidate: Candidate) -> None:
        known = self.board.get(candidate.peer_id)
        if known is None or known.search <= candidate.search:
            self.board[candidate.peer_id] = candidate

    def kill(self, number: int, at: float, *, heard: bool = True) -> None:
        """A peer dies; with `heard` those whom it met notice at once, otherwise it is just silent."""
        seat = self.seats[peer_id(number)]
        seat.heard = heard
        self._at(at, lambda: self._die(seat))

    def doom(self, number: int, step: str, *, heard: bool) -> None:
        """A peer dies when it is first "asked", has "accepted" half of the others, is "closing" its group before it
        told anybody, or has told "half" of its members."""
        seat = self.seats[peer_id(number)]
        seat.doom, seat.heard = step, heard

    def _die(self, seat: Seat) -> None:
        seat.alive = False
        for other in self.seats.values() if seat.heard else ():
            other.search.on_lost(seat.search.me.peer_id, self.now)
            self._step(other)

    def later(self, seconds: float, happen: Callable[[], None]) -> None:
        self._at(self.now + seconds, happen)

    def run(self, until: float = 60.0) -> None:
        while self._queue and self._queue[0][0] <= until:
            self.now, _, happen = heapq.heappop(self._queue)
            happen()
        self.now = until

    @property
    def groups(self) -> list[list[PeerID]]:
        """The groups that began, by their leaders' lists."""
        return [seat.group for peer, seat in self.seats.items() if seat.group and seat.group[0] == peer]

    # How the searches are driven

    def _at(self, when: float, happen: Callable[[], None]) -> None:
        heapq.heappush(self._queue, (when, next(self._numbers), happen))

    def _send(self, to: Seat | None, happen: Callable[[], None]) -> None:
        self.messages += 1

        def arrive() -> None:
            if to is not None and to.alive:
                happen()
                self._step(to)

        self._at(self.now + self.delay(self.random), arrive)

    def _connected(self, peer: PeerID) -> Callable[[PeerID], bool]:
        def connected(other: PeerID) -> bool:
            there = self.seats.get(other)
            return there is not None and there.search.leader is not None and there.search.leader.peer_id == peer

        return connected

    def _begin(self, seat: Seat) -> None:
        took = self.read_delay(self.random)
        self._away.pop((seat.search.me.peer_id, seat.search.me.bucket), None)
        self._at(self.now + took / 2, lambda: self._declare(seat.search.me))
        seat.read_took = took
        self._at(self.now + took / 2, lambda: self._read(seat))
        self._step(seat)
        self._at(self.now + 0.25, lambda: self._beat(seat))

    def _read(self, seat: Seat) -> None:
        """Begins a read, whose result is as of now and arrives later."""
        me = seat.search.me
        sees = self.sees.get(me.peer_id, self.board.keys())
        seen = [each for peer, each in self.board.items() if peer in sees and each.bits == me.bits]

        def arrive() -> None:
            if not seat.alive or seat.group is not None or seat.gave_up:
                return
            seat.search.on_read(seen, self.now, seat.read_took)
            self._step(seat)
            self._at(self.now + seat.pause, lambda: self._read(seat))
            seat.pause = min(2 * seat.pause, LAST_PAUSE) if seat.search.settling.calm else FIRST_PAUSE

        self._at(self.now + seat.read_took / 2, arrive)

    def _beat(self, seat: Seat) -> None:
        if not seat.alive or seat.search.members or seat.gave_up:
            return
        me = seat.search.me
        for peer in list(seat.search.gathering.followers):
            self._heartbeat(seat, self.seats[peer], me)
        self._at(self.now + seat.search.gathering.beat_interval, lambda: self._beat(seat))

    def _heartbeat(self, seat: Seat, follower: Seat, me: Candidate) -> None:
        gathering = seat.search.gathering
        beat = Heartbeat(me.search, gathering.patience, len(gathering))

        def arrive() -> None:
            together = follower.search.on_heartbeat(me.peer_id, beat, self.now)
            if not together:
                self._send(seat, lambda: seat.search.gathering.remove(follower.search.me.peer_id))

        self._send(follower, arrive)

    def _step(self, seat: Seat) -> None:
        if not seat.alive or seat.group is not None or seat.gave_up:
            return
        moves = seat.search.moves(self.now)
        if moves.ask is not None:
            self._ask(seat, *moves.ask)
        for peer, leader in moves.invite:
            self._invite(seat, peer, leader)
        for peer in moves.leave:
            self._leave(seat, peer)
        if moves.begin:
            self._announce(seat)
        elif moves.failure is not None:
            seat.gave_up = str(moves.failure)
        elif moves.wake_at < seat.wake or seat.wake <= self.now:
            seat.wake = max(moves.wake_at, self.now + 1e-6)
            self._at(seat.wake, lambda: self._step(seat))

    def _leave(self, seat: Seat, peer: PeerID) -> None:
        me, left = seat.search.me, self.seats.get(peer)
        self._send(left, lambda: left and left.search.on_leave(me.peer_id, me.search, self.now))

    def _ask(self, seat: Seat, peer: PeerID, join: Join) -> None:
        me, other = seat.search.me, self.seats.get(peer)
        answered: list[bool] = []

        def receive() -> None:
            assert other is not None
            answer = None
            if other.doom == "asked":
                return self._die(other)
            if (mates := self._away.get((peer, me.bucket))) is not None:
                answer = Answer("begun", gone=mates)
            elif self._looks(other, me) and (other.group is not None or other.wake < math.inf):
                answer = other.search.on_join(join, self.now)
            self._send(seat, lambda: settle(answer))
            if other.doom == "accepted" and 2 * len(other.search.gathering) >= len(self.seats):
                self._die(other)

        def settle(answer: Answer | None) -> None:
            answered.append(True)
            if answer is None:
                seat.search.on_refused(peer)
            else:
                seat.search.on_answer(peer, answer, self.now)

        self._send(other, receive)
        self._expire(seat, peer, answered)

    def _invite(self, seat: Seat, peer: PeerID, to: Candidate) -> None:
        other = self.seats.get(peer)
        answered: list[bool] = []

        def receive() -> None:
            assert other is not None
            reply = None
            if (mates := self._away.get((peer, to.bucket))) is not None:
                reply = Answer("begun", gone=mates)
            elif self._looks(other, to):
                reply = other.search.on_invitation(GroupInvitation(seat.search.me, to), self.now)
            self._send(seat, lambda: settle(reply))

        def settle(reply: Answer | None) -> None:
            answered.append(True)
            if reply is None:
                seat.search.on_refused(peer)
            else:
                seat.search.on_reply(peer, reply, self.now)

        self._send(other, receive)
        self._expire(seat, peer, answered)

    def _looks(self, other: Seat, candidate: Candidate) -> bool:
        """Whether this is the present search of a peer, and in the candidate's bucket."""
        me = other.search.me
        return self.seats[me.peer_id] is other and not other.gave_up and me.bucket == candidate.bucket

    def _expire(self, seat: Seat, peer: PeerID, answered: list[bool]) -> None:
        other = self.seats.get(peer)
        refuses = other is not None and not other.alive and other.heard  # whose machine says that nobody is there

        def time_out() -> None:
            if not answered and seat.alive and seat.group is None:
                seat.search.on_lost(peer, self.now)
                self._step(seat)

        self._at(self.now + (2 * self.delay(self.random) if refuses else self.options.request_timeout), time_out)

    def _announce(self, seat: Seat) -> None:
        order = [join.candidate for join in seat.search.followers()]
        members = [seat.search.me.peer_id, *(candidate.peer_id for candidate in order)]
        seat.group, seat.formed_at = members, self.now
        told = {"closing": 0, "half": len(order) // 2}.get(seat.doom, len(order))
        for candidate in order[:told]:
            other = self.seats[candidate.peer_id]
            self._send(other, lambda other=other, candidate=candidate: self._begun(seat, other, candidate, members))
        if seat.doom:
            self._die(seat)
        self.on_group(seat)

    def _begun(self, leader: Seat, seat: Seat, candidate: Candidate, members: list[PeerID]) -> None:
        if seat.search.on_begin(candidate.search, members, waited_in_vain=leader.search.waited_in_vain):
            seat.group, seat.formed_at = members, self.now
            for peer in seat.search.forsaken():
                self._leave(seat, peer)
