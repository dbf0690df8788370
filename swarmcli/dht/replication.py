"""Keeping every record at the nodes nearest to its key while nodes come and go.

Replicas compare digests of what they hold and send what differs. When a neighbour dies or a nearer node appears, they
compare at once with the nodes that thereby became replicas. Now and then they compare with all, which also brings
records together after two halves of the network have merged.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import TypeAlias

from swarmcli.dht.core import PARALLEL, NodeCore, breathing
from swarmcli.dht.messages import MAX_RECORDS
from swarmcli.dht.records import id_to_bytes
from swarmcli.dht.routing import Change, Contact
from swarmcli.dht.storage import StoreVerdict
from swarmcli.dht.writing import deliver
from swarmcli.errors import DHTError, NetworkError
from swarmcli.network.identity import PeerID
from swarmcli.network.loop_thread import set_within
from swarmcli.recent import Recent

SYNC_DELAY = 0.5  # seconds after a change among the replicas, for further changes that follow at once
REMEMBERED_SYNCS = 1 << 14  # pairs of replica and key of which is remembered what was sent

Work: TypeAlias = dict[PeerID, tuple[Contact, list[int]]]  # with whom to compare, and under which keys


class Replicator:
    """Listens to changes in the routing table; `run` does what is due, again and again (`keep`)."""

    def __init__(self, core: NodeCore) -> None:
        self._core = core
        self._appeared: dict[PeerID, Contact] = {}
        self._lost: dict[PeerID, Contact] = {}
        self._news = asyncio.Event()
        # (replica, key) → digest of the key's records when they were sent: the same are not sent again.
        self._sent: Recent[tuple[PeerID, int], int] = Recent(REMEMBERED_SYNCS)

    def contact_changed(self, change: Change, contact: Contact) -> None:
        if change != "doubtful":
            for news in (self._appeared, self._lost):
                news.pop(contact.peer_id, None)
            (self._appeared if change == "appeared" else self._lost)[contact.peer_id] = contact
            self._news.set()

    async def run(self) -> None:
        """Waits for news or for the next general comparison."""
        news = None
        if await set_within(self._news, self._core.jittered(self._core.limits.sync_interval)):
            await asyncio.sleep(SYNC_DELAY)  # a newcomer seldom comes alone
            self._news.clear()
            news = self._appeared, self._lost
            self._appeared, self._lost = {}, {}
            for place in [place for place in self._sent if place[0] in news[0]]:  # these may have started anew, empty
                del self._sent[place]
        if self._core.only_asks:
            return  # nobody asks this node for what it may still hold
        for rank, work in sorted((await self._plan(news)).items()):
            # The nearest replica acts first; when the others compare, there is mostly nothing left to send.
            await asyncio.sleep(rank * SYNC_DELAY)
            await self._sync(work)

    async def _plan(self, news: tuple[dict[PeerID, Contact], dict[PeerID, Contact]] | None) -> dict[int, Work]:
        """This node's rank among the replicas of a key → with whom to compare, and under which keys.

        `news` are the contacts that appeared and those that were lost; only what they affect is in the plan. None:
        everything, as if this node came first everywhere.
        """
        plan: dict[int, Work] = defaultdict(dict)
        own = self._core.peer_id
        async for target in breathing(self._core.storage.keys(self._core.now())):
            holders = self._core.nearest(target, self._core.num_replicas)
            rank = 0
            if news is not None:
                rank = next((rank for rank, holder in enumerate(holders) if holder.peer_id == own), len(holders))
                if not _lost_a_holder(target, holders, news[1].values()):
                    holders = [holder for holder in holders if holder.peer_id in news[0]]
            for holder in holders:
                if holder.peer_id != own:
                    plan[rank].setdefault(holder.peer_id, (holder, []))[1].append(target)
        return plan

    async def _sync(self, work: Work) -> None:
        limit = asyncio.Semaphore(PARALLEL)

        async def one(contact: Contact, targets: Sequence[int]) -> None:
            async with limit:
                try:
                    await self._sync_with(contact, targets)
                except (NetworkError, DHTError):
                    return  # the contact has left the table by now, and its successor is news

        async with asyncio.TaskGroup() as group:
            for contact, targets in work.values():
                group.create_task(one(contact, targets))

    async def _sync_with(self, contact: Contact, targets: Sequence[int]) -> None:
        storage = self._core.storage
        for start in range(0, len(targets), MAX_RECORDS):
            digests: dict[int, int] = {}
            for target in targets[start : start + MAX_RECORDS]:
                if (entry := storage.entry(target, self._core.now())) is not None:
                    digests[target] = entry.digest()
            wanted = await self._core.sync(contact, [(id_to_bytes(target), each) for target, each in digests.items()])
            for target, digest in digests.items():
                # A replica that has no room for all of it, or always claims to lack something, is not sent the same
                # again until the records change or the replica starts anew.
                if id_to_bytes(target) in wanted and self._sent.get((contact.peer_id, target)) != digest:
                    outcomes, _ = await deliver(self._core, contact, storage.records(target))
                    if all(outcome.verdict != StoreVerdict.BUSY for outcome in outcomes):
                        self._sent[contact.peer_id, target] = digest


def _lost_a_holder(target: int, holders: Sequence[Contact], lost: Iterable[Contact]) -> bool:
    """Whether a lost contact was nearer to the key than the farthest node that is to hold it now."""
    if not holders:
        return False
    farthest = holders[-1].node ^ target
    return any(contact.node ^ target < farthest for contact in lost)
