"""Keeps a searching peer in touch with its leader and its followers: heartbeats, and progress towards the target."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any

from swarmcli.averaging.control import StepControl
from swarmcli.averaging.matchmaking.matchmaking import Search
from swarmcli.averaging.matchmaking.meeting import MAX_REASON, Heartbeat, Progress, Pulse
from swarmcli.averaging.matchmaking.post import Post
from swarmcli.errors import NetworkError
from swarmcli.network.identity import PeerID

PUSHES_PER_SECOND = 100.0  # of progress, that a leader gets from all of its followers together
MIN_PUSH_INTERVAL = 0.05  # seconds
ROUND_TRIPS = 10.0  # that a heartbeat may take at least before a follower is given up

logger = logging.getLogger(__name__)


class Contact:
    """The heartbeats and the progress of one search."""

    def __init__(
        self,
        search: Search,
        post: Post,
        control: StepControl,
        *,
        spawn: Callable[[Coroutine[Any, Any, None]], None],
        wake: Callable[[], None],
        not_answered: Callable[[PeerID, NetworkError], None],
    ) -> None:
        """`spawn` owns the calls, `wake` lets the search move, `not_answered` hears of followers that are silent."""
        self.progress_due = asyncio.Event()
        self._search = search
        self._post = post
        self._control = control
        self._spawn = spawn
        self._wake = wake
        self._not_answered = not_answered
        self._loop = asyncio.get_running_loop()
        self._beating: set[PeerID] = set()
        self._group_size = 1  # as the leader last said
        self.unreduced = ""  # why nobody in the leader's group can reduce, as it last said

    def on_heartbeat(self, peer: PeerID, message: Heartbeat) -> Pulse:
        now = self._loop.time()
        together = self._search.on_heartbeat(peer, message.search, message.patience, now, members=message.members)
        if together:
            self._group_size, self.unreduced = message.members, message.unreduced
        return Pulse(together, self._control.progress)

    async def keep_followers(self) -> None:
        """Heartbeats to every follower, so that it knows that somebody leads it, and this peer that it is there."""
        while True:
            gathering = self._search.gathering
            blocked = gathering.blocked[:MAX_REASON]
            beat = Heartbeat(self._search.me.search, gathering.patience, len(gathering), blocked)
            for peer in list(gathering.followers):
                if peer not in self._beating:
                    self._spawn(self._beat(peer, beat))
            await asyncio.sleep(gathering.beat_interval)

    async def _beat(self, peer: PeerID, beat: Heartbeat) -> None:
        self._beating.add(peer)
        usual = self._post.endpoint.round_trip(peer) or 0.0
        try:
            pulse = await self._post.beat(peer, beat, max(beat.patience, ROUND_TRIPS * usual))
        except NetworkError as error:
            self._not_answered(peer, error)
        else:
            if pulse.together:
                self._search.on_progress(peer, pulse.progress)
            else:
                self._search.gathering.remove(peer)
            self._wake()
        finally:
            self._beating.discard(peer)

    async def push_progress(self) -> None:
        """Tells the leader at once, and then again after a pause that grows with the group."""
        while True:
            await self.progress_due.wait()
            self.progress_due.clear()
            leader = self._search.leader
            if leader is None or self._search.gathering.target is None:
                continue
            message = Progress(self._search.me.search, self._control.progress)
            try:
                pulse = await self._post.push(leader.peer_id, message)
            except NetworkError as error:
                # Heartbeats and the watch on the connection decide about the leader; its successor is told anew.
                logger.debug("the leader did not take the progress: %s", error)
            else:
                if not pulse.together:
                    self._search.on_parted(leader.peer_id, self._loop.time())
                    self._wake()
            await self._pause(max(MIN_PUSH_INTERVAL, self._group_size / PUSHES_PER_SECOND))

    async def _pause(self, seconds: float) -> None:
        """Between two messages of progress; over at once when this peer stops to wait for its group."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._control.urgent.wait()
        self._control.urgent.clear()
