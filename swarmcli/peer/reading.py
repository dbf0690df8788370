"""Tells the run's peers which pieces of the data this one has read, and hears which they have read.
training/shared_pass.py has the rules."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from contextlib import contextmanager

import pydantic

from swarmcli.dht import DHT, DHTNode, OwnedSubkey
from swarmcli.dht.schema import SchemaValidator
from swarmcli.errors import SwarmError
from swarmcli.network.task_owner import TaskOwner
from swarmcli.optim.peers.board import Board
from swarmcli.peer.collaboration import Collaboration
from swarmcli.training.shared_pass import HeardPass, PassRecord, SharedPass
from swarmcli.training.task import SharesPasses

logger = logging.getLogger(__name__)

PERIOD = 15.0  # seconds between two records of this peer, and two looks at the others'
EXPIRATION = 86_400.0  # seconds: what a peer has read stays read after it has left …
THERE = 60.0  # … but what it had in hand is free again so many seconds after its last record
MOST_HEARD = 256  # peers


class PassKeys(pydantic.BaseModel):
    """The schema of `{run_id}_read` for the hash table's validators."""

    read: dict[OwnedSubkey, PassRecord]


class ReadingExchange:
    """Keeps this peer's SharedPass and the hash table in step. Made, started and closed on the event loop."""

    def __init__(self, node: DHTNode, run_id: str, shared: SharedPass) -> None:
        self._shared, self._clock, self._events = shared, node.endpoint.clock, node.endpoint.events
        self._board = Board(node, f"{run_id}_read", PassRecord, EXPIRATION)
        self._tasks = TaskOwner()
        node.add_validators([SchemaValidator(PassKeys, prefix=run_id)])

    async def start(self) -> None:
        """Hears the others once before the stream chooses its first piece."""
        await self.exchange()
        self._tasks.keep(self._events, self._keep_in_step)

    async def close(self) -> None:
        await self._tasks.close()

    async def exchange(self) -> None:
        """Tells what this peer has read, and hears what others have. If nobody answers, what was heard before stays."""
        try:
            if (own := self._shared.says()).sources:
                await self._board.publish(own.model_copy(update={"time": self._clock.now()}))
            await self._board.refresh()
        except SwarmError as error:
            logger.debug("what others have read of the data could not be looked up: %s", error)
        since = self._clock.now() - THERE
        others = [record for peer, record in self._board.records.items() if peer != self._board.owner]
        latest = sorted(others, key=lambda each: each.time, reverse=True)[:MOST_HEARD]
        self._shared.hear([HeardPass(record, record.time > since) for record in latest])

    async def _keep_in_step(self) -> None:
        await asyncio.sleep(PERIOD)
        await self.exchange()


@contextmanager
def reading_together(collaboration: Collaboration) -> Iterator[None]:
    """Has the streams of this peer read what others have not read, if its task can choose."""
    task, dht, recipe = collaboration.task, collaboration.peer.dht, collaboration.peer.recipe
    if not isinstance(task, SharesPasses):
        yield
        return

    async def begin(dht: DHT, node: DHTNode) -> ReadingExchange:
        exchange = ReadingExchange(node, recipe.run_id, shared)
        await exchange.start()
        return exchange

    shared = SharedPass(f"swarm/{recipe.seed}")
    exchange = dht.run_coroutine(begin)
    task.share(shared)
    try:
        yield
    finally:
        if dht.is_alive():
            dht.run_coroutine(exchange.close())
