"""DHTNode: one node of the hash table, as coroutines."""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from swarmcli.dht.authoring import Author
from swarmcli.dht.bootstrap import find_first_contact
from swarmcli.dht.client import DHTClient
from swarmcli.dht.core import NodeCore, NodeOptions
from swarmcli.dht.limits import DHTLimits
from swarmcli.dht.maintenance import Maintenance
from swarmcli.dht.reading import Follower, KeyRead, Reader
from swarmcli.dht.records import (
    OwnedSubkey,
    Record,
    Subkey,
    ValueWithExpiration,
    encode_subkey,
    key_id,
    merge_all,
    node_id,
    read_records,
)
from swarmcli.dht.replication import Replicator
from swarmcli.dht.schema import RecordValidator
from swarmcli.dht.service import DHTService
from swarmcli.dht.writing import StoreResult, Writer
from swarmcli.errors import ValidationError
from swarmcli.network.endpoint import Endpoint
from swarmcli.network.identity import Identity


@dataclass(slots=True)
class _Cached:
    records: dict[bytes, Record]
    read_at: float  # loop time


class ReadCache:
    """Bounded by entries, by bytes (a quarter of the storage's bound) and by age. Keys are ids."""

    def __init__(self, limits: DHTLimits) -> None:
        self._limits = limits
        self._entries: OrderedDict[int, _Cached] = OrderedDict()
        self._size = 0

    def replace(self, number: int, records: dict[bytes, Record], loop_time: float) -> None:
        """What all replicas together hold has been read."""
        self.drop(number)
        self._entries[number] = _Cached(dict(records), loop_time)
        self._size += _size(records.values())
        self._shrink()

    def amend(self, number: int, records: Iterable[Record]) -> None:
        """This node has stored something: readers of the cached rest see it too. Nothing is cached anew."""
        cached = self._entries.get(number)
        if cached is not None:
            self._size -= _size(cached.records.values())
            merge_all(cached.records, records)
            self._size += _size(cached.records.values())
            self._shrink()

    def get(self, number: int, now: float, loop_time: float) -> list[Record] | None:
        """The cached records if they are young and at least one of them is alive at swarm time `now`."""
        cached = self._entries.get(number)
        if cached is None:
            return None
        if loop_time - cached.read_at > self._limits.cache_age:
            self.drop(number)
            return None
        self._entries.move_to_end(number)
        records = list(cached.records.values())
        return records if any(record.expiration > now for record in records) else None

    def drop(self, number: int) -> None:
        cached = self._entries.pop(number, None)
        if cached is not None:
            self._size -= _size(cached.records.values())

    def clear(self) -> None:
        self._entries.clear()
        self._size = 0

    def _shrink(self) -> None:
        while self._entries and (
            len(self._entries) > self._limits.cache_entries or self._size > self._limits.max_storage // 4
        ):
            self.drop(next(iter(self._entries)))


def _size(records: Iterable[Record]) -> int:
    return sum(record.size for record in records)


logger = logging.getLogger(__name__)

_MOST_RENUMBERINGS = 3  # of an owned record that an earlier life of its owner stands in the way of


@dataclass(frozen=True, slots=True)
class DHTStatistics:
    """What a node holds and has refused so far."""

    contacts: int
    keys: int
    records: int
    bytes: int
    refused_records: Mapping[str, int]  # rule → how many records did not pass it
    malformed_messages: Mapping[str, int]  # reason → how many messages no honest node would have sent


class DHTNode:
    """A node of the distributed hash table. Make one with `create`, end it with `shutdown`."""

    def __init__(self, endpoint: Endpoint, options: NodeOptions, validators: Iterable[RecordValidator]) -> None:
        self.endpoint = endpoint
        self.peer_id = endpoint.peer_id
        self.client_mode = endpoint.client_mode
        self._core = NodeCore(endpoint, options, validators)
        self._client = DHTClient(self._core)
        self._reader = Reader(self._core, self._client)
        self._writer = Writer(self._core, self._client)
        self._author = Author(endpoint.identity, options.limits)
        self._cache = ReadCache(options.limits)
        self._maintenance = Maintenance(self._core, self._client, self._writer)
        self._service = DHTService(self._core)
        self._replicator = Replicator(self._core, self._client, self._writer)
        self._work: asyncio.Task[None] | None = None
        self._owns_endpoint = True

    @classmethod
    async def create(
        cls,
        endpoint: Endpoint,
        *,
        initial_peers: Sequence[str] = (),
        num_replicas: int = 5,
        bucket_size: int = 20,
        parallel: int = 3,
        cache_locally: bool = True,
        record_validators: Iterable[RecordValidator] = (),
        startup_timeout: float = 15.0,
        limits: DHTLimits = DHTLimits(),  # noqa: B008 — a frozen value
        owns_endpoint: bool = True,
    ) -> DHTNode:
        """A node on an endpoint that has been started, once it knows its neighbours.

        Raises BootstrapError if there are `initial_peers` and none answers within `startup_timeout` seconds, and
        AddressError for one that cannot be read. With `owns_endpoint` the endpoint is closed with the node, also
        when this fails.
        """
        options = NodeOptions(num_replicas, bucket_size, parallel, cache_locally, limits)
        node = cls(endpoint, options, record_validators)
        node._owns_endpoint = owns_endpoint
        node._start()
        try:
            await node._join(initial_peers, startup_timeout)
        except (Exception, asyncio.CancelledError):
            await node.shutdown()
            raise
        return node

    async def store(self, key: str, value: Any, expiration_time: float, subkey: Subkey = None) -> bool:
        """Whether at least one replica holds the value now.

        False: expired already, older than what is stored, refused by a validator (logged), or nobody answered.
        `expiration_time` is swarm time and capped at `limits.max_expiration` from now. TypeError and ValueError
        name an argument that cannot be stored at all.
        """
        results = await self.store_many([key], [value], expiration_time, subkeys=[subkey])
        return all(results.values())

    async def store_many(
        self,
        keys: Sequence[str],
        values: Sequence[Any],
        expiration_time: float | Sequence[float],
        subkeys: Sequence[Subkey] | None = None,
    ) -> dict[str | tuple[str, Subkey], bool]:
        """Stores many with one message per node. The results are by key, or by (key, subkey) where there is one."""
        subkeys = [None] * len(keys) if subkeys is None else subkeys
        if not isinstance(expiration_time, Sequence):
            expiration_time = [expiration_time] * len(keys)
        if not len(keys) == len(values) == len(subkeys) == len(expiration_time):
            raise ValueError("keys, values, subkeys and expiration times have different lengths")
        now = self._core.now()
        records = [
            self._author.write(*arguments, now)
            for arguments in zip(keys, subkeys, values, expiration_time, strict=True)
        ]
        stored = await self._store_records(records)
        names = [key if subkey is None else (key, subkey) for key, subkey in zip(keys, subkeys, strict=True)]
        return dict(zip(names, stored, strict=True))

    async def get(self, key: str, latest: bool = False) -> ValueWithExpiration | None:
        """The live value under a key, or with subkeys a dictionary subkey → ValueWithExpiration; None if none is found.

        With `latest` all replicas are asked and merged; without it the first answer or what was read in the last
        seconds is enough.
        """
        return (await self.get_many([key], latest=latest))[key]

    async def get_many(self, keys: Sequence[str], latest: bool = False) -> dict[str, ValueWithExpiration | None]:
        """Reads many keys with one message per node."""
        found: dict[str, list[Record]] = {}
        if not latest and self._core.options.cache_locally:
            found = {key: records for key in keys if (records := self._cached(key)) is not None}
        reads = {key: KeyRead(key_id(key)) for key in keys if key not in found}
        await self._reader.read(list(reads.values()), latest=latest)
        for key, read in reads.items():
            found[key] = list(read.records.values())
            if self._core.options.cache_locally:
                self._cache.replace(read.target, read.records, self._core.loop_time())
        now = self._core.now()
        return {key: read_records(found[key], now) for key in keys}

    def own_subkey(self, name: bytes = b"", identity: Identity | None = None) -> OwnedSubkey:
        """A subkey that only this peer can write; `store` signs and numbers what goes under it.

        With another `identity` than the node's own, the subkey is that one's, for which this node signs from now on.
        """
        if identity is None:
            return OwnedSubkey(self.peer_id, name)
        self._author.adopt(identity)
        return OwnedSubkey(identity.peer_id, name)

    async def withdraw(self, key: str, subkey: OwnedSubkey) -> bool:
        """Takes back what this peer stored under one of its own subkeys; whether at least one replica knows by now."""
        read = KeyRead(key_id(key))
        await self._reader.read([read], latest=True)
        current = read.records.get(encode_subkey(subkey))
        tombstone = self._author.withdraw(key, subkey, current, self._core.now())
        return all(await self._store_records([tombstone]))

    def follow(self, key: str) -> Follower:
        """For reading a key again and again: each `refresh` costs what has changed since the last."""
        return Follower(self._core, self._reader, key)

    def add_validators(self, validators: Iterable[RecordValidator]) -> None:
        """More rules, for what is written from now on and for whatever is read from now on."""
        self._core.checker.add(validators)
        self._cache.clear()

    def known_addresses(self) -> list[str]:
        """Where the peers that this node knows at present can be dialed, in the form that `initial_peers` takes."""
        return [
            f"{address}/{contact.peer_id.text}"
            for contact in self._core.contacts.table
            for address in contact.addresses
        ]

    def statistics(self) -> DHTStatistics:
        """A snapshot."""
        core = self._core
        return DHTStatistics(
            contacts=len(core.contacts.table),
            keys=len(core.storage.keys(core.now())),
            records=core.storage.count(),
            bytes=core.storage.size,
            refused_records=dict(core.checker.refused),
            malformed_messages=dict(core.malformed),
        )

    async def shutdown(self) -> None:
        """Ends the node and, if it owns it, the endpoint. Idempotent; leaves no task."""
        self._unsubscribe()
        self._service.stop()
        if self._work is not None:
            self._work.cancel()
            await asyncio.wait([self._work])
        if self._owns_endpoint:
            await self.endpoint.close()

    def _start(self) -> None:
        contacts = self._core.contacts
        contacts.on_lost.append(self._maintenance.contact_lost)
        contacts.on_doubtful.append(self._maintenance.contact_doubtful)
        if not self.client_mode:
            contacts.on_appeared.append(self._replicator.contact_appeared)
            contacts.on_lost.append(self._replicator.contact_lost)
            self._service.start()
        self._unsubscribe = self.endpoint.events.subscribe(self._maintenance.on_event)

    async def _join(self, initial_peers: Sequence[str], timeout: float) -> None:
        if initial_peers:
            first = await find_first_contact(self._core, self._client, initial_peers, timeout)
            self._maintenance.remember(first)
            await self._maintenance.explore(node_id(self.peer_id))
        self._work = asyncio.create_task(self._run(), name=f"dht {self.peer_id.short}")

    async def _run(self) -> None:
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._maintenance.run())
                if not self.client_mode:
                    group.create_task(self._replicator.run())
        except ExceptionGroup:
            logger.exception("the node no longer looks after its contacts and records")

    def _cached(self, key: str) -> list[Record] | None:
        return self._cache.get(key_id(key), self._core.now(), self._core.loop_time())

    async def _store_records(self, records: list[Record]) -> list[bool]:
        """Whether each was stored; numbers those anew that a record from an earlier life of this owner outranks."""
        results = [StoreResult() for _ in records]
        left = [index for index, record in enumerate(records) if self._is_acceptable(record)]
        for _ in range(1 + _MOST_RENUMBERINGS):
            if not left:
                break
            for index, result in zip(left, await self._writer.write([records[i] for i in left]), strict=True):
                results[index] = result
            left = [i for i in left if results[i].current is not None and self._author.owns(records[i])]
            for index in left:
                current = results[index].current
                assert current is not None
                records[index] = self._author.surpass(records[index], current, self._core.now())
        for record, result in zip(records, results, strict=True):
            if result.stored:
                self._cache.amend(key_id(record.key), [record])
        return [result.stored > 0 for result in results]

    def _is_acceptable(self, record: Record) -> bool:
        try:
            self._core.checker.check(record, self._core.now())
        except ValidationError as error:
            logger.warning("not stored: %s", error)
            return False
        return record.expiration > self._core.now()
