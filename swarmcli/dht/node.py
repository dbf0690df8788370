"""DHTNode: one node of the hash table, as coroutines."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

from swarmcli.dht.bounds import DHTLimits
from swarmcli.dht.core import NodeCore
from swarmcli.dht.first_contact import FirstContacts
from swarmcli.dht.maintenance import Maintenance
from swarmcli.dht.reading import Follower, KeyRead, read
from swarmcli.dht.records import (
    Author,
    OwnedSubkey,
    Record,
    Subkey,
    ValueWithExpiration,
    encode_subkey,
    key_id,
    node_id,
    read_records,
)
from swarmcli.dht.replication import Replicator
from swarmcli.dht.routing import Change, Contact
from swarmcli.dht.schema import RecordValidator
from swarmcli.dht.service import DHTService
from swarmcli.dht.storage import ReadCache
from swarmcli.dht.writing import write
from swarmcli.errors import ValidationError
from swarmcli.events import Event, OwnAddressesChanged
from swarmcli.network.endpoint import Endpoint
from swarmcli.network.identity import Identity
from swarmcli.network.loop_thread import loop_time
from swarmcli.network.task_owner import TaskOwner

logger = logging.getLogger(__name__)

RENUMBERINGS = 3  # of one record, where its owner's earlier life has stored a higher number


class DHTNode:
    """A node of the distributed hash table. Make one with `create`, end it with `shutdown`."""

    def __init__(self, core: NodeCore, *, owns_endpoint: bool) -> None:
        self.endpoint = core.endpoint
        self.peer_id = core.peer_id
        self.core = core
        self._author = Author(core.endpoint.identity, core.limits)
        self._cache = ReadCache(core.limits)
        self._maintenance = Maintenance(core)
        self._service = DHTService(core)
        self._replicator = Replicator(core)
        self._tasks = TaskOwner()
        self._owns_endpoint = owns_endpoint
        self._moved = asyncio.Event()

    @classmethod
    async def create(
        cls,
        endpoint: Endpoint,
        *,
        initial_peers: Sequence[str] = (),
        num_replicas: int = 5,
        cache_locally: bool = True,
        record_validators: Iterable[RecordValidator] = (),
        startup_timeout: float = 15.0,
        further_peers: Callable[[], Iterable[str]] = tuple,
        limits: DHTLimits = DHTLimits(),
        owns_endpoint: bool = True,
    ) -> DHTNode:
        """Starts a node on a started endpoint. Returns once the node knows its neighbours.

        Raises BootstrapError if there are `initial_peers` and none answers within `startup_timeout` seconds, and
        AddressError for one that cannot be read. With an infinite timeout it goes on trying, and asks `further_peers`
        now and then for more addresses. With `owns_endpoint` the endpoint is closed with the node, also when this
        fails.
        """
        core = NodeCore(
            endpoint,
            limits if cache_locally else replace(limits, cache_entries=0),
            record_validators,
            num_replicas=num_replicas,
        )
        node = cls(core, owns_endpoint=owns_endpoint)
        try:
            await node._join(initial_peers, FirstContacts(core, startup_timeout, further_peers))
        except (Exception, asyncio.CancelledError):
            await node.shutdown()
            raise
        return node

    @property
    def client_mode(self) -> bool:
        """See Endpoint.client_mode."""
        return self.endpoint.client_mode

    async def store(self, key: str, value: Any, expiration_time: float, subkey: Subkey = None) -> bool:
        """Whether at least one replica holds the value now.

        False: expired already, older than what is stored, refused by a validator or under a subkey that another peer
        owns (both are logged), or nobody answered.
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
        """Stores many, those of each key together.

        The results are by key, or by (key, subkey) where there is one.
        """
        subkeys = [None] * len(keys) if subkeys is None else subkeys
        if not isinstance(expiration_time, Sequence):
            expiration_time = [expiration_time] * len(keys)
        if not len(keys) == len(values) == len(subkeys) == len(expiration_time):
            raise ValueError("keys, values, subkeys and expiration times have different lengths")
        now = self.core.now()
        results: dict[str | tuple[str, Subkey], bool] = {}
        own, records = [], []
        for key, subkey, value, expiration in zip(keys, subkeys, values, expiration_time, strict=True):
            name = key if subkey is None else (key, subkey)
            results[name] = False
            if self._author.may_write(subkey):
                own.append(name)
                records.append(self._author.write(key, subkey, value, expiration, now))
            else:
                logger.warning("%r is not stored under %r: only the owner of a subkey can write it", key, subkey)
        return results | dict(zip(own, await self._store_records(records), strict=True))

    async def get(self, key: str, latest: bool = False) -> ValueWithExpiration | None:
        """The live value under a key, or with subkeys a dictionary subkey → ValueWithExpiration; None if none is found.

        With `latest` all replicas are asked and merged; without it the first answer or what was read in the last
        seconds is enough.
        """
        return (await self.get_many([key], latest=latest))[key]

    async def get_many(self, keys: Sequence[str], latest: bool = False) -> dict[str, ValueWithExpiration | None]:
        """Reads many keys side by side."""
        found: dict[str, Iterable[Record]] = {}

        async def look(key: str) -> None:
            reading = KeyRead(key_id(key))
            await read(self.core, reading, latest=latest)
            found[key] = reading.records.values()
            self._cache.put(reading.target, reading.records, loop_time())

        async with asyncio.TaskGroup() as group:
            for key in dict.fromkeys(keys):
                cached = None if latest else self._cache.get(key_id(key), self.core.now(), loop_time())
                if cached is not None:
                    found[key] = cached
                else:
                    group.create_task(look(key))
        now = self.core.now()
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
        """Takes back what this peer stored under one of its own subkeys. Returns whether at least one replica knows."""
        reading = KeyRead(key_id(key))
        await read(self.core, reading, latest=True)
        current = reading.records.get(encode_subkey(subkey))
        tombstone = self._author.withdraw(key, subkey, current, self.core.now())
        return all(await self._store_records([tombstone]))

    def follow(self, key: str, *, only_bytes: bool = False) -> Follower:
        """For reading a key again and again: each `refresh` transfers what has changed since the last. `only_bytes`:
        all other values are left out."""
        return Follower(self.core, key, only_bytes=only_bytes)

    def add_validators(self, validators: Iterable[RecordValidator]) -> None:
        """More rules, for what is written from now on and for whatever is read from now on."""
        self.core.checker.add(validators)
        self._cache.clear()

    def known_addresses(self) -> list[str]:
        """Addresses of the peers that this node knows now: where they have answered, or say that they can be dialed; in
        the form that `initial_peers` takes."""
        return [
            f"{address}/{contact.peer_id.text}" for contact in self.core.contacts.table for address in contact.addresses
        ]

    async def shutdown(self) -> None:
        """Ends the node and, if it owns it, the endpoint. Idempotent; leaves no task."""
        if self._contact_changed in self.core.contacts.listeners:
            self.core.contacts.listeners.remove(self._contact_changed)
        self._service.stop()
        await self._tasks.close()
        if self._owns_endpoint:
            await self.endpoint.close()

    async def _join(self, initial_peers: Sequence[str], first_contacts: FirstContacts) -> None:
        # Before the first call: nodes that are met while joining ask back, and changes of contacts must be noted.
        self.core.contacts.listeners.append(self._maintenance.contact_changed)
        self._tasks.hear(self.endpoint.events, self._on_event)
        self.core.contacts.listeners.append(self._replicator.contact_changed)
        self.core.contacts.listeners.append(self._contact_changed)
        self._serve_or_stop()
        if initial_peers:
            self._maintenance.first_contacts = await first_contacts.find(initial_peers)
            self._moved.clear()  # whoever hears of this node now hears where it is
            await self.core.explore(node_id(self.peer_id))
        upkeep = self._maintenance
        steps = upkeep.keep_pinging, upkeep.keep_probing, upkeep.keep_exploring, self._replicator.run
        self._tasks.keep(self.endpoint.events, *steps, self._keep_introducing)

    def rest(self, rests: bool) -> None:
        """While it rests, this node finds and stores as ever, but leaves the others' tables: nobody stores at it or
        asks it. For a peer whose line is so slow that others' records would fill it. Idempotent."""
        if self.core.rests != rests:
            self.core.rests = rests
            self._serve_or_stop()
            self._moved.set()

    def _on_event(self, event: Event) -> None:
        self._maintenance.on_event(event)
        if isinstance(event, OwnAddressesChanged):
            self._serve_or_stop()
            self._moved.set()

    def _contact_changed(self, change: Change, contact: Contact) -> None:
        self._serve_or_stop()

    def _serve_or_stop(self) -> None:
        """A peer that can be dialed answers other nodes; one that only asks does so while it is cut off. Called
        whenever that may have changed."""
        if self.core.only_asks and not self.core.cut_off:
            self._service.stop()
        else:
            self._service.start()

    async def _keep_introducing(self) -> None:
        """The neighbours hear where this node can be dialed, or that it cannot be any more, as soon as that changes."""
        await self._moved.wait()
        self._moved.clear()
        await self.core.explore(node_id(self.peer_id))

    async def _store_records(self, records: list[Record]) -> list[bool]:
        """Whether each was stored. Renumbers and stores again those that a record from their owner's earlier life
        outranks."""
        stored = [False] * len(records)
        left = [index for index, record in enumerate(records) if self._is_acceptable(record)]
        for _ in range(1 + RENUMBERINGS):
            outranked: list[int] = []
            for index, result in zip(left, await write(self.core, [records[i] for i in left]), strict=True):
                stored[index] = result.stored > 0
                if result.current is not None:
                    higher = self._author.surpass(records[index], result.current, self.core.now())
                    if higher is not None:
                        records[index] = higher
                        outranked.append(index)
            left = outranked
            if not left:
                break
        for record in records:
            self._cache.drop(key_id(record.key))  # the next reader sees what is stored now
        return stored

    def _is_acceptable(self, record: Record) -> bool:
        try:
            self.core.checker.check(record, self.core.now())
        except ValidationError as error:
            logger.warning("not stored: %s", error)
            return False
        return record.expiration > self.core.now()
