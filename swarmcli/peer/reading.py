"""Tells the run's peers which parts of the data this one has read, and hears it of them. The rules are those of
training/shared_pass.py."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pydantic

from swarmcli.dht import DHT, DHTNode, OwnedSubkey
from swarmcli.dht.schema import SchemaValidator
from swarmcli.errors import SwarmError
from swarmcli.network.identity import PeerID
from swarmcli.network.task_owner import TaskOwner
from swarmcli.optim.peers.board import Board
from swarmcli.peer.collaboration import Collaboration
from swarmcli.training.shared_pass import HeardPass, PassRecord, SharedPass
from swarmcli.training.task import SharesPasses

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ReadingTimes:
    """Seconds."""

    period: float = 15.0  # between two words, and two looks at the others'
    read: float = 86_400.0  # what a peer has read stays read when it has left …
    in_hand: float = 60.0  # … and what it was about to read is free again
    most: int = 256  # peers that are listened to


class PassKeys(pydantic.BaseModel):
    """The schema of `{run_id}_read` and `{run_id}_in_hand` for the hash table's validators."""

    read: dict[OwnedSubkey, PassRecord]
    in_hand: dict[OwnedSubkey, PassRecord]


class ReadingExchange:
    """Keeps this peer's SharedPass and the hash table in step. Made, started and closed on the event loop."""

    def __init__(
        self,
        node: DHTNode,
        run_id: str,
        shared: SharedPass,
        vouched: Callable[[PeerID], bool],
        times: ReadingTimes = ReadingTimes(),
    ) -> None:
        """`vouched`: whose word counts most, see HeardPass."""
        self._shared, self._vouched, self._times = shared, vouched, times
        self._events = node.endpoint.events
        self._read = Board(node, f"{run_id}_read", PassRecord, times.read)
        self._in_hand = Board(node, f"{run_id}_in_hand", PassRecord, times.in_hand)
        self._tasks = TaskOwner()
        node.add_validators([SchemaValidator(PassKeys, prefix=run_id)])

    async def start(self) -> None:
        """Hears the others once before the stream chooses its first part."""
        await self.exchange()
        self._tasks.keep(self._events, self._keep_in_step)

    async def close(self) -> None:
        await self._tasks.close()

    async def exchange(self) -> None:
        """Says what this peer has read, and hears it of the others. Others' words stay as they were where nobody
        answers."""
        try:
            for board, record in zip((self._read, self._in_hand), self._shared.says(), strict=True):
                if record.sources:
                    await board.publish(record)
                await board.refresh()
        except SwarmError as error:
            logger.debug("what others have read of the data could not be looked up: %s", error)
        vouched = {peer: self._vouched(peer) for peer in self._read.records if peer != self._read.owner}
        peers = sorted(vouched, key=lambda peer: not vouched[peer])[: self._times.most]
        self._shared.hear(
            [
                HeardPass(self._read.records[peer], self._in_hand.records.get(peer, PassRecord()), vouched[peer])
                for peer in peers
            ]
        )

    async def _keep_in_step(self) -> None:
        await asyncio.sleep(self._times.period)
        await self.exchange()


@contextmanager
def reading_together(collaboration: Collaboration) -> Iterator[None]:
    """The streams of this peer read what others have not read, if its task can choose."""
    task, dht, recipe = collaboration.task, collaboration.peer.dht, collaboration.peer.recipe
    if not isinstance(task, SharesPasses):
        yield
        return

    def samples() -> tuple[int, int]:
        report = collaboration.optimizer.report()
        return report.samples, report.samples_seen

    async def begin(dht: DHT, node: DHTNode) -> ReadingExchange:
        exchange = ReadingExchange(node, recipe.run_id, shared, collaboration.accounts.vouched)
        await exchange.start()
        return exchange

    shared = SharedPass(f"swarm/{recipe.seed}", samples)
    exchange = dht.run_coroutine(begin)
    task.share(shared)
    try:
        yield
    finally:
        if dht.is_alive():
            dht.run_coroutine(exchange.close())
