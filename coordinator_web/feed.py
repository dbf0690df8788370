"""Keeps open pages up to date: everything first, then what changed, as server-sent events.

Every connection begins with everything, so a page that lost its server needs no memory of what it missed, and a
server that was started anew needs none of its pages.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from swarmcli.events import EpochAdvanced
from swarmcli.run import views
from swarmcli.run.source import DashboardSource
from swarmcli.run.values import PeerStatus


@dataclass(frozen=True, slots=True)
class FeedOptions:
    """How open pages are kept up to date."""

    interval: float = 0.5  # seconds between two looks at the source
    viewers: int = 32  # pages open at once
    unsettled: int = 4  # epochs: the last ones may still change, as peers' reports arrive
    retry: int = 1000  # milliseconds until a page that lost its connection tries again


OPTIONS = FeedOptions()


def encode(value: Any) -> bytes:
    """JSON of any value of `source`; numbers that JSON does not have become null."""
    return msgspec.json.encode(value)


@dataclass(slots=True)
class Cursor:
    """How far one page has come."""

    epoch: int = -1
    round: int = 0
    event: int = 0
    peers: dict[str, PeerStatus] | None = field(default_factory=dict)  # None: they are not followed
    unsettled: dict[int, EpochAdvanced] = field(default_factory=dict)
    alerts: set[str] = field(default_factory=set)  # that stand, by id


class Feed:
    """Streams of one source. The source is asked in worker threads, so a slow disk stops no loop."""

    def __init__(self, source: DashboardSource, options: FeedOptions = OPTIONS) -> None:
        self._source = source
        self._options = options
        self._viewers = 0
        self._closing = asyncio.Event()

    def close(self) -> None:
        """Ends all streams within an interval; to be called on the loop that serves them."""
        self._closing.set()

    @property
    def full(self) -> bool:
        """Whether as many pages are open as should be."""
        return self._viewers >= self._options.viewers

    async def stream(self, *, peers: bool = False) -> AsyncIterator[bytes]:
        """`peers`: with a list of all peers, which is kept up to date; a page of a large run asks for parts of it."""
        self._viewers += 1
        try:
            yield b"retry: %d\n\n" % self._options.retry
            cursor = Cursor(peers={} if peers else None)
            for message in await asyncio.to_thread(lambda: list(self._changes(cursor, first=True))):
                yield message
            while not await self._closed_within(self._options.interval):
                for message in await asyncio.to_thread(lambda: list(self._changes(cursor))):
                    yield message
        finally:
            self._viewers -= 1

    async def _closed_within(self, seconds: float) -> bool:
        try:
            await asyncio.wait_for(self._closing.wait(), seconds)
        except TimeoutError:
            return False
        return True

    def _changes(self, cursor: Cursor, *, first: bool = False) -> Iterator[bytes]:
        """Messages that bring a page at `cursor` up to date; moves the cursor. The state always comes, so a page
        hears something in every interval and can tell a quiet run from a lost connection.

        `first`: for a page that was just opened, or that lost its connection and forgets what it had.
        """
        if first:
            yield _message("begin", None)
        status = self._source.look()
        if cursor.peers is not None and (moved := self._peers_changed(cursor, status.peers)):
            yield _message("peers", moved)
        epochs = self._source.epochs(after=max(-1, cursor.epoch - self._options.unsettled))
        news = [row for row in epochs if cursor.unsettled.get(row.epoch) != row]
        if news or first:
            cursor.epoch = max((row.epoch for row in epochs), default=-1)
            cursor.unsettled = {row.epoch: row for row in epochs[-self._options.unsettled :]}
            yield _message("epochs", news)
        rounds = self._source.rounds(after=cursor.round)
        if rounds or first:
            cursor.round = max((row.id for row in rounds), default=0)
            yield _message("rounds", views.page_of_rounds(rounds, {peer.peer_id: peer.name for peer in status.peers}))
        events = self._source.events(after=cursor.event)
        if events or first:
            cursor.event = max((row.id for row in events), default=0)
            yield _message("events", events)
        overview = self._source.overview_of(status)
        fresh = [alert for alert in overview.alerts if alert.id not in cursor.alerts]
        cursor.alerts = {alert.id for alert in overview.alerts}
        if fresh and not first:
            yield _message("alert", fresh)
        yield _message("state", overview)

    def _peers_changed(self, cursor: Cursor, rows: Sequence[PeerStatus]) -> dict[str, list[Any]] | None:
        """None: nothing has."""
        assert cursor.peers is not None
        known, cursor.peers = cursor.peers, {row.peer_id: row for row in rows}
        changed = [row for row in rows if known.get(row.peer_id) != row]
        gone = [peer for peer in known if peer not in cursor.peers]
        return {"changed": changed, "gone": gone} if changed or gone else None


def _message(name: str, value: Any) -> bytes:
    return b"event: %s\ndata: %s\n\n" % (name.encode(), encode(value))
