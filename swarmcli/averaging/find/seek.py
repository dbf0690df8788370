"""The follower's side: its call to a leader, which stays open until the group begins, and what it checks then."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from typing import Any

import msgspec

from swarmcli.averaging.config import MatchmakingOptions
from swarmcli.averaging.control import StepControl
from swarmcli.averaging.find.lobby import Lobby, beat_interval
from swarmcli.averaging.find.messages import METHODS, Answer, Beat, Candidate, Join, Pulse, method_name, place_in
from swarmcli.averaging.group import Group, Member
from swarmcli.averaging.weights import Experience
from swarmcli.network.endpoint import Endpoint
from swarmcli.network.identity import PeerID
from swarmcli.network.loop_thread import loop_time, set_within

ON_THE_CALL = 3600.0  # seconds, after which a follower's call is made anew
BEAT_TRIPS = 10.0  # round trips that the answer to a beat may take, beside request_timeout
MIN_PUSH = 0.05  # seconds between two reports of progress …
PUSHES_PER_SECOND = 100.0  # … and from all followers of a leader together
OVERDUE = 0.75  # seconds after the end of the time, at which a leader that could have begun must have
MAX_RENEWALS = 3  # times that a leader with too few members keeps its followers for another try


class LeaderCall:
    """One peer's call to its leader. `leader` is None while there is none; it `has` so many members in its group, as it
    last said (0: it has not said that this peer is in it), and why it cannot begin (`unreduced`: nobody can reduce)."""

    def __init__(
        self,
        own: Join,
        lobby: Lobby,
        options: MatchmakingOptions,
        control: StepControl,
        endpoint: Endpoint,
        prefix: str,
    ) -> None:
        self.leader: Candidate | None = None
        self.has, self.unreduced = 0, ""
        self.progress_due = asyncio.Event()  # set when there is progress to tell
        self._own, self._lobby, self._options, self._control = own, lobby, options, control
        self._endpoint, self._prefix = endpoint, prefix
        self._call: asyncio.Task[Answer] | None = None
        self._renewals = 0  # how often its time was up with too few members
        self._scheduled: float | None = None

    async def stay(self, leader: Candidate) -> Answer | str:
        """Calls a leader, and returns its answer, that it is "lost" or "overdue", or "" if this peer has hung up.

        Raises NetworkError.
        """
        peer = leader.peer_id
        self.leader, self.has = leader, 0
        self._endpoint.learn(peer, leader.addresses)
        self._call = call = asyncio.ensure_future(self.ask(peer, leads=False, timeout=ON_THE_CALL))
        beats = asyncio.ensure_future(self._keep_beating(peer))
        try:
            await asyncio.wait({call, beats}, return_when=asyncio.FIRST_COMPLETED)
            if call.done():
                return "" if call.cancelled() else call.result()
            return beats.result()
        finally:
            self.leader = self._call = None
            for task in (call, beats):
                task.cancel()
            await asyncio.wait({call, beats})

    def hang_up(self, peer: PeerID) -> None:
        """Ends the call if it is to this peer."""
        if self._call is not None and self.leader is not None and self.leader.peer_id == peer:
            self._call.cancel()

    async def ask(self, peer: PeerID, *, leads: bool, timeout: float) -> Answer:
        """Asks to follow a peer, or (`leads`) tells it that this one leads. Raises NetworkError."""
        patience, progress = max(self._lobby.close_at - loop_time(), 0.0), self._lobby.own_progress
        join = msgspec.structs.replace(self._own, patience=patience, progress=progress, leads=leads)
        answer: Answer = await self._send(peer, join, timeout)
        return answer

    def patience(self, peer: PeerID) -> float:
        """Seconds that an answer to a beat, or a beat, may take."""
        return max(self._options.request_timeout, BEAT_TRIPS * (self._endpoint.round_trip(peer) or 0.0))

    def take_from_control(self) -> None:
        """Heeds what the user has reported and scheduled."""
        self._lobby.own_progress = self._control.progress
        scheduled = self._control.scheduled_time
        if scheduled is not None and scheduled != self._scheduled:
            self._scheduled = scheduled
            self._lobby.schedule(loop_time() + scheduled - self._endpoint.clock.now())

    async def _keep_beating(self, leader: PeerID) -> str:
        """Tells the leader this peer's progress, and hears that it lives. Returns why this peer is to hang up."""
        pause = beat_interval(0)
        while True:
            await set_within(self.progress_due, pause)
            self.progress_due.clear()
            self.take_from_control()
            beat = Beat(self._own.candidate.search, self._control.progress)
            pulse: Pulse = await self._send(leader, beat, self.patience(leader))
            self.has, self.unreduced = pulse.members, pulse.unreduced
            now = loop_time()
            if now >= self._overdue_at(now):
                return "overdue" if self.has >= self._options.min_group_size and not self.unreduced else "lost"
            # This pause ends at once when this peer stops to wait for its group.
            pushed = max(MIN_PUSH, pulse.members / PUSHES_PER_SECOND)
            await set_within(self._control.urgent, pushed)
            self._control.urgent.clear()
            pause = beat_interval(pulse.members) - pushed

    def _overdue_at(self, now: float) -> float:
        """When a leader that does not begin has held this peer for too long."""
        if self._lobby.target is not None:
            return math.inf
        too_few = self._control.request.allow_retries and self.has < self._options.min_group_size
        if too_few and now >= self._lobby.close_at and self._renewals < MAX_RENEWALS:
            self._lobby.renew(now)  # the leader looks on, and so does this peer
            self._renewals += 1
        return self._lobby.close_at + OVERDUE

    async def _send(self, peer: PeerID, message: Join | Beat, timeout: float) -> Any:
        """Sends a message to the same averager at another peer and returns the answer."""
        kind = type(message)
        method = method_name(self._prefix, kind)
        return await self._endpoint.call(peer, method, message, METHODS[kind][1], timeout=timeout)


def what_is_wrong(group: Group, leader: PeerID, own: Join, control: StepControl, experience: Experience) -> str:
    """Why this peer takes no part in the group of this leader, which it has asked with `own`; "" if it does."""
    me, queue = own.candidate, control.request.queue
    if group.leader != leader or group.tag != me.tag or me.peer_id not in group:
        return "it began another group than that of its followers"
    entry = group.members[group.index_of(me.peer_id)]
    # If a leader could bring this peer into an old group again, after a restart or from another averager, this peer
    # would sign two unlike values under one id, which is evidence against it.
    if entry.search != me.search or not group.has_listed(group.group_id, group.listed):
        return "it began an old group, or did not sign it"
    if not _is_as_offered(entry, own, control.progress):
        return "it listed this peer otherwise than offered"
    if math.fsum(group.claims.values()) < (control.request.target or 0.0):
        return "it began a group without enough samples"
    if not _are_in_turn(group, queue):
        return "it listed its members out of turn"
    if not experience.agrees(group, queue):
        return "it listed other bounds on weights than follow from the last round"
    return ""


def _is_as_offered(entry: Member, own: Join, progress: float) -> bool:
    """Whether the leader lists this peer as it has offered. Otherwise a trainer listed as an auxiliary would get no
    average, one with an altered bid no seat, and one listed as undialable would meet no other member."""
    me, offer = own.candidate, own.offer
    said = entry.listening, entry.addresses, entry.standing, entry.auxiliary, entry.gathered, entry.bid
    offered = me.listening, me.addresses, me.standing, offer.auxiliary, offer.gathered, offer.bid
    as_told = entry.claim <= progress and (entry.bandwidth == 0 or offer.bandwidth != 0)
    return said == offered and as_told


def _are_in_turn(group: Group, queue: Sequence[PeerID]) -> bool:
    """Whether the leader lists the followers as they rank here, so that they lead in turn. Newcomers come last, in any
    order. A leader that is a newcomer knows no order: it may not lead members of that round that can lead."""
    leader, *others = group.members
    ranks = [(not each.dialable, place_in(queue, each.peer_id, each.standing)) for each in others]
    if queue and not leader.standing:
        return not any(each.standing and each.dialable for each in others)
    return not queue or ranks == sorted(ranks)
