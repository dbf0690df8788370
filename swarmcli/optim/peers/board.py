"""One signed record per peer under one DHT key: each peer writes its own and reads everybody's."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING, Generic, Literal, TypeAlias, TypeVar

import pydantic
from pydantic import BaseModel, ConfigDict, Field

from swarmcli.dht import OwnedSubkey
from swarmcli.network.identity import Identity, PeerID

if TYPE_CHECKING:
    from swarmcli.dht import DHTNode

FUTURE_TOLERANCE = 5.0  # seconds: clocks are corrected, but not to the last second
Kind: TypeAlias = Literal["forged", "malformed", "replayed", "stale", "future-dated"]
Record = TypeVar("Record", bound=pydantic.BaseModel)
logger = logging.getLogger(__name__)


class Board(Generic[Record]):
    """The records under `key`, as `model`; they expire `expiration` seconds after their last publication.

    What does not fit the model, or stands under a subkey that its owner did not sign for, is dropped and counted.
    """

    def __init__(
        self, node: DHTNode, key: str, model: type[Record], expiration: float, identity: Identity | None = None
    ) -> None:
        """This peer's record stands under `identity`; None: the node's own."""
        self._node = node
        self.key = key
        self.expiration = expiration
        self.unreadable = 0  # records seen so far that do not fit the model
        self.records: dict[PeerID, Record] = {}  # as of the last refresh, this peer's own included
        self._model = model
        self._follower = node.follow(key)
        self._subkey = node.own_subkey(identity=identity)
        self._published = False
        self._reading = asyncio.Lock()  # a follower reads for one at a time

    @property
    def owner(self) -> PeerID:
        """Under whose identity this peer's record stands."""
        return self._subkey.owner

    async def publish(self, record: Record) -> bool:
        """Writes this peer's record; False if no replica took it."""
        self._published = True
        expires = self._node.endpoint.clock.now() + self.expiration
        return await self._node.store(self.key, record.model_dump(), expires, self._subkey)

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
        self.unreadable += 1
        return None


class LocalTrainingProgress(BaseModel):
    """What one peer says about its own share of the epoch; the value of its subkey under `{prefix}_progress`."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    peer_id: bytes = Field(min_length=32, max_length=32)
    epoch: int = Field(ge=0, lt=1 << 48)
    samples_accumulated: int = Field(ge=0, lt=1 << 48)
    samples_per_second: float = Field(ge=0.0, lt=1e12, allow_inf_nan=False)
    time: float = Field(ge=0.0, allow_inf_nan=False)
    client_mode: bool


class ReportBoard(Board[LocalTrainingProgress]):
    """`{prefix}_progress`: how far each peer has come, and how many reports did not count and why."""

    def __init__(self, node: DHTNode, prefix: str, expiration: float, identity: Identity | None = None) -> None:
        super().__init__(node, f"{prefix}_progress", LocalTrainingProgress, expiration, identity)
        self._counts: Counter[Kind] = Counter()
        self.others: tuple[LocalTrainingProgress, ...] = ()  # what others signed about themselves, as last read

    @property
    def dropped(self) -> Mapping[Kind, int]:
        """How many reports did not count, by kind; one that is stored here as well as read from others counts twice.

        forged        not signed by the peer that it is about
        malformed     of another shape, or beyond its bounds
        replayed      older, by its owner's own numbering, than one that was known (a replica may also just lag)
        stale         when it was read first, older than reports live
        future-dated  from later than clocks can be apart
        """
        refused = Counter(self._follower.refused)
        forged = refused.pop("signature", 0) + self._counts["forged"]
        malformed = refused.total() + self.unreadable
        return {**self._counts, "forged": forged, "malformed": malformed, "replayed": self._follower.outdated}

    async def refresh(self) -> dict[PeerID, LocalTrainingProgress]:
        before, records = self.records, await super().refresh()
        self.others = tuple(r for peer, r in records.items() if peer == r.peer_id and peer != self.owner)
        for peer, report in records.items():
            if before.get(peer) != report:  # what is not news is not counted again
                self._count(peer, report)
        return records

    def _count(self, peer: PeerID, report: LocalTrainingProgress) -> None:
        now = self._node.endpoint.clock.now()
        if peer != report.peer_id:
            self._counts["forged"] += 1
        elif report.time < now - self.expiration:
            self._counts["stale"] += 1
        elif report.time > now + FUTURE_TOLERANCE:
            self._counts["future-dated"] += 1
