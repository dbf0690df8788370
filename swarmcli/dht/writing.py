"""Storing records at the nodes nearest to their keys."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from swarmcli.dht import messages
from swarmcli.dht.core import NodeCore
from swarmcli.dht.lookup import Lookup
from swarmcli.dht.records import Record, key_id
from swarmcli.dht.routing import Contact
from swarmcli.dht.storage import StoreVerdict
from swarmcli.errors import DHTError, NetworkError, ValidationError
from swarmcli.network.identity import PeerID


@dataclass(slots=True)
class StoreResult:
    """The outcome of one record at all the replicas."""

    stored: int = 0  # replicas that hold it now
    current: Record | None = None  # a newer one that stood in its way; owned, and checked


async def write(core: NodeCore, records: Sequence[Record]) -> list[StoreResult]:
    """Writes many records in one traversal, with at most one message to each node where all replicas are known.

    One result per record. A node that fails is replaced by the next nearest that answers.
    """
    results = [StoreResult() for _ in records]
    of_key: dict[int, list[int]] = {}  # indices of the records of each key
    for index, record in enumerate(records):
        of_key.setdefault(key_id(record.key), []).append(index)
    lookups = {target: core.new_lookup(target, core.num_replicas) for target in of_key}
    # Where the neighbourhood is known, storing is itself the search: the replies name nodes that are nearer.
    known = {target for target in lookups if core.contacts.table.knows_around(target)}
    tried: set[tuple[PeerID, int]] = set()  # (peer, index of record)
    named = 0 if core.rests else core.num_replicas  # neighbours take more of a slow line than what is stored

    async def store_at(contact: Contact, indices: Sequence[int]) -> list[Contact]:
        tried.update((contact.peer_id, index) for index in indices)
        outcomes, found = await deliver(core, contact, [records[index] for index in indices], named)
        for index, outcome in zip(indices, outcomes, strict=True):
            _note(core, results[index], records[index], outcome, contact.peer_id)
        return found

    async def ask(contact: Contact, asking: Sequence[Lookup]) -> list[Contact]:
        unknown = [lookup for lookup in asking if lookup.target not in known]
        found = await core.find_nodes(contact, unknown, core.breadth(unknown))
        indices = [index for lookup in asking if lookup.target in known for index in of_key[lookup.target]]
        return found + await store_at(contact, indices)

    async def store_where_found(contact: Contact, indices: Sequence[int]) -> None:
        try:
            if contact.peer_id == core.peer_id:
                tried.update((core.peer_id, index) for index in indices)
                for index in indices:
                    record, verdict = records[index], core.accept(records[index])
                    newer = (
                        core.storage.find(key_id(record.key), record.subkey) if verdict is StoreVerdict.STALE else None
                    )
                    _note(core, results[index], record, messages.Outcome(verdict, newer), core.peer_id)
            else:
                await store_at(contact, indices)
        except (NetworkError, DHTError):
            for index in indices:  # the next nearest node takes these
                lookup = lookups[key_id(records[index].key)]
                lookup.failed(contact.peer_id)
                lookup.finished = False

    for _ in range(core.limits.store_rounds):
        await core.traverse(list(lookups.values()), ask)
        work: dict[PeerID, tuple[Contact, list[int]]] = {}
        for target, lookup in lookups.items():
            for contact in lookup.nearest():
                if fresh := [index for index in of_key[target] if (contact.peer_id, index) not in tried]:
                    work.setdefault(contact.peer_id, (contact, []))[1].extend(fresh)
        if not work:
            break
        async with asyncio.TaskGroup() as group:
            for contact, indices in work.values():
                group.create_task(store_where_found(contact, indices))
    return results


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
