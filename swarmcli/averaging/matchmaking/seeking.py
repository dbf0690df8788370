"""Drives one search for a group: declares, reads, asks, invites, and keeps in touch with leader and followers."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any, TypeAlias

from swarmcli.averaging.control import StepControl
from swarmcli.averaging.group import Group
from swarmcli.averaging.matchmaking.candidates import Candidate, differing_terms, why_nobody_leads
from swarmcli.averaging.matchmaking.contact import Contact
from swarmcli.averaging.matchmaking.declarations import Board
from swarmcli.averaging.matchmaking.matchmaking import Search
from swarmcli.averaging.matchmaking.meeting import (
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
from swarmcli.averaging.matchmaking.moves import Moves, Offer
from swarmcli.averaging.matchmaking.post import Post
from swarmcli.averaging.matchmaking.watching import Conflicts, Watches
from swarmcli.errors import (
    CallRefused,
    MatchmakingError,
    NetworkError,
    NoReducerError,
    RoundMissed,
    SwarmError,
    UnknownMethod,
)
from swarmcli.network.identity import PeerID

FIRST_PAUSE = 0.1  # seconds at most between the first two reads of the declarations; each pause is twice the last …
LAST_PAUSE = 4.0  # … up to this
LAST_MOMENT = 1.0  # seconds before the end of the time in which a group without a reducer ends the search

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
        self._read_due = asyncio.Event()
        self._watches = Watches(post.endpoint, self._on_lost)
        self._contact = Contact(
            search, post, control, spawn=self._spawn, wake=self._wake.set, not_answered=self._not_answered
        )
        self._conflicts = Conflicts(post.endpoint.events)
        self._quits_at = self._loop.time() + search.options.min_matchmaking_time  # see _check_terms
        self._scheduled: float | None = None
        self._running: dict[asyncio.Task[None], None] = {}
        self._jobs: asyncio.TaskGroup

    async def run(self, close: Closer) -> Group:
        """Looks until there is a group. `close` draws it up from the search if this peer comes to lead.

        Raises MatchmakingError, NoReducerError, FingerprintError. However it ends, the leader and the followers of a
        group that did not begin are told.
        """
        for peer in list(self.search.crew):  # whoever is gone is not expected either
            self._watches.add(peer)
        failure: SwarmError | None = None
        self._control.listen(self._control_changed)
        try:
            async with asyncio.TaskGroup() as self._jobs:
                for job in (self._keep_declared(), self._contact.keep_followers(), self._contact.push_progress()):
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
        return self._contact.on_heartbeat(peer, message)

    def on_progress(self, peer: PeerID, message: Progress) -> Pulse:
        together = self.search.on_progress(peer, message.progress)
        self._wake.set()
        return Pulse(together)

    def on_leave(self, peer: PeerID, message: Leave) -> None:
        self.search.on_leave(peer, message.search, self._loop.time())
        self._wake.set()

    def on_begin(self, group: Group, search: bytes, waited_in_vain: bool) -> bool:
        """A leader begins its group. Returns whether this peer takes part, with that search of it."""
        own = self.search.me
        valid = own.peer_id in group and group.tag == own.tag
        mates = (member.peer_id for member in group.members)
        if not valid or not self.search.on_begin(group.leader, search, mates, waited_in_vain=waited_in_vain):
            return False
        self.group = group
        self._wake.set()
        return True

    # Steering

    async def _drive(self, close: Closer) -> None:
        """Carries out the moves of the search until there is a group. Raises what `run` raises."""
        followed = None
        while self.group is None:
            self._wake.clear()
            self._take_from_control()
            if self._is_unreduced():  # before the search, its time being up, begins another try
                raise self.failure("")
            moves = self.search.moves(self._loop.time())
            self._carry_out(moves)
            if moves.begin:
                self._begin(close)
                continue
            if moves.missed:
                raise RoundMissed("the round has begun without this peer")
            self._check_terms()
            if moves.give_up:
                raise self.failure(moves.give_up)
            if followed is not None and self.search.leader is None:
                self._read_due.set()
            followed = self.search.leader
            await self._sleep_until(moves.wake_at)

    def _carry_out(self, moves: Moves) -> None:
        if moves.ask is not None:
            self._spawn(self._ask(moves.ask, moves.stranded))
        for candidate in moves.invite:
            self._spawn(self._invite(candidate.peer_id, self.search.me))
        for peer in moves.redirect:
            self._watches.discard(peer)
            if self.search.leader is not None:
                self._spawn(self._invite(peer, self.search.leader))
        for peer in moves.leave:
            self._watches.discard(peer)
            self._post.tell_leaving(peer, Leave(self.search.me.search))

    def _begin(self, close: Closer) -> None:
        """Begins the group, or waits on for one more member if nobody in it can reduce and there is time."""
        try:
            self.group = close(self.search)
        except NoReducerError as error:
            if not self.search.reopen(str(error), self._loop.time()):
                raise
            return
        for peer, follower in self.search.gathering.followers.items():
            self._post.tell_begin(peer, follower.candidate.search, self.group, self.search.waited_in_vain)

    def _is_unreduced(self) -> bool:
        """Whether the last leader gave up for want of a reducer, and there is hardly any time left to find another."""
        late = self._loop.time() > self.search.gathering.close_at - LAST_MOMENT
        return bool(self._contact.unreduced) and self.search.leader is None and late

    def failure(self, reason: str) -> SwarmError:
        """The error that says why no group came together."""
        blocked = self.search.gathering.blocked or self._contact.unreduced
        search = self.search
        present = search.roll.present(self._loop.time())
        unreduced = blocked or why_nobody_leads(search.me, present, search.options)
        return NoReducerError(unreduced) if unreduced else MatchmakingError(reason)

    def _part(self) -> None:
        """Lets go of everyone; those who still count on this peer for a group are told."""
        self._watches.clear()
        for peer in self.search.forsaken():
            self._post.tell_leaving(peer, Leave(self.search.me.search))

    def _take_from_control(self) -> None:
        gathering = self.search.gathering
        gathering.own_progress = self._control.progress
        scheduled = self._control.scheduled_time
        if scheduled is not None and scheduled != self._scheduled:
            self._scheduled = scheduled
            gathering.schedule(self._loop.time() + scheduled - self._post.endpoint.clock.now())

    def _control_changed(self) -> None:
        self._contact.progress_due.set()
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

    async def _ask(self, candidate: Candidate, stranded: bool) -> None:
        peer, search = candidate.peer_id, self.search
        patience = max(search.gathering.close_at - self._loop.time(), 0.0)
        offer = self.offer
        progress = self._control.progress
        speeds = (offer.bandwidth, offer.measured)
        joining = Joining(patience, progress, stranded, *speeds, offer.auxiliary, offer.gathered)
        self._post.learn(candidate)
        try:
            answer = await self._post.join(peer, Join(search.me, joining, offer.terms, offer.since))
        except NetworkError as error:
            self._not_answered(peer, error)
            return
        if answer.verdict == "terms":
            self._note_conflict(peer, answer.keys, answer.since)
            return
        self._conflicts.agreed()
        search.on_answer(peer, answer, self._loop.time())
        if search.leader is not None and search.leader.peer_id == peer:
            self._watches.add(peer)
            self._contact.progress_due.set()
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
            self.search.on_lost(peer, self._loop.time())
        logger.debug("%s cannot be met: %s", peer.short, error)
        self._wake.set()

    async def _keep_declared(self) -> None:
        """Declares this peer, then reads who else has: often at first, and not at all while it follows somebody."""
        started, pause = self._loop.time(), 0.0
        await self._board.publish()
        while True:
            if self.search.leader is None:
                declared = await self._board.read(self.search.me.bits)
                self.search.on_read(declared, self._loop.time(), self._loop.time() - started)
                self._wake.set()
            settling = self.search.settling
            if self._read_due.is_set() or not settling.calm:
                pause = 0.0
            self._read_due.clear()
            pause = min(2 * pause, LAST_PAUSE) or min(FIRST_PAUSE, settling.trip)
            with suppress(TimeoutError):
                async with asyncio.timeout(pause):
                    await self._read_due.wait()

    # Who is lost, and who differs

    def _on_lost(self, peer: PeerID) -> None:
        self.search.on_lost(peer, self._loop.time())
        self._wake.set()

    def _note_conflict(self, peer: PeerID, keys: tuple[str, ...], since: float) -> None:
        self._conflicts.note(peer, keys, since)
        self.search.on_refused(peer)
        self._wake.set()

    def _check_terms(self) -> None:
        """Raises FingerprintError if this peer, a newcomer, is in a run that has other terms.

        Nobody whom it asked may have its terms, and nobody may be left to ask. Two who were here before must agree;
        a single one is believed when the time is up. So it takes more than one word to drive a newcomer away.
        """
        search, now = self.search, self._loop.time()
        alone = search.leader is None and not search.gathering.followers
        if not self.offer.newcomer or not alone or now < search.settling.settled_at:
            return
        if self._conflicts.cover(search.roll.present(now)):
            self._conflicts.check(self.offer.since, enough=1 if now >= self._quits_at else 2)
