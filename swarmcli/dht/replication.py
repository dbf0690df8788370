"""Keeping every record at the nodes nearest to its key while nodes come and go.

Replicas compare digests of what they hold and send what differs: at once with those who moved up when a neighbour
died or a nearer node appeared, and now and then with everyone, which also heals what a merge of two halves of the
network left behind.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Iterable, Sequence

from swarmcli.dht.client import DHTClient
from swarmcli.dht.core import NodeCore
from swarmcli.dht.records import id_to_bytes
from swarmcli.dht.routing import Contact
from swarmcli.dht.writing import Writer
from swarmcli.errors import DHTError, NetworkError
from swarmcli.network.identity import PeerID

_CHUNK = 256  # keys whose replicas are worked out before other work on the loop gets its turn
_JITTER = 0.25  # periods differ by up to this fraction, so that nodes started together do not act together


class Replicator:
    """Listens to changes in the routing table; `run` does the work until it is cancelled."""

    def __init__(self, core: NodeCore, client: DHTClient, writer: Writer) -> None:
        self._core = core
        self._client = client
        self._writer = writer
        self._appeared: dict[PeerID, Contact] = {}
        self._lost: dict[PeerID, Contact] = {}
        self._news = asyncio.Event()

    def contact_appeared(self, contact: Contact) -> None:
        self._lost.pop(contact.peer_id, None)
        self._appeared[contact.peer_id] = contact
        self._news.set()

    def contact_lost(self, contact: Contact) -> None:
        self._appeared.pop(contact.peer_id, None)
        self._lost[contact.peer_id] = contact
        self._news.set()

    async def run(self) -> None:
        """Waits for news or for the next general comparison."""
        period = self._core.limits.sync_interval
        while True:
            pause = period * (1 + _JITTER * self._core.endpoint.random.random())
            try:
                async with asyncio.timeout(pause):
                    await self._news.wait()
            except TimeoutError:
                await self._sync(await self._everything())
                continue
            await asyncio.sleep(self._core.limits.sync_delay)  # a newcomer seldom comes alone
            self._news.clear()
            appeared, self._appeared = self._appeared, {}
            lost, self._lost = self._lost, {}
            for rank, work in sorted((await self._affected(appeared, lost)).items()):
                # The nearest replica acts first; when the others compare, there is mostly nothing left to send.
                await asyncio.sleep(rank * self._core.limits.sync_delay)
                await self._sync(work)

    def responsible(self, target: int) -> list[Contact]:
        """The nodes that are to hold a key, as far as this one knows."""
        return self._core.nearest(target, self._core.options.num_replicas)

    async def _everything(self) -> dict[PeerID, tuple[Contact, list[int]]]:
        work: dict[PeerID, tuple[Contact, list[int]]] = {}
        for index, target in enumerate(self._core.storage.keys(self._core.now())):
            if index % _CHUNK == _CHUNK - 1:
                await asyncio.sleep(0)
            self._add(work, self.responsible(target), target)
        return work

    async def _affected(
        self, appeared: dict[PeerID, Contact], lost: dict[PeerID, Contact]
    ) -> dict[int, dict[PeerID, tuple[Contact, list[int]]]]:
        """By this node's rank among the replicas of a key: who is to be compared with, and under which keys."""
        plan: dict[int, dict[PeerID, tuple[Contact, list[int]]]] = defaultdict(dict)
        own = self._core.endpoint.peer_id
        for index, target in enumerate(self._core.storage.keys(self._core.now())):
            if index % _CHUNK == _CHUNK - 1:
                await asyncio.sleep(0)
            holders = self.responsible(target)
            rank = next((rank for rank, holder in enumerate(holders) if holder.peer_id == own), len(holders))
            if _lost_a_holder(target, holders, lost.values()):
                self._add(plan[rank], holders, target)
            else:
                self._add(plan[rank], [holder for holder in holders if holder.peer_id in appeared], target)
        return plan

    def _add(self, work: dict[PeerID, tuple[Contact, list[int]]], holders: Iterable[Contact], target: int) -> None:
        for holder in holders:
            if holder.peer_id != self._core.endpoint.peer_id:
                work.setdefault(holder.peer_id, (holder, []))[1].append(target)

    async def _sync(self, work: dict[PeerID, tuple[Contact, list[int]]]) -> None:
        limit = asyncio.Semaphore(self._core.options.parallel)

        async def one(contact: Contact, targets: Sequence[int]) -> None:
            async with limit:
                try:
                    await self._sync_with(contact, targets)
                except (NetworkError, DHTError):
                    return  # the contact has left the table by now; whoever takes its place is news

        async with asyncio.TaskGroup() as group:
            for contact, targets in work.values():
                group.create_task(one(contact, targets))

    async def _sync_with(self, contact: Contact, targets: Sequence[int]) -> None:
        most = self._core.limits.max_records
        for start in range(0, len(targets), most):
            digests = list(self._digests(targets[start : start + most]))
            wanted = await self._client.sync(contact, digests)
            for number, _ in digests:
                if number in wanted:
                    records = list(self._core.storage.records(int.from_bytes(number, "big")))
                    await self._writer.deliver(contact, records)

    def _digests(self, targets: Iterable[int]) -> Iterable[tuple[bytes, int]]:
        now = self._core.now()
        for target in targets:
            entry = self._core.storage.entry(target, now)
            if entry is not None:
                yield id_to_bytes(target), entry.digest()


def _lost_a_holder(target: int, holders: Sequence[Contact], lost: Iterable[Contact]) -> bool:
    """Whether one of the lost was nearer than the last of those who hold the key now."""
    if not holders:
        return False
    farthest = holders[-1].node ^ target
    return any(contact.node ^ target < farthest for contact in lost)
