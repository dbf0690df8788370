"""A node keeps records by key for the network, bounded, with expiration, and with a history that followers read;
and for itself what it has read lately.

Every accepted record gets the next number of the storage's own count. The records of a key are kept in that order,
so that "what changed since number n" costs no more than what did change.
"""

from __future__ import annotations

import hashlib
import heapq
import struct
from collections import Counter, OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from typing import NamedTuple, TypeAlias

from swarmcli.dht.limits import DHTLimits
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
    """The peer that hands a record over, and is charged for it."""

    peer: PeerID | None  # None: this very node
    prefix: Prefix
    replica: bool = False  # a node near the key, which may hand on what others have written


OWN = RecordWriter(None, Prefix("host", "this node"))


@dataclass(slots=True)
class Stored:
    """A record, its number in the storage's count, and who is charged for it."""

    record: Record
    version: int
    fingerprint: int
    writer: RecordWriter


@dataclass(slots=True)
class PrefixShare:
    """The records of one network prefix. Both dictionaries begin with what has stood the longest; a record
    that is replaced by a newer one of the same subkey keeps its place."""

    size: int = 0  # bytes charged
    kept: dict[Name, None] = field(default_factory=dict)  # with an owner, and plain values
    expendable: dict[Name, None] = field(default_factory=dict)  # subkeys that anyone may write

    @property
    def count(self) -> int:
        return len(self.kept) + len(self.expendable)

    def newest(self) -> Name | None:
        """The record that goes first: without an owner before those with one, then what came last."""
        return next(reversed(self.expendable or self.kept), None)


Shares: TypeAlias = dict[Prefix, PrefixShare]


@dataclass(slots=True)
class KeyEntry:
    """The records of one key, in the order of their versions, and who takes up how much of the key."""

    size: int = 0  # bytes charged
    records: dict[bytes, Stored] = field(default_factory=dict)
    shares: Shares = field(default_factory=dict)
    identities: Counter[PeerID | None] = field(default_factory=Counter)  # records charged to each
    foreign: Counter[PeerID | None] = field(default_factory=Counter)  # of these, those that it may not republish
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

    Whoever hands a record over is charged for it, by identity and by network prefix. What is full makes room at the
    cost of the prefix that holds the most, of which the newest record goes: so whatever one prefix writes, the others
    keep their even share, and who has been here for long stays. A prefix that would itself be the fullest is refused.
    """

    def __init__(self, limits: DHTLimits) -> None:
        self.size = 0  # bytes charged
        self.version = 0  # of the newest change
        self._limits = limits
        self._entries: dict[int, KeyEntry] = {}
        self._expirations: list[tuple[float, int, bytes]] = []
        self._shares: Shares = {}
        self._identities: Counter[PeerID | None] = Counter()  # bytes charged to each
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
        if known is not None and known.record.rank >= record.rank:
            if known.record != record:
                return StoreVerdict.STALE
            self._charge_owner(number, entry, known, writer)
            return StoreVerdict.STORED
        payer = self._payer(number, entry, record, known, writer)
        if payer is None or self._is_crowded(number, entry, record, known, now):
            return StoreVerdict.FULL
        if not self._make_room(number, entry, record, known, payer):
            return StoreVerdict.FULL
        self._keep(number, entry, record, known, payer)
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
        """All records of a key, one of each prefix in turn, what has stood the longest first: of what a new replica
        has no room for, the flood goes without a place and not the others."""
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

    # Charging

    def _payer(
        self, number: int, entry: KeyEntry, record: Record, known: Stored | None, writer: RecordWriter
    ) -> RecordWriter | None:
        """The writer that is charged: the peer that brings the record, unless a replica hands on what its owner has
        written. None: nobody's share has room."""
        if known is None:
            return writer if self._has_share(number, entry, record, 1, record.size, writer) else None
        if _is_word_of(record, writer.peer) and self._has_share(number, entry, record, 1, record.size, writer):
            return writer
        growth = record.size - known.record.size
        return known.writer if self._has_share(number, entry, record, 0, growth, known.writer) else None

    def _charge_owner(self, number: int, entry: KeyEntry, known: Stored, writer: RecordWriter) -> None:
        """An owner shows up itself with what a replica has handed over: from now on it is charged for it."""
        record = known.record
        moves = known.writer != writer and is_owned(record.subkey) and _is_word_of(record, writer.peer)
        if moves and self._has_share(number, entry, record, 1, record.size, writer):
            self._discharge(number, entry, known)
            known.writer = writer
            self._charge(number, entry, known)

    def _has_share(
        self, number: int, entry: KeyEntry, record: Record, more: int, growth: int, writer: RecordWriter
    ) -> bool:
        """Whether this writer stays within what one identity and one prefix may take up."""
        if writer.peer is None or (more == 0 and growth <= 0):
            return True
        limits, peer, shared = self._limits, writer.peer, writer.prefix.shared
        in_key, in_all = entry.shares.get(writer.prefix, _NOTHING), self._shares.get(writer.prefix, _NOTHING)
        identity_bytes = limits.storage_per_prefix if writer.replica else limits.storage_per_identity
        if self._identities[peer] + growth > identity_bytes:
            return False
        if not shared and in_all.size + growth > limits.storage_per_prefix:
            return False
        if not more:
            return True
        if _is_foreign(record, writer) and entry.foreign[peer] >= limits.foreign_subkeys:
            return False
        most_identity = limits.subkeys_per_replica if writer.replica else limits.subkeys_per_identity
        most_prefix = limits.subkeys_per_replica if writer.replica else limits.subkeys_per_prefix
        if entry.identities[peer] >= self._scaled(number, most_identity):
            return False
        return shared or in_key.count < self._scaled(number, most_prefix)

    def _most_subkeys(self, number: int) -> int:
        limits = self._limits
        return min(limits.max_directory, limits.max_subkeys) if number == self._directory else limits.max_subkeys

    def _scaled(self, number: int, most: int) -> int:
        """A bound for a key of full size, for this key."""
        return max(1, most * self._most_subkeys(number) // self._limits.max_subkeys)

    def _is_crowded(self, number: int, entry: KeyEntry, record: Record, known: Stored | None, now: float) -> bool:
        """Whether the key takes in only what ends soon, and this does not."""
        if known is not None or len(entry.records) < self._scaled(number, self._limits.crowded_after):
            return False
        return record.expiration > now + self._limits.crowded_life + self._limits.expiration_slack

    # Making room

    def _make_room(
        self, number: int, entry: KeyEntry, record: Record, known: Stored | None, payer: RecordWriter
    ) -> bool:
        """Whether there is room, or another prefix that holds more has had to give some up."""
        limits, new = self._limits, known is None
        growth = record.size - (0 if known is None else known.record.size)
        while True:
            if new and len(entry.records) >= self._most_subkeys(number):
                found = _to_evict(entry.shares, payer.prefix, is_owned(record.subkey), None)
            elif entry.size + growth > limits.max_entry:
                found = _to_evict(entry.shares, payer.prefix, False, growth)
            elif new and self._count >= limits.max_stored:
                # By number, not by size: else a flood of tiny records would push out whoever keeps large ones.
                found = _to_evict(self._shares, payer.prefix, False, None)
            elif self.size + growth > limits.max_storage:
                found = _to_evict(self._shares, payer.prefix, False, growth)
            else:
                return True
            if found is None or found == (number, record.subkey):
                return False
            self._remove(found[0], self._entries[found[0]], found[1])

    def _keep(self, number: int, entry: KeyEntry, record: Record, known: Stored | None, payer: RecordWriter) -> None:
        self.version += 1
        stored = Stored(record, self.version, record.fingerprint(), payer)
        growth = record.size
        if known is not None:
            growth -= known.record.size
            del entry.records[record.subkey]  # first, so that the dictionary's order stays the order of versions
            self._count -= 1
            if known.writer == payer:
                self._charge_bytes(entry, payer, growth)
            else:
                self._discharge(number, entry, known)
        if known is None or known.writer != payer:
            self._charge(number, entry, stored)
        self._count += 1
        self.size += growth
        entry.size += growth
        entry.known_digest = None
        entry.records[record.subkey] = stored
        self._entries[number] = entry
        heapq.heappush(self._expirations, (record.expiration, number, record.subkey))
        if len(self._expirations) > 64 + 4 * len(self._entries) and len(self._expirations) > 2 * self._count:
            self._rebuild_expirations()

    def _remove(self, number: int, entry: KeyEntry, subkey: bytes) -> None:
        stored = entry.records.pop(subkey)
        self.size -= stored.record.size
        entry.size -= stored.record.size
        entry.known_digest = None
        self._count -= 1
        self._discharge(number, entry, stored)
        if not entry.records:
            del self._entries[number]

    # Accounts

    def _charge(self, number: int, entry: KeyEntry, stored: Stored) -> None:
        """The newest in its prefix's shares of the key and of the whole."""
        record, writer = stored.record, stored.writer
        name = (number, record.subkey)
        for shares in (entry.shares, self._shares):
            share = shares.setdefault(writer.prefix, PrefixShare())
            (share.kept if record.subkey == NO_SUBKEY or is_owned(record.subkey) else share.expendable)[name] = None
        entry.identities[writer.peer] += 1
        if _is_foreign(record, writer):
            entry.foreign[writer.peer] += 1
        self._charge_bytes(entry, writer, record.size)

    def _charge_bytes(self, entry: KeyEntry, writer: RecordWriter, growth: int) -> None:
        entry.shares[writer.prefix].size += growth
        self._shares[writer.prefix].size += growth
        self._identities[writer.peer] += growth

    def _discharge(self, number: int, entry: KeyEntry, stored: Stored) -> None:
        record, writer = stored.record, stored.writer
        self._charge_bytes(entry, writer, -record.size)
        name = (number, record.subkey)
        for shares in (entry.shares, self._shares):
            share = shares[writer.prefix]
            share.kept.pop(name, None)
            share.expendable.pop(name, None)
            if not share.count:
                del shares[writer.prefix]
        entry.identities[writer.peer] -= 1
        if _is_foreign(record, writer):
            entry.foreign[writer.peer] -= 1
        for counter in (entry.identities, entry.foreign, self._identities):
            if counter[writer.peer] <= 0:
                del counter[writer.peer]

    def _rebuild_expirations(self) -> None:
        """Without it a record rewritten every second would leave a day of heap entries behind."""
        self._expirations = [
            (stored.record.expiration, number, subkey)
            for number, entry in self._entries.items()
            for subkey, stored in entry.records.items()
        ]
        heapq.heapify(self._expirations)


_NOTHING = PrefixShare()


def _to_evict(shares: Shares, prefix: Prefix, owned: bool, growth: int | None) -> Name | None:
    """Chooses what has to go for one more record of this prefix, or (`growth`) for so many more of its bytes. None: the
    prefix itself would then hold the most."""
    own = shares.get(prefix, _NOTHING)
    if growth is None:
        fullest = max(shares.values(), key=lambda share: share.count, default=_NOTHING)
        if fullest.count > own.count + 1:
            return fullest.newest()
    else:
        fullest = max(shares.values(), key=lambda share: share.size, default=_NOTHING)
        if fullest.size > own.size + growth:
            return fullest.newest()
    # Within one prefix a record with an owner takes the place of one that anyone may write.
    return next(reversed(own.expendable), None) if owned else None


def _is_word_of(record: Record, peer: PeerID | None) -> bool:
    """Whether this peer itself has written the record, as far as can be told."""
    subkey = decode_subkey(record.subkey)
    return not isinstance(subkey, OwnedSubkey) or subkey.owner == peer


def _is_foreign(record: Record, writer: RecordWriter) -> bool:
    """Whether the record has another owner than who hands it over, who is no node near its key."""
    return writer.peer is not None and not writer.replica and not _is_word_of(record, writer.peer)


class ReadCache:
    """Bounded by entries, by bytes (a quarter of the storage's bound) and by age. Keys are ids."""

    def __init__(self, limits: DHTLimits) -> None:
        self._limits = limits
        # And the loop time of their reading.
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
