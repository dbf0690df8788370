"""The records that a node keeps for the network: bounded, with expiration, and with a history that followers read. And
a cache of what the node itself has read lately.

Every accepted record gets the next number of the storage's own count. The records of a key are kept in that order,
so that "what changed since number n" costs no more than what did change.
"""

from __future__ import annotations

import hashlib
import heapq
import struct
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from operator import attrgetter
from typing import NamedTuple, TypeAlias

from swarmcli.dht.bounds import DHTLimits
from swarmcli.dht.records import NO_SUBKEY, OwnedSubkey, Record, decode_subkey, is_owned, key_id
from swarmcli.network.identity import PeerID
from swarmcli.network.prefix import Prefix
from swarmcli.reach.relay_messages import RELAYS_KEY

Name: TypeAlias = tuple[int, bytes]  # of one record: the id of its key, and its subkey


class StoreVerdict(IntEnum):
    """A node's answer to a record that it was asked to store."""

    STORED = 0  # it is kept, or was there already
    STALE = 1  # a newer one is there
    REFUSED = 2  # a validator or a bound said no
    FULL = 3  # no room: too many subkeys under the key, or the node's storage is full
    BUSY = 4  # this peer writes too much; later again
    EXPIRED = 5


class RecordWriter(NamedTuple):
    """The peer that hands a record over, and whose network is charged for it."""

    peer: PeerID | None  # None: this very node
    prefix: Prefix


OWN = RecordWriter(None, Prefix("host", "this node"))


@dataclass(slots=True)
class Stored:
    """A record, its number in the storage's count, and the network that is charged for it."""

    record: Record
    version: int
    fingerprint: int
    prefix: Prefix


@dataclass(slots=True)
class PrefixShare:
    """The records of one network prefix. Both dictionaries begin with the oldest name; a record that is renewed keeps
    its place."""

    size: int = 0  # bytes
    kept: dict[Name, None] = field(default_factory=dict)  # with an owner, and plain values
    expendable: dict[Name, None] = field(default_factory=dict)  # subkeys that anyone may write

    @property
    def count(self) -> int:
        return len(self.kept) + len(self.expendable)

    def newest(self) -> Name | None:
        """The record to evict first: the newest expendable one, else the newest."""
        return next(reversed(self.expendable or self.kept), None)


Shares: TypeAlias = dict[Prefix, PrefixShare]


@dataclass(slots=True)
class KeyEntry:
    """The records of one key, in the order of their versions, and who takes up how much of the key."""

    size: int = 0  # bytes
    records: dict[bytes, Stored] = field(default_factory=dict)
    shares: Shares = field(default_factory=dict)
    known_digest: int | None = None  # of the records as they are; None: not computed since they changed

    def since(self, version: int) -> list[Stored]:
        """The records that were stored after `version`, oldest first."""
        newer: list[Stored] = []
        for stored in reversed(self.records.values()):
            if stored.version <= version:
                break
            newer.append(stored)
        newer.reverse()
        return newer

    def digest(self) -> int:
        """Equal for two replicas exactly when they hold the same records (up to a 64-bit collision).

        A hash of all fingerprints: strangers, who may add records, could cancel those of others in a sum.
        """
        if self.known_digest is None:
            fingerprints = sorted(stored.fingerprint for stored in self.records.values())
            digest = hashlib.blake2b(struct.pack(f">{len(fingerprints)}Q", *fingerprints), digest_size=8)
            self.known_digest = int.from_bytes(digest.digest(), "big")
        return self.known_digest


class Storage:
    """Bounded records of many keys. Times are swarm time, handed in; nothing here does I/O.

    A record is charged to the network of the peer that hands it over. A full key, or a full storage, makes room by
    dropping the newest record of the network that holds the most: so whatever one network writes, the others keep their
    even share, and old records stay. A network that would itself hold the most is refused.
    """

    def __init__(self, limits: DHTLimits) -> None:
        self.size = 0  # bytes
        self.version = 0  # of the newest change
        self._limits = limits
        self._entries: dict[int, KeyEntry] = {}
        self._expirations: list[tuple[float, int, bytes]] = []
        self._shares: Shares = {}
        self._count = 0
        self._directory = key_id(RELAYS_KEY)

    def put(self, record: Record, now: float, writer: RecordWriter = OWN) -> StoreVerdict:
        """Keeps a checked record, unless it is expired, older than what is there, or there is no room."""
        if record.expiration <= now:
            return StoreVerdict.EXPIRED
        self.purge(now)
        number = key_id(record.key)
        entry = self._entries.get(number) or KeyEntry()
        known = entry.records.get(record.subkey)
        prefix = writer.prefix
        if known is not None and prefix != known.prefix:
            # If the writer passes on another's record, or its network has no room for more, the record stays charged
            # as it was.
            own_word = _is_word_of(record, writer.peer)
            if not own_word or not self._has_share(number, entry, prefix, 1, record.size):
                prefix = known.prefix
        if known is not None and known.record.rank >= record.rank:
            if known.record != record:
                return StoreVerdict.STALE
            if prefix == known.prefix or not is_owned(record.subkey):
                return StoreVerdict.STORED
        elif not self._make_room(number, entry, record, known, prefix):
            return StoreVerdict.FULL
        self._keep(number, entry, record, known, prefix)
        return StoreVerdict.STORED

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
        """All records of a key, one of each prefix in turn, its oldest first: if a new replica has no room for all, it
        is a flood from one network that finds none."""
        entry = self._entries.get(number)
        if entry is None:
            return []
        turns: dict[Name, int] = {}
        for share in entry.shares.values():
            turns.update((name, turn) for turn, name in enumerate([*share.kept, *share.expendable]))
        stored = sorted(entry.records.values(), key=lambda each: turns.get((number, each.record.subkey), 0))
        return [each.record for each in stored]

    def count(self) -> int:
        """How many records there are."""
        return self._count

    def purge(self, now: float) -> None:
        """Forgets what is expired."""
        while self._expirations and self._expirations[0][0] <= now:
            _, number, subkey = heapq.heappop(self._expirations)
            entry = self._entries.get(number)
            stored = entry.records.get(subkey) if entry is not None else None
            if entry is not None and stored is not None and stored.record.expiration <= now:
                self._remove(number, entry, subkey)

    # Making room

    def _most_subkeys(self, number: int) -> int:
        limits = self._limits
        return min(limits.max_directory, limits.max_subkeys) if number == self._directory else limits.max_subkeys

    def _has_share(self, number: int, entry: KeyEntry, prefix: Prefix, more: int, growth: int) -> bool:
        """Whether a network may take so many more places of the key, and bytes. One that strangers share always may."""
        if prefix.shared:
            return True
        in_key, in_all = entry.shares.get(prefix, _NOTHING), self._shares.get(prefix, _NOTHING)
        if growth > 0 and in_all.size + growth > self._limits.storage_per_prefix:
            return False
        return not more or in_key.count < max(1, self._most_subkeys(number) // self._limits.prefixes_in_key)

    def _make_room(self, number: int, entry: KeyEntry, record: Record, known: Stored | None, prefix: Prefix) -> bool:
        """Whether this network may have the record. Makes room for it, if need be, at the cost of networks that hold
        more."""
        limits, new = self._limits, known is None
        growth = record.size - (0 if known is None else known.record.size)
        if not self._has_share(number, entry, prefix, int(new), growth):
            return False
        while True:
            if new and len(entry.records) >= self._most_subkeys(number):
                found = _to_evict(entry.shares, prefix, _count, 1, owned=is_owned(record.subkey))
            elif entry.size + growth > limits.max_entry:
                found = _to_evict(entry.shares, prefix, _size, growth)
            elif new and self._count >= limits.max_stored:
                # By number, not by size: else a flood of tiny records would push out whoever keeps large ones.
                found = _to_evict(self._shares, prefix, _count, 1)
            elif self.size + growth > limits.max_storage:
                found = _to_evict(self._shares, prefix, _size, growth)
            else:
                return True
            if found is None or found == (number, record.subkey):
                return False
            self._remove(found[0], self._entries[found[0]], found[1])

    def _keep(self, number: int, entry: KeyEntry, record: Record, known: Stored | None, prefix: Prefix) -> None:
        self.version += 1
        if known is not None:
            del entry.records[record.subkey]  # first, so that the dictionary's order stays the order of versions
            self._account(number, entry, known, -1, keeps_place=known.prefix == prefix)
        stored = entry.records[record.subkey] = Stored(record, self.version, record.fingerprint(), prefix)
        self._entries[number] = entry
        self._account(number, entry, stored, 1)
        heapq.heappush(self._expirations, (record.expiration, number, record.subkey))
        if len(self._expirations) > 64 + 4 * len(self._entries) and len(self._expirations) > 2 * self._count:
            self._rebuild_expirations()

    def _remove(self, number: int, entry: KeyEntry, subkey: bytes) -> None:
        self._account(number, entry, entry.records.pop(subkey), -1)
        if not entry.records:
            del self._entries[number]

    def _account(self, number: int, entry: KeyEntry, stored: Stored, sign: int, *, keeps_place: bool = False) -> None:
        """Charges the record to its network (1), or no longer (-1). `keeps_place`: it will be charged again at once."""
        record, name = stored.record, (number, stored.record.subkey)
        self.size += sign * record.size
        self._count += sign
        entry.size += sign * record.size
        entry.known_digest = None
        for shares in (entry.shares, self._shares):
            share = shares.setdefault(stored.prefix, PrefixShare())
            share.size += sign * record.size
            names = share.kept if record.subkey == NO_SUBKEY or is_owned(record.subkey) else share.expendable
            if sign > 0:
                names[name] = None
            elif not keeps_place:
                del names[name]
                if not share.count:
                    del shares[stored.prefix]

    def _rebuild_expirations(self) -> None:
        """Without it a record rewritten every second would leave a day of heap entries behind."""
        self._expirations = [
            (stored.record.expiration, number, subkey)
            for number, entry in self._entries.items()
            for subkey, stored in entry.records.items()
        ]
        heapq.heapify(self._expirations)


_NOTHING = PrefixShare()
_count, _size = attrgetter("count"), attrgetter("size")


def _to_evict(
    shares: Shares, prefix: Prefix, measure: Callable[[PrefixShare], int], growth: int, *, owned: bool = False
) -> Name | None:
    """Chooses the record to evict so that this network may have so much more. None: the network would then itself hold
    the most. `owned`: within a network, a record with an owner may take the place of one that anyone may write."""
    own, fullest = shares.get(prefix, _NOTHING), max(shares.values(), key=measure, default=_NOTHING)
    if measure(fullest) > measure(own) + growth:
        return fullest.newest()
    return next(reversed(own.expendable), None) if owned else None


def _is_word_of(record: Record, peer: PeerID | None) -> bool:
    """Whether this peer itself has written the record, as far as can be told."""
    subkey = decode_subkey(record.subkey)
    return not isinstance(subkey, OwnedSubkey) or subkey.owner == peer


CACHE_AGE = 15.0  # seconds for which a reader may see what was read before, with latest=False


class ReadCache:
    """Bounded by entries, by bytes (a quarter of the storage's bound) and by age. Keys are ids."""

    def __init__(self, limits: DHTLimits) -> None:
        self._limits = limits
        # Id of a key → its records, and the loop time at which they were read.
        self._entries: OrderedDict[int, tuple[list[Record], float]] = OrderedDict()
        self._size = 0

    def put(self, number: int, records: Mapping[bytes, Record], loop_time: float) -> None:
        """Keeps what all replicas together hold, once it has been read."""
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
        if records and loop_time - read_at > CACHE_AGE:
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
