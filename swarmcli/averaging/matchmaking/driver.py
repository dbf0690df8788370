"""Carries out one search for a group: declares, reads, asks, invites, and keeps in touch with leader and followers."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

from swarmcli.averaging.control import StepControl
from swarmcli.averaging.group import Group, Member
from swarmcli.averaging.matchmaking.declarations import Declarations
from swarmcli.averaging.matchmaking.messages import (
    MAX_REASON,
    METHODS,
    Answer,
    Begin,
    GroupInvitation,
    Heartbeat,
    Join,
    Leave,
    Progress,
    Pulse,
    method_name,
)
from swarmcli.averaging.matchmaking.search import Moves, Search
from swarmcli.errors import CallRefused, NetworkError, NoReducerError, UnknownMethod
from swarmcli.events import PeerRefused
from swarmcli.network.endpoint import Endpoint
from swarmcli.network.identity import PeerID
from swarmcli.network.loop_thread import loop_time, set_within
from swarmcli.network.task_owner import TaskOwner

logger = logging.getLogger(__name__)


class OutdatedError(Exception):
    """This peer's addresses or the doubted peers' seats have changed: it begins another search."""


class SearchDriver:
    """One search under way at this peer. `run` gives the group, or raises why there is none."""

    def __init__(
        self,
        search: Search,
        endpoint: Endpoint,
        prefix: str,
        declarations: Declarations,
        control: StepControl,
        farewells: TaskOwner,
        outdated: Callable[[], bool] = bool,
    ) -> None:
        """`farewells` owns the last messages to others, which may outlive the search. `outdated`: whether another
        search is to replace this one."""
        self.search = search
        self.group: Group | None = None
        self._endpoint, self._prefix, self._declarations = endpoint, prefix, declarations
        self._control, self._farewells, self._outdated = control, farewells, outdated
        self._jobs = TaskOwner()
        self._wake = asyncio.Event()
        self._read_due = asyncio.Event()
        self._progress_due = asyncio.Event()
        self._watched: dict[PeerID, asyncio.Future[str]] = {}  # peer → done when its connection ends
        self._beating: set[PeerID] = set()  # followers whose answer to a heartbeat is awaited
        self._scheduled: float | None = None

    async def run(self, begin: Callable[[], Group]) -> Group:
        """Looks until there is a group. `begin` draws it up if this peer comes to lead.

        Raises MatchmakingError, NoReducerError, FingerprintError, RoundMissed, OutdatedError. However it ends, the
        leader and the followers of a group that did not begin are told.
        """
        self._control.listener = self._on_control
        try:
            self._jobs.keep(self._endpoint.events, self._keep_declared, self._keep_followers, self._push_progress)
            return await self._drive(begin)
        finally:
            self._control.listener = None
            for lost in self._watched.values():
                lost.cancel()
            self._watched.clear()
            self._leave(self.search.forsaken())
            await self._jobs.close()

    async def call(self, peer: PeerID, message: Any, timeout: float | None = None) -> Any:
        """Sends a message to the same averager at another peer and returns the answer. Raises NetworkError."""
        method, answer = method_name(self._prefix, type(message)), METHODS[type(message)][1]
        timeout = timeout or self.search.options.request_timeout
        return await self._endpoint.call(peer, method, message, answer, timeout=timeout)

    def wake(self) -> None:
        """Something has changed that the search does not hear of."""
        self._wake.set()

    # Messages of others

    def hear(self, peer: PeerID, message: Join | GroupInvitation | Heartbeat | Progress | Leave) -> Answer | Pulse:
        """Another peer's message to this one; see messages."""
        search, now = self.search, loop_time()
        self._wake.set()
        match message:
            case Join():
                return search.on_join(message, now)
            case GroupInvitation():
                return search.on_invitation(message, now)
            case Heartbeat():
                return Pulse(search.on_heartbeat(peer, message, now), self._control.progress)
            case Progress():
                return Pulse(search.gathering.report(peer, message.progress))
            case Leave():
                search.on_leave(peer, message.search, now)
                return Pulse(together=False)

    def on_begin(self, group: Group, message: Begin) -> bool:
        """A leader begins its group. Returns whether this peer takes part."""
        own, members = self.search.me, [member.peer_id for member in group.members]
        if own.peer_id not in group or group.tag != own.tag:
            return False
        # If a leader could bring this peer into an old group again, after a restart or from another averager, this peer
        # would sign two unlike values under one id, which is evidence against it.
        entry = group.members[group.index_of(own.peer_id)]
        if entry.search != own.search:
            return False
        signed = group.has_listed(group.group_id, group.listed)
        enough = math.fsum(group.claims.values()) >= (self.search.request.target or 0.0)
        if not (signed and enough and self._is_as_offered(entry) and self.search.is_in_turn(group)):
            self.search.give_up_leader(loop_time())
            self._wake.set()
            return False
        if not self.search.gathering.allows(group, loop_time()):
            return False
        if not self.search.on_begin(message.search, members, waited_in_vain=message.waited_in_vain):
            return False
        self.group = group
        self._wake.set()
        return True

    def _is_as_offered(self, entry: Member) -> bool:
        """Whether the leader lists this peer as it has offered. Otherwise a trainer listed as an auxiliary would get no
        average, one with an altered bid no seat, and one listed as undialable would meet no other member."""
        own, offer = self.search.me, self.search.own.offer
        said = entry.listening, entry.addresses, entry.standing, entry.auxiliary, entry.gathered, entry.bid
        offered = own.listening, own.addresses, own.standing, offer.auxiliary, offer.gathered, offer.bid
        as_told = entry.claim <= self._control.progress and (entry.bandwidth == 0 or offer.bandwidth != 0)
        return said == offered and as_told

    def drop(self, peer: PeerID) -> None:
        """This peer must not be in the group, as a leader, a follower or a candidate."""
        if self.group is None:
            self.search.on_lost(peer, loop_time())
            self.search.on_refused(peer)
            self._wake.set()

    # Steering

    async def _drive(self, begin: Callable[[], Group]) -> Group:
        """Carries out the moves of the search until there is a group. Raises what `run` raises."""
        followed = None
        while self.group is None:
            self._wake.clear()
            if self._outdated():
                raise OutdatedError
            self._take_from_control()
            moves = self.search.moves(loop_time())
            self._carry_out(moves)
            if moves.failure is not None:
                raise moves.failure
            if moves.begin:
                try:
                    self.group = begin()
                except NoReducerError as error:  # no member can reduce: is there time to wait for one more?
                    if not self.search.reopen(str(error), loop_time()):
                        raise
                continue
            self._watch()
            if followed is not None and self.search.leader is None:
                self._read_due.set()
            followed = self.search.leader
            with suppress(TimeoutError):
                async with asyncio.timeout_at(moves.wake_at):
                    await self._wake.wait()
        return self.group

    def _carry_out(self, moves: Moves) -> None:
        for peer, keys in moves.refuse:
            reason = f"its recipe differs from ours in: {', '.join(keys)}"
            self._endpoint.events.emit(PeerRefused(peer.text, reason, what="group"))
        if moves.ask is not None:
            self._jobs.spawn(self._request(*moves.ask, self.search.on_answer))
        for peer, leader in moves.invite:
            self._jobs.spawn(self._request(peer, GroupInvitation(self.search.me, leader), self.search.on_reply))
        self._leave(moves.leave)

    def _watch(self) -> None:
        """The leader, a follower or a mate is lost as soon as its connection ends, or at once if there is none."""
        leader = [self.search.leader.peer_id] if self.search.leader is not None else []
        wanted = {*self.search.gathering.mates, *self.search.gathering.followers, *leader}
        for peer in self._watched.keys() - wanted:
            self._watched.pop(peer).cancel()
        for peer in sorted(wanted - self._watched.keys()):  # sets differ in order from process to process
            lost = self._watched[peer] = self._endpoint.lost(peer)
            lost.add_done_callback(partial(self._on_connection_lost, peer))

    def _on_connection_lost(self, peer: PeerID, lost: asyncio.Future[str]) -> None:
        if self._watched.get(peer) is lost:  # otherwise this was cancelled, or another one watches the peer
            del self._watched[peer]
            self.search.on_lost(peer, loop_time())
            self._wake.set()

    def _take_from_control(self) -> None:
        gathering = self.search.gathering
        gathering.own_progress = self._control.progress
        scheduled = self._control.scheduled_time
        if scheduled is not None and scheduled != self._scheduled:
            self._scheduled = scheduled
            gathering.schedule(loop_time() + scheduled - self._endpoint.clock.now())

    def _on_control(self) -> None:
        """The user has reported progress, or changed the schedule."""
        self._progress_due.set()
        self._wake.set()

    # Jobs beside the moves

    async def _request(
        self, peer: PeerID, message: Join | GroupInvitation, heed: Callable[[PeerID, Answer, float], None]
    ) -> None:
        if (entry := self.search.known.entries.get(peer)) is not None:
            self._endpoint.learn(peer, entry.candidate.addresses)
        try:
            answer: Answer = await self.call(peer, message)
        except NetworkError as error:
            self._on_no_answer(peer, error)
            return
        heed(peer, answer, loop_time())
        self._progress_due.set()  # a new leader does not know this peer's progress yet
        self._wake.set()

    def _leave(self, peers: list[PeerID]) -> None:
        """Tells peers that count on this one for a group that they should not."""
        for peer in peers:
            self._farewells.spawn(self._tell_leaving(peer))

    async def _tell_leaving(self, peer: PeerID) -> None:
        try:
            await self.call(peer, Leave(self.search.me.search))
        except NetworkError as error:
            logger.debug("%s did not hear that this peer has left its group: %s", peer.short, error)

    def _on_no_answer(self, peer: PeerID, error: NetworkError) -> None:
        if isinstance(error, CallRefused | UnknownMethod):
            self.search.on_refused(peer)
        else:
            self.search.on_lost(peer, loop_time())
        logger.debug("%s cannot be met: %s", peer.short, error)
        self._wake.set()

    async def _keep_declared(self) -> None:
        """Declares this peer, then reads the other declarations: often at first, and not while it follows a leader."""
        started, pause = loop_time(), 0.0
        await self._declarations.publish()
        while True:
            if self.search.leader is None:
                declared = await self._declarations.read(self.search.me.bits)
                self.search.on_read(declared, loop_time(), loop_time() - started)
                self._wake.set()
            settling, options = self.search.settling, self.search.options.search
            if self._read_due.is_set() or not settling.calm:
                pause = 0.0
            self._read_due.clear()
            pause = min(2 * pause, options.last_read) or min(options.first_read, settling.trip)
            await set_within(self._read_due, pause)

    async def _keep_followers(self) -> None:
        """Heartbeats to every follower: the follower knows that its leader lives, and this peer that the follower
        does."""
        gathering = self.search.gathering
        blocked = gathering.blocked[:MAX_REASON]
        beat = Heartbeat(self.search.me.search, gathering.patience, len(gathering), blocked)
        for peer in gathering.followers:
            if peer not in self._beating:
                self._jobs.spawn(self._beat(peer, beat))
        await asyncio.sleep(gathering.beat_interval)

    async def _beat(self, peer: PeerID, beat: Heartbeat) -> None:
        self._beating.add(peer)
        trips = self.search.options.search.beat_trips * (self._endpoint.round_trip(peer) or 0.0)
        try:
            pulse: Pulse = await self.call(peer, beat, max(beat.patience, trips))
        except NetworkError as error:
            self._on_no_answer(peer, error)
        else:
            if pulse.together:
                self.search.gathering.report(peer, pulse.progress)
            else:
                self.search.gathering.remove(peer)
            self._wake.set()
        finally:
            self._beating.discard(peer)

    async def _push_progress(self) -> None:
        """Tells the leader this peer's progress at once, and again after a pause that grows with the group."""
        await self._progress_due.wait()
        self._progress_due.clear()
        leader = self.search.leader
        if leader is None or self.search.gathering.target is None:
            return
        try:
            pulse: Pulse = await self.call(leader.peer_id, Progress(self.search.me.search, self._control.progress))
        except NetworkError as error:
            # Heartbeats and the watch on the connection decide about the leader; its successor is told anew.
            logger.debug("the leader did not take the progress: %s", error)
        else:
            if not pulse.together:
                self.search.drop_leader(leader.peer_id, loop_time())
                self._wake.set()
        # The pause ends at once when this peer stops to wait for its group.
        options = self.search.options.search
        pause = max(options.min_push_interval, self.search.leader_has / options.pushes_per_second)
        await set_within(self._control.urgent, pause)
        self._control.urgent.clear()
