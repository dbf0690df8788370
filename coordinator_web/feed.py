"""Keeps open pages up to date: a snapshot first, then what changed, as server-sent events.

Every connection begins with everything, so a page that lost its server needs no memory of what it missed, and a
server that was started anew needs none of its pages.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from typing import Any

import msgspec

from coordinator_web.source import DashboardSource, EpochRow, PeerRow, Snapshot

INTERVAL_SECONDS = 0.5  # between two looks at the source
MAX_VIEWERS = 32  # pages open at once
UNSETTLED_EPOCHS = 4  # the last ones may still change, as peers' reports arrive
RETRY_MILLISECONDS = 1000  # how soon a page that lost its connection tries again


def encode(value: Any) -> bytes:
    """JSON of any value of `source`; numbers that JSON does not have become null."""
    return msgspec.json.encode(value)


@dataclass(slots=True)
class Cursor:
    """How far one page has come."""

    epoch: int = -1
    round: int = 0
    event: int = 0
    peers: dict[str, PeerRow] = field(default_factory=dict)
    unsettled: dict[int, EpochRow] = field(default_factory=dict)

    @classmethod
    def at(cls, snapshot: Snapshot) -> Cursor:
        cursor = cls(peers={row.peer_id: row for row in snapshot.peers})
        if snapshot.epochs:
            cursor.epoch = snapshot.epochs[-1].epoch
            cursor.unsettled = {row.epoch: row for row in snapshot.epochs[-UNSETTLED_EPOCHS:]}
        if snapshot.rounds:
            cursor.round = snapshot.rounds[-1].id
        if snapshot.events:
            cursor.event = snapshot.events[-1].id
        return cursor


class Feed:
    """Streams of one source. The source is asked in worker threads, so a slow disk stops no loop."""

    def __init__(self, source: DashboardSource, *, interval: float = INTERVAL_SECONDS) -> None:
        self._source = source
        self._interval = interval
        self._viewers = 0
        self._closing = asyncio.Event()

    def snapshot(self) -> Snapshot:
        source = self._source
        return Snapshot(
            status=source.status(),
            peers=tuple(source.peers()),
            epochs=tuple(source.epochs()),
            rounds=tuple(source.rounds()),
            events=tuple(source.events()),
        )

    def close(self) -> None:
        """Ends all streams within an interval; to be called on the loop that serves them."""
        self._closing.set()

    @property
    def full(self) -> bool:
        """Whether as many pages are open as should be."""
        return self._viewers >= MAX_VIEWERS

    async def stream(self) -> AsyncIterator[bytes]:
        self._viewers += 1
        try:
            snapshot = await asyncio.to_thread(self.snapshot)
            yield b"retry: %d\n\n" % RETRY_MILLISECONDS
            yield _message("snapshot", snapshot)
            cursor = Cursor.at(snapshot)
            while not await self._closed_within(self._interval):
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

    def _changes(self, cursor: Cursor) -> Iterator[bytes]:
        """Messages that bring a page at `cursor` up to date; moves the cursor. The status always comes, so a page
        hears something in every interval and can tell a quiet run from a lost connection."""
        epochs = self._source.epochs(after=max(-1, cursor.epoch - UNSETTLED_EPOCHS))
        if news := [row for row in epochs if cursor.unsettled.get(row.epoch) != row]:
            cursor.epoch = epochs[-1].epoch
            cursor.unsettled = {row.epoch: row for row in epochs[-UNSETTLED_EPOCHS:]}
            yield _message("epochs", news)
        if rounds := self._source.rounds(after=cursor.round):
            cursor.round = rounds[-1].id
            yield _message("rounds", rounds)
        if events := self._source.events(after=cursor.event):
            cursor.event = events[-1].id
            yield _message("events", events)
        rows = {row.peer_id: row for row in self._source.peers()}
        changed = [row for peer_id, row in rows.items() if cursor.peers.get(peer_id) != row]
        gone = [peer_id for peer_id in cursor.peers if peer_id not in rows]
        if changed or gone:
            cursor.peers = rows
            yield _message("peers", {"changed": changed, "gone": gone})
        yield _message("status", self._source.status())


def _message(name: str, value: Any) -> bytes:
    return b"event: %s\ndata: %s\n\n" % (name.encode(), encode(value))
