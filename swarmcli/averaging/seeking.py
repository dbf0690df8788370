"""Drives one search for a group: declares, reads, asks, invites, and keeps in touch with leader and followers."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any, TypeAlias

from swarmcli.averaging.candidates import Candidate, differing_terms
from swarmcli.averaging.control import StepControl
from swarmcli.averaging.declarations import Board
from swarmcli.averaging.group import Group
from swarmcli.averaging.matchmaking import LIFETIME, Search
from swarmcli.averaging.meeting import (
    Answer,
    Heartbeat,
    Invitation,
    Join,
    Joining,
    Leave,
    Progress,
    Pulse,
    Reply,
)
from swarmcli.averaging.moves import Moves, Offer
from swarmcli.averaging.post import Post
from swarmcli.averaging.watching import Conflicts, Watches
from swarmcli.errors import (
    CallRefused,
    MatchmakingError,
    NetworkError,
    SwarmError,
    UnknownMethod,
)
from swarmcli.network.identity import PeerID

FIRST_PAUSE = 0.1  # seconds between the first two reads of the declarations; each pause is twice the one before …
LAST_PAUSE = 4.0  # … up to this
BEATS_PER_SECOND = 16.0  # that a leader sends to all of its followers together
PUSHES_PER_SECOND = 100.0  # of progress, that a leader gets from all of its followers together
MIN_PUSH_INTERVAL = 0.05  # seconds

logger = logging.getLogger(__name__)

Closer: TypeAlias = Callable[[Search], Group]


class Seeker:
    """One search under way at this peer. `run` gives the group, or raises why there is none."""

    def __init__(self, search: Search, post: Post, board: Board, offer: Offer, control: StepControl) -> None:
        self.search = search
        self.offer = offer
        self.group: Group | None = None
        self._post = post
        self._board = board
        self._control = control
        self._loop = asyncio.get_running_loop()
        self._wake = asyncio.Event()
        self._progress_due = asyncio.Event()
        self._read_due = asyncio.Event()
        self._watches = Watches(post.endpoint, self._on_lost)
        self._beating: set[PeerID] = set()
        self._conflicts = Conflicts(post.endpoint.events)
        self._group_size = 1  # as the leader last said
        self._scheduled: float | None = None
        self._running: dict[asyncio.Task[None], None] = {}
        self._jobs: asyncio.TaskGroup

    async def run(self, close: Closer) -> Group:
        """Looks until there is a group. `close` draws it up from the search if this peer comes to lead.

        Raises MatchmakingError, FingerprintError, and the SwarmError that `close` raises. However it ends, the
        leader and the followers of a group that did not begin are told.
        """
        for peer in self.search.gathering.crew:  # whoever is gone is not expected either
            self._watches.add(peer)
        failure: SwarmError | None = None
        self._control.listen(self._control_changed)
        try:
            async with asyncio.TaskGroup() as self._jobs:
                for job in (self._keep_declared(), self._keep_followers(), self._push_progress()):
                    self._spawn(job)
                try:
                    await self._drive(close)
                except SwarmError as error:
                    failure = error
                for task in list(self._running):
                    task.cancel()
        finally:
            self._control.listen(None)
            self._part()
        if failure is not None:
            raise failure
        assert self.group is not None
        return self.group

    # What others say

    def on_join(self, peer: PeerID, message: Join) -> Answer:
        keys = differing_terms(self.offer.terms, message.terms)
        if keys:
            self._note_conflict(peer, keys, message.since)
            return Answer("terms", keys=keys, since=self.offer.since)
        self._post.learn(message.candidate)
        answer = self.search.on_join(message.candidate, message.joining, self._loop.time())
        if answer.verdict == "accepted":
            self._watches.add(peer)
        self._wake.set()
        return answer

    def on_invitation(self, message: Invitation) -> Reply:
        self._post.learn(message.sender)
        self._post.learn(message.to)
        reply = self.search.on_invitation(message.sender, message.to, self._loop.time())
        self._wake.set()
        return reply

    def on_heartbeat(self, peer: PeerID, message: Heartbeat) -> Pulse:
        together = self.search.on_heartbeat(peer, message.search, message.patience, self._loop.time())
        if together:
            self._group_size = message.members
        return Pulse(together, self._control.progress)

    def on_progress(self, peer: PeerID, message: Progress) -> Pulse:
        together = self.search.on_progress(peer, message.progress)
        self._wake.set()
        return Pulse(together)

    def on_leave(self, peer: PeerID, message: Leave) -> None:
        self.search.on_leave(peer, message.search, self._loop.time())
        self._wake.set()

    def on_begin(self, group: Group, search: bytes) -> bool:
        """A leader begins its group. Returns whether this peer takes part, with that search of it."""
        own = self.search.me
        valid = own.peer_id in group and group.tag == own.tag
        if not valid or not self.search.on_begin(group.leader, search):
            return False
        self.group = group
        self._wake.set()
        return True

    # Steering

    async def _drive(self, close: Closer) -> None:
        """Carries out the moves of the search until there is a group. Raises MatchmakingError, FingerprintError."""
        followed = None
        while self.group is None:
            self._wake.clear()
            self._take_from_control()
            moves = self.search.moves(self._loop.time())
            self._carry_out(moves)
            if moves.begin:
                self.group = self._begin(close)
                return
            self._check_terms()
            if moves.give_up:
                raise MatchmakingError(moves.give_up)
            if followed is not None and self.search.leader is None:
                self._read_due.set()
            followed = self.search.leader
            await self._sleep_until(moves.wake_at)

    def _carry_out(self, moves: Moves) -> None:
        if moves.ask is not None:
            self._spawn(self._ask(moves.ask))
        for candidate in moves.invite:
            self._spawn(self._invite(candidate.peer_id, self.search.me))
        for peer in moves.redirect:
            self._watches.discard(peer)
            if self.search.leader is not None:
                self._spawn(self._invite(peer, self.search.leader))
        for peer in moves.leave:
            self._watches.discard(peer)
            self._post.tell_leaving(peer, Leave(self.search.me.search))

    def _begin(self, close: Closer) -> Group:
        group = close(self.search)
        for peer, follower in self.search.gathering.followers.items():
            self._post.tell_begin(peer, follower.candidate.search, group)
        return group

    def _part(self) -> None:
        """Lets go of everyone; those who still count on this peer for a group are told."""
        self._watches.clear()
        leads = self.group is not None and self.group.leader == self.search.me.peer_id
        forsaken = [] if leads else list(self.search.gathering.followers)
        if self.group is None and self.search.leader is not None:
            forsaken.append(self.search.leader.peer_id)
        forsaken += [peer for peer in self.search.unanswered if self.group is None or peer != self.group.leader]
        for peer in forsaken:
            self._post.tell_leaving(peer, Leave(self.search.me.search))

    def _take_from_control(self) -> None:
        gathering = self.search.gathering
        gathering.own_progress = self._control.progress
        scheduled = self._control.scheduled_time
        if scheduled is not None and scheduled != self._scheduled:
            self._scheduled = scheduled
            gathering.schedule(self._loop.time() + scheduled - self._post.endpoint.clock.now())

    def _control_changed(self) -> None:
        self._progress_due.set()
        self._wake.set()

    async def _sleep_until(self, when: float) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout_at(when):
                await self._wake.wait()

    # Jobs beside it

    def _spawn(self, job: Coroutine[Any, Any, None]) -> None:
        task = self._jobs.create_task(job)
        self._running[task] = None
        task.add_done_callback(lambda _: self._running.pop(task))

    async def _ask(self, candidate: Candidate) -> None:
        peer, search = candidate.peer_id, self.search
        patience = max(search.gathering.close_at - self._loop.time(), 0.0)
        offer = self.offer
        joining = Joining(patience, self._control.progress, offer.bandwidth, offer.auxiliary, offer.gathered)
        self._post.learn(candidate)
        try:
            answer = await self._post.join(peer, Join(search.me, joining, offer.terms, offer.since))
        except NetworkError as error:
            self._not_answered(peer, error)
            return
        if answer.verdict == "terms":
            self._note_conflict(peer, answer.keys, answer.since)
            return
        search.on_answer(peer, answer, self._loop.time())
        if search.leader is not None and search.leader.peer_id == peer:
            self._watches.add(peer)
            self._progress_due.set()
        self._wake.set()

    async def _invite(self, peer: PeerID, to: Candidate) -> None:
        try:
            reply = await self._post.invite(peer, Invitation(self.search.me, to))
        except NetworkError as error:
            self._not_answered(peer, error)
            return
        self.search.on_reply(peer, reply, self._loop.time())
        self._wake.set()

    def _not_answered(self, peer: PeerID, error: NetworkError) -> None:
        if isinstance(error, CallRefused | UnknownMethod):
            self.search.on_refused(peer)
        else:
            self.search.on_no_answer(peer, self._loop.time())
        logger.debug("%s cannot be met: %s", peer.short, error)
        self._wake.set()

    async def _keep_declared(self) -> None:
        """Declares this peer, then reads who else has: often at first, and not at all while it follows somebody."""
        started = self._loop.time()
        declared_until, pause = started, FIRST_PAUSE
        while True:
            if self._loop.time() > declared_until - LIFETIME / 2:
                await self._board.declare(self.search.me, LIFETIME)
                declared_until = self._loop.time() + LIFETIME
            if self.search.leader is None:
                for candidate in await self._board.read():
                    self.search.learn(candidate, self._loop.time())
                self.search.on_read(self._loop.time(), self._loop.time() - started)
                self._wake.set()
            with suppress(TimeoutError):
                async with asyncio.timeout(pause):
                    await self._read_due.wait()
            pause = FIRST_PAUSE if self._read_due.is_set() else min(2 * pause, LAST_PAUSE)
            self._read_due.clear()

    async def _keep_followers(self) -> None:
        """Heartbeats to every follower, so that it knows that somebody leads it, and this peer that it is there."""
        while True:
            followers = list(self.search.gathering.followers)
            interval = max(self._post.timeout / 3, len(followers) / BEATS_PER_SECOND)
            beat = Heartbeat(self.search.me.search, max(self._post.timeout, 3 * interval), 1 + len(followers))
            for peer in followers:
                if peer not in self._beating:
                    self._spawn(self._beat(peer, beat))
            await asyncio.sleep(interval)

    async def _beat(self, peer: PeerID, beat: Heartbeat) -> None:
        self._beating.add(peer)
        try:
            pulse = await self._post.beat(peer, beat)
        except NetworkError as error:
            self._not_answered(peer, error)
        else:
            if pulse.together:
                self.search.on_progress(peer, pulse.progress)
            else:
                self.search.gathering.remove(peer)
            self._wake.set()
        finally:
            self._beating.discard(peer)

    async def _push_progress(self) -> None:
        """Tells the leader at once, and then again after a pause that grows with the group."""
        while True:
            await self._progress_due.wait()
            self._progress_due.clear()
            leader = self.search.leader
            if leader is None or self.search.gathering.target is None:
                continue
            message = Progress(self.search.me.search, self._control.progress)
            try:
                pulse = await self._post.push(leader.peer_id, message)
            except NetworkError as error:
                # Heartbeats and the watch on the connection decide about the leader; its successor is told anew.
                logger.debug("the leader did not take the progress: %s", error)
            else:
                if not pulse.together:
                    self.search.on_parted(leader.peer_id, self._loop.time())
                    self._wake.set()
            await asyncio.sleep(max(MIN_PUSH_INTERVAL, self._group_size / PUSHES_PER_SECOND))

    # Who is lost, and who differs

    def _on_lost(self, peer: PeerID) -> None:
        self.search.on_lost(peer, self._loop.time())
        self._wake.set()

    def _note_conflict(self, peer: PeerID, keys: tuple[str, ...], since: float) -> None:
        self._conflicts.note(peer, keys, since)
        self.search.on_refused(peer)
        self._wake.set()

    def _check_terms(self) -> None:
        """Raises FingerprintError if everyone here has other terms, and somebody was here before this peer."""
        search = self.search
        alone = search.leader is None and not search.gathering.followers
        if self.offer.newcomer and alone and self._conflicts.cover(search.roll.present(self._loop.time())):
            self._conflicts.check(self.offer.since)
