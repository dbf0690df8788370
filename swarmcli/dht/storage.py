"""What a node keeps: records by key for the network, bounded, with expiration, and with a history that followers read;
and for itself what it has read lately.

Every accepted record gets the next number of the storage's own count. The records of a key are kept in that order,
so that "what changed since number n" costs no more than what did change.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum

from swarmcli.dht.limits import DHTLimits
from swarmcli.dht.records import NO_SUBKEY, Record, is_owned, key_id


class Verdict(IntEnum):
    """What a node did with a record that it was asked to store."""

    STORED = 0  # it is kept, or was there already
    STALE = 1  # a newer one is there
    REFUSED = 2  # a validator or a bound said no
    FULL = 3  # no room: too many subkeys under the key, or the node's storage is full
    BUSY = 4  # this peer writes too much; later again
    EXPIRED = 5


@dataclass(slots=True)
class Stored:
    """A record and its number in the storage's count."""

    record: Record
    version: int
    fingerprint: int


@dataclass(slots=True)
class KeyEntry:
    """The records of one key, in the order of their versions."""

    size: int = 0  # bytes charged
    records: dict[bytes, Stored] = field(default_factory=dict)

    def since(self, version: int) -> list[Stored]:
        """What was stored after `version`, oldest first."""
        newer: list[Stored] = []
        for stored in reversed(self.records.values()):
            if stored.version <= version:
                break
            newer.append(stored)
        newer.reverse()
        return newer

    def digest(self) -> int:
        """Equal for two replicas exactly when they hold the same records (up to a 64-bit collision)."""
        digest = 0
        for stored in self.records.values():
            digest ^= stored.fingerprint
        return digest


class Storage:
    """Bounded records of many keys. Times are swarm time, handed in; nothing here does I/O."""

    def __init__(self, limits: DHTLimits) -> None:
        self.size = 0  # bytes charged
        self.version = 0  # of the newest change
        self._limits = limits
        self._entries: dict[int, KeyEntry] = {}
        self._expirations: list[tuple[float, int, bytes]] = []

    def put(self, record: Record, now: float) -> Verdict:
        """Keeps a checked record, unless it is expired, older than what is there, or there is no room."""
        if record.expiration <= now:
            return Verdict.EXPIRED
        self.purge(now)
        number = key_id(record.key)
        entry = self._entries.get(number) or KeyEntry()
        known = entry.records.get(record.subkey)
        if known is not None and known.record.rank >= record.rank:
            return Verdict.STORED if known.record == record else Verdict.STALE
        growth = record.size - (known.record.size if known is not None else 0)
        if self.size + growth > self._limits.max_storage or entry.size + growth > self._limits.max_entry:
            return Verdict.FULL
        if known is None and len(entry.records) >= self._limits.max_subkeys:
            # A record with an owner takes the place of one without, of which the one that expires first goes.
            unowned = [each.record for each in entry.records.values() if not is_owned(each.record.subkey)]
            expendable = [each for each in unowned if each.subkey != NO_SUBKEY]
            if not expendable or not is_owned(record.subkey):
                return Verdict.FULL
            self._remove(number, entry, min(expendable, key=lambda each: each.expiration).subkey)
        entry.records.pop(record.subkey, None)  # first, so that the dictionary's order stays the order of versions
        self.size += growth
        entry.size += growth
        self.version += 1
        entry.records[record.subkey] = Stored(record, self.version, record.fingerprint())
        self._entries[number] = entry
        heapq.heappush(self._expirations, (record.expiration, number, record.subkey))
        if len(self._expirations) > 64 + 4 * len(self._entries) and len(self._expirations) > 2 * self.count():
            self._rebuild_expirations()
        return Verdict.STORED

    def entry(self, number: int, now: float) -> KeyEntry | None:
        """The live records of a key."""
        self.purge(now)
        return self._entries.get(number)

    def find(self, number: int, subkey: bytes) -> Record | None:
        """One record, for a writer who was told that its record is stale."""
        entry = self._entries.get(number)
        stored = entry.records.get(subkey) if entry is not None else None
        return None if stored is None else stored.record

    def keys(self, now: float) -> list[int]:
        """The ids of all keys with live records."""
        self.purge(now)
        return list(self._entries)

    def records(self, number: int) -> list[Record]:
        """All records of a key."""
        entry = self._entries.get(number)
        return [stored.record for stored in entry.records.values()] if entry is not None else []

    def count(self) -> int:
        """How many records there are."""
        return sum(len(entry.records) for entry in self._entries.values())

    def purge(self, now: float) -> None:
        """Forgets what is expired."""
        while self._expirations and self._expirations[0][0] <= now:
            _, number, subkey = heapq.heappop(self._expirations)
            entry = self._entries.get(number)
            stored = entry.records.get(subkey) if entry is not None else None
            if entry is not None and stored is not None and stored.record.expiration <= now:
                self._remove(number, entry, subkey)

    def _remove(self, number: int, entry: KeyEntry, subkey: bytes) -> None:
        size = entry.records.pop(subkey).record.size
        self.size -= size
        entry.size -= size
        if not entry.records:
            del self._entries[number]

    def _rebuild_expirations(self) -> None:
        """Without it a record rewritten every second would leave a day of heap entries behind."""
        self._expirations = [
            (stored.record.expiration, number, subkey)
            for number, entry in self._entries.items()
            for subkey, stored in entry.records.items()
        ]
        heapq.heapify(self._expirations)


class ReadCache:
    """Bounded by entries, by bytes (a quarter of the storage's bound) and by age. Keys are ids."""

    def __init__(self, limits: DHTLimits) -> None:
        self._limits = limits
        self._entries: OrderedDict[int, tuple[list[Record], float]] = (
            OrderedDict()
        )  # and the loop time of their reading
        self._size = 0

    def put(self, number: int, records: Mapping[bytes, Record], loop_time: float) -> None:
        """What all replicas together hold has been read."""
        self.drop(number)
        self._entries[number] = list(records.values()), loop_time
        self._size += sum(record.size for record in records.values())
        while self._entries and (
            len(self._entries) > self._limits.cache_entries or self._size > self._limits.max_storage // 4
        ):
            self.drop(next(iter(self._entries)))

    def get(self, number: int, now: float, loop_time: float) -> list[Record] | None:
        """The cached records if they are young and at least one of them is alive at swarm time `now`."""
        records, read_at = self._entries.get(number, ([], 0.0))
        if records and loop_time - read_at > self._limits.cache_age:
            self.drop(number)
            return None
        if not any(record.expiration > now for record in records):
            return None
        self._entries.move_to_end(number)
        return records

    def drop(self, number: int) -> None:
        records, _ = self._entries.pop(number, ([], 0.0))
        self._size -= sum(record.size for record in records)

    def clear(self) -> None:
        self._entries.clear()
        self._size = 0
