"""Storing records at the nodes nearest to their keys."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from swarmcli.dht import messages
from swarmcli.dht.core import NodeCore
from swarmcli.dht.records import Record, key_id
from swarmcli.dht.routing import Contact
from swarmcli.dht.storage import StoreVerdict
from swarmcli.errors import ConnectionLost, DHTError, NetworkError, ValidationError
from swarmcli.network.identity import PeerID

STORE_ROUNDS = 8  # of replacing nodes that answered the search and then failed to store


@dataclass(slots=True)
class StoreResult:
    """The outcome of one record at all the replicas."""

    stored: int = 0  # replicas that hold it now
    current: Record | None = None  # a newer one that stood in its way; owned, and checked


async def write(core: NodeCore, records: Sequence[Record]) -> list[StoreResult]:
    """Writes many records: the keys side by side, those of one key together.

    One result per record. A node that fails is replaced by the next nearest that answers.
    """
    results = [StoreResult() for _ in records]
    of_key: dict[int, list[int]] = {}  # indices of the records of each key
    for index, record in enumerate(records):
        of_key.setdefault(key_id(record.key), []).append(index)
    async with asyncio.TaskGroup() as placing:
        for target, indices in of_key.items():
            there = _place(core, target, [records[i] for i in indices], [results[i] for i in indices])
            placing.create_task(there)
    return results


async def _place(core: NodeCore, target: int, records: Sequence[Record], results: Sequence[StoreResult]) -> None:
    """Writes the records of one key, and notes what came of each."""
    # Where the neighbourhood is known, storing is itself the search: the replies name nodes that are nearer.
    known = core.contacts.table.knows_around(target)
    named = 0 if core.rests else core.num_replicas  # on a slow line, names of neighbours cost more than the records
    tried: set[PeerID] = set()
    failed: set[PeerID] = set()

    async def store(contact: Contact) -> list[Contact]:
        if contact.peer_id in tried:
            return []
        tried.add(contact.peer_id)
        outcomes, found = list[messages.Outcome](), list[Contact]()
        if contact.peer_id == core.peer_id:
            outcomes = [_keep(core, record) for record in records]
        else:
            outcomes, found = await deliver(core, contact, records, named)
        for record, result, outcome in zip(records, results, outcomes, strict=True):
            _note(core, result, record, outcome, contact.peer_id)
        return found

    async def seek(contact: Contact) -> Sequence[Contact]:
        if contact.peer_id in failed:
            raise ConnectionLost("it has answered, and then failed to store")
        if known:
            return await store(contact)
        return await core.find_nodes(contact, target, core.breadth(target))

    async def put(contact: Contact) -> None:
        try:
            await store(contact)
        except (NetworkError, DHTError):
            failed.add(contact.peer_id)

    for _ in range(STORE_ROUNDS):
        before = len(failed)
        nearest = await core.search(target, seek)
        async with asyncio.TaskGroup() as group:
            for contact in nearest:
                if contact.peer_id not in tried:
                    group.create_task(put(contact))
        if len(failed) == before:
            return


def _keep(core: NodeCore, record: Record) -> messages.Outcome:
    """This node is itself one of the replicas."""
    verdict = core.accept(record)
    stale = verdict is StoreVerdict.STALE
    return messages.Outcome(verdict, core.storage.find(key_id(record.key), record.subkey) if stale else None)


async def deliver(
    core: NodeCore, contact: Contact, records: Sequence[Record], contacts: int = 0
) -> tuple[list[messages.Outcome], list[Contact]]:
    """Stores records at one node, in messages within bounds; also the neighbours that it names of their keys.

    Raises NetworkError or ValidationError.
    """
    batches: list[list[Record]] = []
    size = 0
    for record in records:
        if not batches or size + record.size > core.limits.max_reply or len(batches[-1]) >= messages.MAX_RECORDS:
            batches.append([])
            size = 0
        batches[-1].append(record)
        size += record.size
    outcomes: list[messages.Outcome] = []
    found: list[Contact] = []
    for batch in batches:
        more, neighbours = await core.store(contact, batch, contacts=contacts)
        outcomes.extend(more)
        found.extend(neighbours)
    return outcomes, found


def _note(core: NodeCore, result: StoreResult, record: Record, outcome: messages.Outcome, source: PeerID) -> None:
    """Counts one replica's outcome. That something newer exists is believed only with its owner's signature."""
    current = outcome.current
    if outcome.verdict == StoreVerdict.STORED:
        result.stored += 1
    if outcome.verdict != StoreVerdict.STALE or current is None or not current.signature:
        return
    try:
        if (current.key, current.subkey) != (record.key, record.subkey):
            raise ValidationError("bounds: the newer record is for another subkey")
        core.checker.check(current, core.now())
    except ValidationError as error:
        core.report(source, "record", f"sent a record that does not count: {error}")
        return
    if current.sequence >= record.sequence and (result.current is None or result.current.rank < current.rank):
        result.current = current
