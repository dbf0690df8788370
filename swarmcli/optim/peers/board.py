"""One signed record per peer under one DHT key: each peer writes its own and reads everybody's.

However many peers write, each reads a bounded number of bytes per second, from one replica after the other, and so
replicas send a bounded number. Each peer writes again only after the others have had time to read the reports of all.
"""

from __future__ import annotations

import asyncio
import logging
import math
from typing import TYPE_CHECKING, Generic, TypeVar

import pydantic

from swarmcli.dht import OwnedSubkey
from swarmcli.network.identity import Identity, PeerID
from swarmcli.network.loop_thread import loop_time

if TYPE_CHECKING:
    from swarmcli.dht import DHTNode
    from swarmcli.dht.records import Subkey, ValueWithExpiration

Record = TypeVar("Record", bound=pydantic.BaseModel)

# Most bytes per second of one board that a peer reads, and that a replica sends, however many peers write on it. A peer
# has two boards, of progress and of what peers say of themselves: with both, with framing and with what newcomers read
# at once, a peer is to receive 20 kB/s and a replica to send 200 kB/s.
READ_RATE, REPLICA_RATE = 9e3, 80e3
REPLICAS = 5  # that share the readers; each writer writes to all of them
USUAL = 1000.0  # bytes of a report, while none has been read
FIRST = 16  # reports that a newcomer reads at once
SPARE = 1.5  # times the size of all reports, the most that a peer reads at once
BURST = 4  # reports that may go out in a row when something happens; after that one for each pause
OF_A_LINE = 0.02  # of a line that is known to be slow, in each direction, for each of the two boards
LIVES = 3  # pauses for which a report lives at least
logger = logging.getLogger(__name__)


def rate_of(peers: int) -> float:
    """Bytes per second of a board that each of `peers` peers reads, see READ_RATE and REPLICA_RATE."""
    return min(READ_RATE, REPLICAS * REPLICA_RATE / peers)


class Board(Generic[Record]):
    """The records under `key`, as `model`; they expire `expiration` seconds after their last publication.

    The board drops and counts a record that does not fit the model, or whose owner did not sign it.
    """

    def __init__(
        self, node: DHTNode, key: str, model: type[Record], expiration: float, identity: Identity | None = None
    ) -> None:
        """`identity`: signs this peer's record; None: the node's own."""
        self._node, self.key, self.expiration = node, key, expiration
        self._unreadable = 0  # records seen so far that do not fit the model, or have no owner
        self.records: dict[PeerID, Record] = {}  # as of the last refresh, this peer's own included
        self._model = model
        self._follower = node.follow(key)
        self._read: dict[Subkey, tuple[ValueWithExpiration, Record | None]] = {}  # a record as it came, and parsed
        self._subkey = node.own_subkey(identity=identity)
        self._published = False
        self._peers, self._size = 1, USUAL  # peers that write here, and bytes of all reports, as of the last refresh
        self._lived = expiration  # seconds for which the last report of this peer counts
        self._credit, self._credited = float(BURST), 0.0  # reports that may go out, and the loop time of that figure
        self._room, self._read_at = FIRST * USUAL, math.inf  # bytes that may be read, and the loop time of that figure
        self.line = math.inf  # bytes per second of this peer's line, if that is known to be slow
        self._reading = asyncio.Lock()  # a follower does one refresh at a time

    @property
    def owner(self) -> PeerID:
        """The owner of this peer's record."""
        return self._subkey.owner

    @property
    def dropped(self) -> int:
        """How many records were dropped so far: not signed by their owner, of another shape, or out of bounds. A record
        that is stored here and read from others as well counts twice."""
        return sum(self._follower.refused.values()) + self._unreadable

    @property
    def pause(self) -> float:
        """Seconds between two reports of this peer: what it takes a peer to read the reports of all. They grow with the
        number of peers, and with the slowness of this peer's line."""
        writes = self._size * max(1.0, REPLICAS / self._peers)  # each report goes to each replica
        return max(self._size / rate_of(self._peers), writes / (OF_A_LINE * self.line))

    @property
    def look(self) -> float:
        """Seconds between two looks at the others' reports: `pause`, or less until it has read all of them."""
        few = FIRST * USUAL / self._rate
        return min(self.pause, few) if self._follower.behind else self.pause

    @property
    def _rate(self) -> float:
        """Bytes per second that this peer reads."""
        return min(rate_of(self._peers), OF_A_LINE * self.line)

    @property
    def _few(self) -> bool:
        """Whether this peer reads all replicas, without a bound: if few peers write, each hears of the others at
        once."""
        few = self._follower.count <= REPLICAS + 1 if self._follower.count else self._follower.small
        return few and self.line == math.inf and self._room > 0

    @property
    def lives(self) -> float:
        """Seconds for which a report counts."""
        return max(self.expiration, LIVES * self.pause)

    @property
    def renewal(self) -> float:
        """Seconds after which this peer reports again: before its last report expires, even if it knew nobody then."""
        return min(self.pause, self._lived / 2)

    def turn_in(self) -> float:
        """Seconds until this peer may report again."""
        self._earn()
        return max(0.0, (1.0 - self._credit) * self.pause)

    def _earn(self) -> None:
        now = loop_time()
        earned = (now - self._credited) / self.pause
        self._credit, self._credited = min(float(BURST), self._credit + earned), now

    async def publish(self, record: Record) -> bool:
        """Writes this peer's record. Returns False if no replica took it."""
        self._published = True
        self._earn()
        self._credit -= 1
        self._lived = self.lives
        expires = self._node.endpoint.clock.now() + self._lived
        return await self._node.store(self.key, record.model_dump(), expires, self._subkey)

    async def refresh(self) -> dict[PeerID, Record]:
        """Reads what has changed since the last time, as far as the rate allows, and returns all records that have not
        expired, this peer's own among them."""
        async with self._reading:
            earned = self._rate * max(0.0, loop_time() - self._read_at)
            most = max(SPARE * self._size, FIRST * USUAL)
            self._room, self._read_at = max(self._room, min(most, self._room + earned)), loop_time()
            taken = self._follower.taken
            found = await self._follower.refresh(math.inf if self._few else max(0.0, self._room))
            self._room -= self._follower.taken - taken
            self._peers, self._size = max(1, self._follower.count), self._follower.size or USUAL
            before, self._read = self._read, {}
            for subkey, entry in found.items():
                known = before.get(subkey)
                if known is None or known[0] is not entry:
                    known = entry, self._parsed(subkey, entry.value)
                self._read[subkey] = known
        owned = ((subkey, record) for subkey, (_, record) in self._read.items() if isinstance(subkey, OwnedSubkey))
        self.records = {subkey.owner: record for subkey, record in owned if record is not None}
        return self.records

    async def withdraw(self) -> None:
        """Takes this peer's record back, so that readers no longer see it."""
        if self._published:
            await self._node.withdraw(self.key, self._subkey)
            self._published = False

    def _parsed(self, subkey: object, value: object) -> Record | None:
        try:
            if isinstance(subkey, OwnedSubkey):
                return self._model.model_validate(value)
            logger.debug("dropped a record without owner under %s", self.key)
        except pydantic.ValidationError as error:
            logger.debug("dropped a record under %s: %s", self.key, error)
        self._unreadable += 1
        return None
