"""Reading keys: what the replicas hold, checked and merged, once (`read`) or again and again (`Follower`)."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field

from swarmcli.dht.bounds import DHTLimits
from swarmcli.dht.core import CALL_TIMEOUT, SLOW_LINK, NodeCore
from swarmcli.dht.lookup import gather_answers
from swarmcli.dht.messages import Question
from swarmcli.dht.records import (
    NO_SUBKEY,
    TOMBSTONE,
    Record,
    Subkey,
    ValueWithExpiration,
    decode_subkey,
    decode_value,
    id_to_bytes,
    is_bytes,
    key_id,
    merge_record,
)
from swarmcli.dht.routing import Contact
from swarmcli.errors import CallTimeout, DHTError, NetworkError, ValidationError
from swarmcli.network.identity import PeerID
from swarmcli.network.loop_thread import loop_time

FOLLOW_INTERVAL = 15.0  # seconds after which a follower looks up the replicas anew: nearer nodes may have come


@dataclass(slots=True)
class KeyRead:
    """One key while it is being read. If the cursors are kept, the next read asks for changes only."""

    target: int
    records: dict[bytes, Record] = field(default_factory=dict)
    # How far each replica has been read: which life of it, and up to which of its numbers.
    cursors: dict[PeerID, tuple[int, int]] = field(default_factory=dict)
    counts: dict[PeerID, int] = field(default_factory=dict)  # of all records that each replica holds
    taken: int = 0  # bytes of records that replicas have sent
    behind: bool = False  # the last replica had more than there was room for
    _tellers: dict[bytes, Hashable] = field(default_factory=dict)  # subkey → who has told the record
    _count: Counter[Hashable] = field(default_factory=Counter)  # of records that each teller has told …
    _bytes: Counter[Hashable] = field(default_factory=Counter)  # … and of their bytes

    def question(self, peer: PeerID) -> Question:
        return Question(id_to_bytes(self.target), *self.cursors.get(peer, (0, 0)))

    def take(self, records: Iterable[Record], teller: Hashable, limits: DHTLimits) -> None:
        """Merges checked records in, from each teller no more than a replica keeps under a key: one that makes up
        records without end would fill this peer's memory."""
        for record in records:
            known = self.records.get(record.subkey)
            own = known if known is not None and self._tellers[record.subkey] == teller else None
            count = self._count[teller] + (own is None)
            size = self._bytes[teller] + record.size - (0 if own is None else own.size)
            if count <= limits.max_subkeys and size <= limits.max_entry and merge_record(self.records, record):
                if known is not None:
                    self._discharge(known)
                self._tellers[record.subkey] = teller
                self._count[teller] += 1
                self._bytes[teller] += record.size

    def drop(self, record: Record) -> None:
        del self.records[record.subkey]
        self._discharge(record)

    def _discharge(self, record: Record) -> None:
        teller = self._tellers.pop(record.subkey)
        self._count[teller] -= 1
        self._bytes[teller] -= record.size


async def read(core: NodeCore, reading: KeyRead, *, latest: bool) -> list[Contact]:
    """Reads the records of a key from its replicas; returns the replicas. With `latest` all of them are asked, else the
    first that holds anything is enough."""
    read_own(core, reading)
    return await core.search(
        reading.target,
        lambda contact: read_replica(core, contact, reading, contacts=core.breadth(reading.target)),
        at_once=latest,
        enough=lambda: not latest and bool(reading.records),
    )


def read_own(core: NodeCore, reading: KeyRead) -> None:
    """Reads what this node itself holds under the key. Checks it again: validators may have been added since."""
    entry = core.storage.entry(reading.target, core.now())
    _, version = reading.cursors.setdefault(core.peer_id, (0, 0))
    for stored in entry.since(version) if entry is not None else ():
        reading.cursors[core.peer_id] = (0, stored.version)
        try:
            core.checker.check(stored.record, core.now())
        except ValidationError:
            continue  # counted by the checker
        reading.take([stored.record], None, core.limits)


async def read_replica(
    core: NodeCore, contact: Contact, reading: KeyRead, *, contacts: int = 0, most: int = 0
) -> list[Contact]:
    """Reads what one replica holds (or has changed), page by page; returns the neighbours that it names. `most`: bytes
    of the only page that is wanted; 0: all pages. Raises CallTimeout if the pages come more slowly than SLOW_LINK; the
    replica then counts as gone."""
    peer = contact.peer_id
    found: list[Contact] = []
    # Twice, since records may change between two pages.
    room, room_bytes = 2 * core.limits.max_subkeys, 2 * core.limits.max_entry
    patience = CALL_TIMEOUT  # seconds that are left for waiting; each page earns the time that SLOW_LINK allows it
    while True:
        question, asked = reading.question(peer), loop_time()
        reply, neighbours = await core.find(contact, question, contacts=contacts, values=True, room=most)
        found.extend(neighbours)
        (answer,) = reply.answers
        prefix = core.writer(peer).prefix
        teller = peer if prefix.shared else prefix  # identities cost nothing: those of one network tell as much as one
        size = sum(record.size for record in answer.records)
        room, room_bytes = room - len(answer.records), room_bytes - size
        patience += size / SLOW_LINK - (loop_time() - asked)
        reading.taken += size
        reading.take(await core.checked(answer.records, reading.target, peer), teller, core.limits)
        reading.cursors[peer], reading.counts[peer] = (reply.instance, answer.cursor), answer.count
        reading.behind = answer.more
        goes_on = answer.more and not most
        if min(room, room_bytes) < 0 or (goes_on and not answer.records):
            raise core.impossible(peer, "an answer without an end")
        if not goes_on:
            return found
        if patience < 0:
            core.contacts.gone(peer, loop_time())
            raise CallTimeout(f"{peer.short} sends its records too slowly")
        contacts = 0


class Follower:
    """The dictionary under a key, kept up to date by `refresh`.

    Each replica is asked only for what it has stored since it was last read. A replica that restarted counts anew,
    which its reply shows; then all of it is read again. Concurrent refreshes do no harm, but each asks for itself.

    With `room`, each `refresh` asks one replica; the next one's turn comes when that one has no more to send.
    """

    def __init__(self, core: NodeCore, key: str, *, only_bytes: bool = False) -> None:
        """`only_bytes`: values of other types are left out before they are decoded: a stranger's lists may take sixty
        times as much memory as they have bytes."""
        self.key = key
        self._only_bytes = only_bytes
        self._core = core
        self._read = KeyRead(key_id(key))
        self._replicas: Sequence[Contact] = ()
        self._near: Sequence[Contact] = ()  # the contacts nearest to the key when the replicas were last looked up
        self._search_at = float("-inf")  # loop time
        self._turn = int.from_bytes(core.peer_id[:2])  # readers begin with unlike replicas
        self._seen: dict[bytes, tuple[Record, Subkey, ValueWithExpiration]] = {}
        self.refused = core.checker.watch(key)  # rule → how many records under the key did not pass it here

    @property
    def taken(self) -> int:
        """Bytes of records that replicas have sent so far."""
        return self._read.taken

    @property
    def behind(self) -> bool:
        """Whether the last replica that was asked had more than there was room for."""
        return self._read.behind

    @property
    def size(self) -> int:
        """Bytes of all records under the key, estimated: `count` times the mean size of those read."""
        records = self._read.records.values()
        return sum(record.size for record in records) * self.count // max(1, len(records))

    @property
    def small(self) -> bool:
        """Whether the hash table has no more nodes than a key has replicas, as far as this node knows."""
        replicas = self._core.num_replicas
        return len(self._core.contacts.table.nearest_apart(self._read.target, replicas + 1)) <= replicas

    @property
    def count(self) -> int:
        """How many records there are under the key: those read, or if more, as many as each replica that was asked
        holds."""
        return max(len(self._read.records), min(self._read.counts.values(), default=0))

    async def refresh(self, room: float = math.inf) -> dict[Subkey, ValueWithExpiration]:
        """Subkey → value, as of now. Replicas that do not answer are left out; nothing is raised for them. `room`:
        bytes of records that may arrive; if finite, from one replica."""
        near = self._core.contacts.table.nearest_apart(self._read.target, self._core.num_replicas)
        # Where others have come nearer than the replicas, whoever writes writes there: in a network that is small and
        # grows, not one of the former replicas may be left after seconds.
        if loop_time() >= self._search_at or near != self._near or not await self._read_replicas(room):
            self._near = near
            await self._search(room)
        self._update(self._core.now())
        return {subkey: value for _, subkey, value in self._seen.values()}

    async def _search(self, room: float) -> None:
        if room < math.inf:
            replicas = await self._core.explore(self._read.target, self._core.num_replicas)
        else:
            replicas = await read(self._core, self._read, latest=True)
        # A search costs some kilobytes, so a node that rests searches less often. When replicas are lost or nearer ones
        # have come, it searches anyway.
        self._search_at = loop_time() + FOLLOW_INTERVAL * (4 if self._core.rests else 1)
        self._replicas = replicas
        current = {contact.peer_id for contact in self._replicas} | {self._core.peer_id}
        self._read.cursors = {peer: cursor for peer, cursor in self._read.cursors.items() if peer in current}
        self._read.counts = {peer: count for peer, count in self._read.counts.items() if peer in current}
        if room < math.inf:
            await self._read_replicas(room)

    async def _read_replicas(self, room: float) -> bool:
        """Returns whether all that were asked answered."""
        read_own(self._core, self._read)
        others = [contact for contact in self._replicas if contact.peer_id != self._core.peer_id]
        if room <= 0:
            others = []
        elif room < math.inf and others:
            self._turn += not self._read.behind
            others = [others[self._turn % len(others)]]
        most = math.ceil(room) if room < math.inf else 0
        answers = await gather_answers(
            [read_replica(self._core, contact, self._read, most=most) for contact in others],
            (NetworkError, DHTError),
        )
        return bool(self._replicas) and all(answer is not None for answer in answers)

    def _update(self, now: float) -> None:
        """Decodes what is new and drops what has ended."""
        for name, record in list(self._read.records.items()):
            if record.expiration <= now:
                # What it replaced has expired too; if not, a replica sends it again as news.
                self._read.drop(record)
            elif name != NO_SUBKEY and record.value != TOMBSTONE and (is_bytes(record.value) or not self._only_bytes):
                seen = self._seen.get(name)
                if seen is None or seen[0] is not record:
                    value = ValueWithExpiration(decode_value(record.value), record.expiration)
                    self._seen[name] = (record, decode_subkey(name), value)
        for name, seen in list(self._seen.items()):
            if self._read.records.get(name) is not seen[0]:
                del self._seen[name]
