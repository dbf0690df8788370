"""Storing records at the nodes nearest to their keys."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from swarmcli.dht.calls import Calls, batches
from swarmcli.dht.core import NodeCore
from swarmcli.dht.keys import key_id
from swarmcli.dht.lookup import Lookup
from swarmcli.dht.records import Record
from swarmcli.dht.routing import Contact
from swarmcli.dht.storage import Verdict
from swarmcli.dht.traversal import traverse
from swarmcli.errors import DHTError, NetworkError, ValidationError
from swarmcli.network.identity import PeerID

_MOST_ROUNDS = 8  # of finding somebody else for those who answered the search and then failed


@dataclass(slots=True)
class Fate:
    """What became of one record at all the replicas."""

    stored: int = 0  # replicas that hold it now
    current: Record | None = None  # a newer one that stood in its way; owned, and checked
    refused: int = 0


class Writer:
    """Writes many records in one traversal and one message per node."""

    def __init__(self, core: NodeCore, calls: Calls) -> None:
        self._core = core
        self._calls = calls

    async def write(self, records: Sequence[Record]) -> list[Fate]:
        """One fate per record. A node that fails is replaced by the next nearest that answers."""
        width = self._core.options.num_replicas
        lookups = {target: self._core.new_lookup(target, width) for target in {key_id(r.key) for r in records}}
        fates = [Fate() for _ in records]
        asked: set[tuple[PeerID, int]] = set()
        for _ in range(_MOST_ROUNDS):
            await self._search(list(lookups.values()))
            work = self._work(records, lookups, asked)
            if not work:
                break
            async with asyncio.TaskGroup() as group:
                for contact, indices in work:
                    group.create_task(self._deliver(contact, records, indices, fates, lookups))
        return fates

    async def search(self, targets: Sequence[int], width: int) -> list[Lookup]:
        """Finds the nodes nearest to each id; nothing is stored."""
        lookups = [self._core.new_lookup(target, width) for target in targets]
        await self._search(lookups)
        return lookups

    async def deliver(self, contact: Contact, records: Sequence[Record]) -> list[Fate]:
        """Stores records at one node, in messages within bounds. Raises NetworkError or ValidationError."""
        fates: list[Fate] = []
        limits = self._core.limits
        for batch in batches(records, limits.max_reply, limits.max_records):
            outcomes = await self._calls.store(contact, batch)
            for record, outcome in zip(batch, outcomes, strict=True):
                fates.append(self._fate(record, outcome.verdict, outcome.current, contact))
        return fates

    async def _search(self, lookups: Sequence[Lookup]) -> None:
        options = self._core.options
        count = options.num_replicas + options.parallel

        async def ask(contact: Contact, asking: Sequence[Lookup]) -> list[Contact]:
            return await self._calls.find_nodes(contact, asking, max(count, min(lookups[0].width, options.bucket_size)))

        await traverse(lookups, ask, parallel=options.parallel, slow_after=self._core.limits.slow_after)

    def _work(
        self, records: Sequence[Record], lookups: dict[int, Lookup], asked: set[tuple[PeerID, int]]
    ) -> list[tuple[Contact, list[int]]]:
        """Which records (by index) go to whom next."""
        work: dict[PeerID, tuple[Contact, list[int]]] = {}
        for index, record in enumerate(records):
            for contact in lookups[key_id(record.key)].nearest():
                if (contact.peer_id, index) not in asked:
                    asked.add((contact.peer_id, index))
                    work.setdefault(contact.peer_id, (contact, []))[1].append(index)
        return list(work.values())

    async def _deliver(
        self,
        contact: Contact,
        records: Sequence[Record],
        indices: list[int],
        fates: list[Fate],
        lookups: dict[int, Lookup],
    ) -> None:
        if contact.peer_id == self._core.endpoint.peer_id:
            for index in indices:
                self._store_here(records[index], fates[index])
            return
        try:
            results = await self.deliver(contact, [records[index] for index in indices])
        except (NetworkError, DHTError):
            for index in indices:
                lookup = lookups[key_id(records[index].key)]
                lookup.failed(contact.peer_id)
                lookup.reopen()
            return
        for index, result in zip(indices, results, strict=True):
            _add(fates[index], result)

    def _store_here(self, record: Record, fate: Fate) -> None:
        verdict = self._core.accept(record)
        current = self._core.storage.find(key_id(record.key), record.subkey) if verdict is Verdict.STALE else None
        _add(fate, self._fate(record, verdict, current, None))

    def _fate(self, record: Record, verdict: int, current: Record | None, source: Contact | None) -> Fate:
        if verdict == Verdict.STORED:
            return Fate(stored=1)
        if verdict == Verdict.REFUSED:
            return Fate(refused=1)
        if verdict != Verdict.STALE or current is None or not current.signature:
            return Fate()
        return Fate(current=current if self._believable(current, record, source) else None)

    def _believable(self, current: Record, record: Record, source: Contact | None) -> bool:
        """A claim that something newer exists counts only with its owner's signature under it."""
        try:
            if (current.key, current.subkey) != (record.key, record.subkey):
                raise ValidationError("bounds: the newer record is for another subkey")
            self._core.checker.check(current, self._core.now())
        except ValidationError as error:
            if source is not None:
                self._core.report(source.peer_id, "record", f"sent a record that does not count: {error}")
            return False
        return current.sequence >= record.sequence


def _add(fate: Fate, other: Fate) -> None:
    fate.stored += other.stored
    fate.refused += other.refused
    if other.current is not None and (fate.current is None or fate.current.rank < other.current.rank):
        fate.current = other.current
