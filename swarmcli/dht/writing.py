"""Storing records at the nodes nearest to their keys."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from swarmcli.dht.client import DHTClient, batches
from swarmcli.dht.core import NodeCore
from swarmcli.dht.lookup import Ask, Lookup, traverse
from swarmcli.dht.records import Record, key_id
from swarmcli.dht.routing import Contact
from swarmcli.dht.storage import Verdict
from swarmcli.errors import DHTError, NetworkError, ValidationError
from swarmcli.network.identity import PeerID

_MOST_ROUNDS = 8  # of finding somebody else for those who answered the search and then failed


@dataclass(slots=True)
class StoreResult:
    """What became of one record at all the replicas."""

    stored: int = 0  # replicas that hold it now
    current: Record | None = None  # a newer one that stood in its way; owned, and checked
    refused: int = 0


class _Job:
    """Records on their way to their replicas."""

    def __init__(self, core: NodeCore, records: Sequence[Record]) -> None:
        self.records = records
        self.results = [StoreResult() for _ in records]
        self.indices: dict[int, list[int]] = {}  # of the records of each key
        for index, record in enumerate(records):
            self.indices.setdefault(key_id(record.key), []).append(index)
        self.lookups = {target: core.new_lookup(target, core.options.num_replicas) for target in self.indices}
        self.tried: set[tuple[PeerID, int]] = set()  # (peer, index of record)

    def failed_at(self, contact: Contact, indices: Iterable[int]) -> None:
        """Somebody else must be found for these records."""
        for index in indices:
            lookup = self.lookups[key_id(self.records[index].key)]
            lookup.failed(contact.peer_id)
            lookup.reopen()

    def left(self) -> list[tuple[Contact, list[int]]]:
        """Which records go to whom next, now that the replicas are found."""
        work: dict[PeerID, tuple[Contact, list[int]]] = {}
        for target, lookup in self.lookups.items():
            for contact in lookup.nearest():
                fresh = [index for index in self.indices[target] if (contact.peer_id, index) not in self.tried]
                if fresh:
                    work.setdefault(contact.peer_id, (contact, []))[1].extend(fresh)
        return list(work.values())


class Writer:
    """Writes many records in one traversal, with at most one message to each node where all replicas are known."""

    def __init__(self, core: NodeCore, client: DHTClient) -> None:
        self._core = core
        self._client = client

    async def write(self, records: Sequence[Record]) -> list[StoreResult]:
        """One result per record. A node that fails is replaced by the next nearest that answers."""
        job = _Job(self._core, records)
        table = self._core.contacts.table
        # Where the neighbourhood is known, storing is itself the search: the replies name whoever is nearer.
        known = {target for target in job.lookups if table.knows_around(target)}

        async def ask(contact: Contact, asking: Sequence[Lookup]) -> list[Contact]:
            unknown = [lookup for lookup in asking if lookup.target not in known]
            found = await self._client.find_nodes(contact, unknown, self._core.breadth(unknown))
            indices = [index for lookup in asking if lookup.target in known for index in job.indices[lookup.target]]
            return found + await self._store_at(contact, job, indices)

        for _ in range(_MOST_ROUNDS):
            await self._traverse(list(job.lookups.values()), ask)
            work = job.left()
            if not work:
                break
            async with asyncio.TaskGroup() as group:
                for contact, indices in work:
                    group.create_task(self._deliver(contact, job, indices))
        return job.results

    async def search(self, targets: Sequence[int], width: int) -> list[Lookup]:
        """Finds the nodes nearest to each id; nothing is stored."""
        lookups = [self._core.new_lookup(target, width) for target in targets]
        count = min(width, self._core.options.bucket_size)

        async def ask(contact: Contact, asking: Sequence[Lookup]) -> list[Contact]:
            return await self._client.find_nodes(contact, asking, count)

        await self._traverse(lookups, ask)
        return lookups

    async def deliver(
        self, contact: Contact, records: Sequence[Record], contacts: int = 0
    ) -> tuple[list[StoreResult], list[Contact]]:
        """Stores records at one node, in messages within bounds; also the neighbours that it names of their keys.

        Raises NetworkError or ValidationError.
        """
        results: list[StoreResult] = []
        found: list[Contact] = []
        limits = self._core.limits
        for batch in batches(records, limits.max_reply, limits.max_records):
            outcomes, neighbours = await self._client.store(contact, batch, contacts=contacts)
            found.extend(neighbours)
            for record, outcome in zip(batch, outcomes, strict=True):
                results.append(self._result(record, outcome.verdict, outcome.current, contact))
        return results, found

    async def _traverse(self, lookups: Sequence[Lookup], ask: Ask) -> None:
        slow_after = self._core.limits.slow_after
        await traverse(lookups, ask, parallel=self._core.parallel(lookups), slow_after=slow_after)

    async def _deliver(self, contact: Contact, job: _Job, indices: list[int]) -> None:
        if contact.peer_id == self._core.endpoint.peer_id:
            for index in indices:
                job.tried.add((contact.peer_id, index))
                self._store_here(job.records[index], job.results[index])
            return
        try:
            await self._store_at(contact, job, indices)
        except (NetworkError, DHTError):
            job.failed_at(contact, indices)

    async def _store_at(self, contact: Contact, job: _Job, indices: list[int]) -> list[Contact]:
        job.tried.update((contact.peer_id, index) for index in indices)
        records = [job.records[index] for index in indices]
        results, found = await self.deliver(contact, records, self._core.options.num_replicas)
        for index, result in zip(indices, results, strict=True):
            _add(job.results[index], result)
        return found

    def _store_here(self, record: Record, result: StoreResult) -> None:
        verdict = self._core.accept(record)
        current = self._core.storage.find(key_id(record.key), record.subkey) if verdict is Verdict.STALE else None
        _add(result, self._result(record, verdict, current, None))

    def _result(self, record: Record, verdict: int, current: Record | None, source: Contact | None) -> StoreResult:
        if verdict == Verdict.STORED:
            return StoreResult(stored=1)
        if verdict == Verdict.REFUSED:
            return StoreResult(refused=1)
        if verdict != Verdict.STALE or current is None or not current.signature:
            return StoreResult()
        return StoreResult(current=current if self._believable(current, record, source) else None)

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


def _add(result: StoreResult, other: StoreResult) -> None:
    result.stored += other.stored
    result.refused += other.refused
    if other.current is not None and (result.current is None or result.current.rank < other.current.rank):
        result.current = other.current
