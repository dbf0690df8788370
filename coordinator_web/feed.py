"""Keeps open pages up to date: everything first, then what is new, as server-sent events.

Every connection begins with everything, so a page that lost its server needs no memory of what it missed, and a
server that was started anew needs none of its pages.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import msgspec

from swarmcli.run import views
from swarmcli.run.source import DashboardSource

INTERVAL = 0.5  # seconds between two looks at the source
VIEWERS = 32  # pages open at once
RETRY = 1000  # milliseconds until a page that lost its connection tries again


def encode(value: Any) -> bytes:
    """JSON of any value of `source`; numbers that JSON does not have become null."""
    return msgspec.json.encode(value)


class Feed:
    """Streams of one source. The source is asked in worker threads, so a slow disk stops no loop."""

    def __init__(self, source: DashboardSource, interval: float = INTERVAL) -> None:
        self._source = source
        self._interval = interval
        self._viewers = 0
        self._closing = asyncio.Event()

    def close(self) -> None:
        """Ends all streams within an interval; to be called on the loop that serves them."""
        self._closing.set()

    @property
    def full(self) -> bool:
        """Whether as many pages are open as should be."""
        return self._viewers >= VIEWERS

    async def stream(self) -> AsyncIterator[bytes]:
        """The state always comes, and comes last, so a page hears something in every interval and can tell a quiet run
        from a lost connection."""
        self._viewers += 1
        round_, event = 0, 0  # ids up to which the page has them
        try:
            yield b"retry: %d\n\n" % RETRY
            yield _message("begin", None)  # the page forgets what it had
            while True:
                rounds, events, state = await asyncio.to_thread(self._look, round_, event)
                if rounds.rows:
                    round_ = rounds.rows[-1].id
                    yield _message("rounds", rounds)
                if events:
                    event = events[-1].id
                    yield _message("events", events)
                yield _message("state", state)
                if await self._closed_within(self._interval):
                    return
        finally:
            self._viewers -= 1

    def _look(self, round_: int, event: int) -> tuple[Any, Any, Any]:
        """Rounds and events above these ids, oldest first, and the state."""
        status = self._source.look()
        names = {peer.peer_id: peer.name for peer in status.peers}
        rounds = views.page_of_rounds(self._source.rounds(after=round_), names)
        return rounds, self._source.events(after=event), self._source.overview_of(status)

    async def _closed_within(self, seconds: float) -> bool:
        try:
            await asyncio.wait_for(self._closing.wait(), seconds)
        except TimeoutError:
            return False
        return True


def _message(name: str, value: Any) -> bytes:
    return b"event: %s\ndata: %s\n\n" % (name.encode(), encode(value))
