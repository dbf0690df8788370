"""One signed record per peer under one DHT key: each peer writes its own and reads everybody's."""

from __future__ import annotations

import asyncio
import logging
import math
from typing import TYPE_CHECKING, Generic, TypeVar

import pydantic

from swarmcli.dht import OwnedSubkey
from swarmcli.network import wire
from swarmcli.network.identity import Identity, PeerID
from swarmcli.network.loop_thread import loop_time

if TYPE_CHECKING:
    from swarmcli.dht import DHTNode

Record = TypeVar("Record", bound=pydantic.BaseModel)

# Bytes per second of one board that a peer reads, and that a replica sends, however many peers write on it. A peer has
# two boards, of progress and of what peers say of themselves: together they take twice that.
READ_RATE, REPLICA_RATE = 10e3, 100e3
REPLICAS = 5  # each of them gives every report to every reader
OVERHEAD = 150  # bytes of a report beside its value: owner, signature, expiration, framing
BURST = 4  # reports that may go out one after the other where something happens; then one for each period
OF_A_LINE = 0.05  # that each of the two boards takes each way of a line that is known to be slow
LIVES = 3  # periods, for which a report lives at least
logger = logging.getLogger(__name__)


def period_of(peers: int, nbytes: int) -> float:
    """Seconds between two reports of so many bytes of each of so many peers, see READ_RATE and REPLICA_RATE."""
    return max(peers * nbytes * min(peers, REPLICAS) / READ_RATE, peers**2 * nbytes / REPLICA_RATE)


class Board(Generic[Record]):
    """The records under `key`, as `model`; they expire `expiration` seconds after their last publication.

    The board drops and counts a record that does not fit the model, or whose owner did not sign it.
    """

    def __init__(
        self, node: DHTNode, key: str, model: type[Record], expiration: float, identity: Identity | None = None
    ) -> None:
        """This peer's record stands under `identity`; None: the node's own."""
        self._node, self.key, self.expiration = node, key, expiration
        self._unreadable = 0  # records seen so far that do not fit the model, or are of nobody
        self.records: dict[PeerID, Record] = {}  # as of the last refresh, this peer's own included
        self._model = model
        self._follower = node.follow(key)
        self._subkey = node.own_subkey(identity=identity)
        self._published = False
        self._nbytes = 0  # of this peer's last report
        self._credit, self._credited = float(BURST), 0.0  # reports that may go out now, and the loop time of that
        self.line = math.inf  # bytes per second of this peer's line, where that is known to be slow
        self._reading = asyncio.Lock()  # a follower reads for one at a time

    @property
    def owner(self) -> PeerID:
        """Under whose identity this peer's record stands."""
        return self._subkey.owner

    @property
    def dropped(self) -> int:
        """How many records were dropped so far: not signed by their owner, of another shape, or out of bounds. One that
        is stored here as well as read from others counts twice."""
        return sum(self._follower.refused.values()) + self._unreadable

    @property
    def period(self) -> float:
        """Seconds between two reports of each peer with which all of them stay within their rates: the more peers, the
        rarer they report."""
        return period_of(len(self.records), self._nbytes)

    @property
    def pause(self) -> float:
        """Seconds between two reports of this peer, and half of them between two looks at the others': longer than the
        period where its own line is slow."""
        replicas = min(max(1, len(self.records)), REPLICAS)
        return max(self.period, 2 * max(1, len(self.records)) * self._nbytes * replicas / (OF_A_LINE * self.line))

    @property
    def lives(self) -> float:
        """Seconds for which a report counts."""
        return max(self.expiration, LIVES * self.pause)

    def turn_in(self) -> float:
        """Seconds until this peer may report again."""
        self._earn()
        return max(0.0, (1.0 - self._credit) * self.pause)

    def _earn(self) -> None:
        now, period = loop_time(), self.pause
        earned = (now - self._credited) / period if period > 0 else float(BURST)
        self._credit, self._credited = min(float(BURST), self._credit + earned), now

    async def publish(self, record: Record) -> bool:
        """Writes this peer's record; False if no replica took it."""
        self._published = True
        self._earn()
        self._credit -= 1
        value = record.model_dump()
        self._nbytes = OVERHEAD + len(wire.encode(value))
        return await self._node.store(self.key, value, self._node.endpoint.clock.now() + self.lives, self._subkey)

    async def refresh(self) -> dict[PeerID, Record]:
        """Reads what changed since the last time and returns all records that have not expired."""
        records: dict[PeerID, Record] = {}
        async with self._reading:
            for subkey, entry in (await self._follower.refresh()).items():
                record = self._read(subkey, entry.value)
                if record is not None and isinstance(subkey, OwnedSubkey):
                    records[subkey.owner] = record
        self.records = records
        return records

    async def withdraw(self) -> None:
        """Takes this peer's record back, so that readers no longer see it."""
        if self._published:
            await self._node.withdraw(self.key, self._subkey)
            self._published = False

    def _read(self, subkey: object, value: object) -> Record | None:
        try:
            if isinstance(subkey, OwnedSubkey):
                return self._model.model_validate(value)
            logger.debug("dropped a record without owner under %s", self.key)
        except pydantic.ValidationError as error:
            logger.debug("dropped a record under %s: %s", self.key, error)
        self._unreadable += 1
        return None
