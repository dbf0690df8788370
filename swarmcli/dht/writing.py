"""Storing records at the nodes nearest to their keys."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from swarmcli.dht import messages
from swarmcli.dht.core import NodeCore
from swarmcli.dht.lookup import Together
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
    """Writes many records side by side, with at most one message to each node where all replicas are known.

    One result per record. A node that fails is replaced by the next nearest that answers.
    """
    results = [StoreResult() for _ in records]
    of_key: dict[int, list[int]] = {}  # indices of the records of each key
    for index, record in enumerate(records):
        of_key.setdefault(key_id(record.key), []).append(index)
    # Where the neighbourhood is known, storing is itself the search: the replies name nodes that are nearer.
    known = {target for target in of_key if core.contacts.table.knows_around(target)}
    tried: set[tuple[PeerID, int]] = set()  # (peer, index of record)
    named = 0 if core.rests else core.num_replicas  # neighbours take more of a slow line than what is stored

    async def store(contact: Contact, targets: Sequence[int]) -> list[Contact]:
        indices = [i for target in targets for i in of_key[target] if (contact.peer_id, i) not in tried]
        tried.update((contact.peer_id, index) for index in indices)
        outcomes, found = list[messages.Outcome](), list[Contact]()
        if contact.peer_id == core.peer_id:
            outcomes = [_keep(core, records[index]) for index in indices]
        else:
            outcomes, found = await deliver(core, contact, [records[index] for index in indices], named)
        for index, outcome in zip(indices, outcomes, strict=True):
            _note(core, results[index], records[index], outcome, contact.peer_id)
        return found

    async def ask(contact: Contact, targets: Sequence[int]) -> list[Contact]:
        unknown = [target for target in targets if target not in known]
        found = await core.find_nodes(contact, unknown, core.breadth(unknown))
        return found + await store(contact, [target for target in targets if target in known])

    asking, storing = Together(ask), Together(store)

    async def place(target: int) -> None:
        failed: set[PeerID] = set()

        async def seek(contact: Contact) -> Sequence[Contact]:
            if contact.peer_id in failed:
                raise ConnectionLost("it has answered, and then failed to store")
            return await asking.ask(contact, target)

        async def put(contact: Contact) -> None:
            try:
                await storing.ask(contact, target)
            except (NetworkError, DHTError):
                failed.add(contact.peer_id)

        for _ in range(STORE_ROUNDS):
            before = len(failed)
            nearest = await core.search(target, seek)
            lacking = [each for each in nearest if any((each.peer_id, i) not in tried for i in of_key[target])]
            async with asyncio.TaskGroup() as group:
                for contact in lacking:
                    group.create_task(put(contact))
            if len(failed) == before:
                return

    async with asyncio.TaskGroup() as placing:
        for target in of_key:
            placing.create_task(place(target))
    return results


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
