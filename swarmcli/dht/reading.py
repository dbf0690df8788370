"""Reading keys: what the replicas hold, checked and merged, once (`Reader`) or again and again (`Follower`)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from swarmcli.dht.client import DHTClient
from swarmcli.dht.core import NodeCore
from swarmcli.dht.lookup import Lookup, gather_answers, traverse
from swarmcli.dht.messages import Answer, Question
from swarmcli.dht.records import (
    NO_SUBKEY,
    TOMBSTONE,
    Record,
    Subkey,
    ValueWithExpiration,
    decode_subkey,
    decode_value,
    id_to_bytes,
    key_id,
    merge_record,
)
from swarmcli.dht.routing import Contact
from swarmcli.errors import DHTError, NetworkError, ValidationError
from swarmcli.network.identity import PeerID


@dataclass(slots=True)
class Cursor:
    """How far one replica has been read: a number that means something in one life of it only."""

    instance: int = 0
    version: int = 0


@dataclass(slots=True)
class KeyRead:
    """One key while it is being read. Cursors that are kept make the next reading a reading of changes."""

    target: int
    records: dict[bytes, Record] = field(default_factory=dict)
    cursors: dict[PeerID, Cursor] = field(default_factory=dict)
    outdated: int = 0  # records that came after a newer one of the same owner

    def question(self, peer: PeerID) -> Question:
        cursor = self.cursors.get(peer)
        if cursor is None:
            return Question(id_to_bytes(self.target))
        return Question(id_to_bytes(self.target), cursor.instance, cursor.version)

    def take(self, records: Iterable[Record]) -> None:
        """Merges checked records in."""
        for record in records:
            known = self.records.get(record.subkey)
            self.outdated += known is not None and known.sequence > record.sequence
            merge_record(self.records, record)


class Reader:
    """Reads many keys in one traversal."""

    def __init__(self, core: NodeCore, client: DHTClient) -> None:
        self._core = core
        self._client = client

    async def read(self, reads: Sequence[KeyRead], *, latest: bool) -> list[Lookup]:
        """Fills in the records of each key from its replicas; returns how each search went.

        With `latest` all replicas of a key are asked, else the first that holds anything is enough.
        """
        options = self._core.options
        lookups = [self._core.new_lookup(read.target, options.num_replicas) for read in reads]
        by_target = {read.target: read for read in reads}
        for read, lookup in zip(reads, lookups, strict=True):
            self.read_own(read)
            if read.records and not latest:
                lookup.stop()

        async def ask(contact: Contact, asking: Sequence[Lookup]) -> list[Contact]:
            wanted = [by_target[lookup.target] for lookup in asking]
            found = await self.read_replica(contact, wanted, contacts=self._core.breadth(asking))
            for lookup in asking:
                if not latest and by_target[lookup.target].records:
                    lookup.stop()
            return found

        parallel = self._core.parallel(lookups) if latest else options.parallel
        await traverse(lookups, ask, parallel=parallel, slow_after=self._core.limits.slow_after)
        return lookups

    def read_own(self, read: KeyRead) -> None:
        """What this very node holds of the key. Checked again: validators may have been added since."""
        entry = self._core.storage.entry(read.target, self._core.now())
        cursor = read.cursors.setdefault(self._core.endpoint.peer_id, Cursor())
        if entry is None:
            return
        for stored in entry.since(cursor.version):
            cursor.version = stored.version
            try:
                self._core.checker.check(stored.record, self._core.now())
            except ValidationError:
                continue  # counted by the checker
            read.take([stored.record])

    async def read_replica(self, contact: Contact, reads: Sequence[KeyRead], *, contacts: int = 0) -> list[Contact]:
        """What one replica holds (or has changed), page by page; also the neighbours that it names."""
        found: list[Contact] = []
        left = list(reads)
        room = 2 * self._core.limits.max_subkeys * len(left)  # twice, since records may change between two pages
        while left:
            now_reading = left[: self._core.limits.max_targets]
            questions = [read.question(contact.peer_id) for read in now_reading]
            reply, neighbours = await self._client.find(contact, questions, contacts=contacts, values=True)
            found.extend(neighbours)
            unfinished: list[KeyRead] = []
            for read, answer in zip(now_reading, reply.answers, strict=True):
                room -= len(answer.records)
                await self._take(read, contact.peer_id, reply.instance, answer)
                if answer.more:
                    unfinished.append(read)
            if room < 0 or (unfinished and not any(answer.records for answer in reply.answers)):
                raise self._client.malformed(contact.peer_id, "an answer without an end")
            left = unfinished + left[len(now_reading) :]
            contacts = 0 if unfinished else contacts
        return found

    async def _take(self, read: KeyRead, peer: PeerID, instance: int, answer: Answer) -> None:
        read.take(await self._core.checked(answer.records, read.target, peer))
        read.cursors[peer] = Cursor(instance, answer.cursor)


_SEARCH_INTERVAL = 15.0  # seconds after which the replicas are looked up anew: nearer nodes may have come


class Follower:
    """The dictionary under a key, kept up to date by `refresh`.

    Each replica is asked only for what it has stored since it was last read. A replica that restarted counts anew,
    which its reply shows; then all of it is read again. Concurrent refreshes do no harm, but each asks for itself.
    """

    def __init__(self, core: NodeCore, reader: Reader, key: str) -> None:
        self.key = key
        self._core = core
        self._reader = reader
        self._read = KeyRead(key_id(key))
        self._replicas: Sequence[Contact] = ()
        self._search_at = float("-inf")  # loop time
        self._seen: dict[bytes, tuple[Record, Subkey, ValueWithExpiration]] = {}
        self.refused = core.checker.watch(key)  # rule → how many records under the key did not pass it here

    @property
    def outdated(self) -> int:
        """How often a replica told of a record whose owner had replaced it: it lags, or repeats old ones on purpose."""
        return self._read.outdated

    async def refresh(self) -> dict[Subkey, ValueWithExpiration]:
        """Subkey → value, as of now. Replicas that do not answer are left out; nothing is raised for them."""
        if self._core.loop_time() >= self._search_at or not await self._read_replicas():
            await self._search()
        self._update(self._core.now())
        return {subkey: value for _, subkey, value in self._seen.values()}

    async def _search(self) -> None:
        (lookup,) = await self._reader.read([self._read], latest=True)
        self._search_at = self._core.loop_time() + _SEARCH_INTERVAL
        self._replicas = lookup.nearest()
        current = {contact.peer_id for contact in self._replicas} | {self._core.endpoint.peer_id}
        self._read.cursors = {peer: cursor for peer, cursor in self._read.cursors.items() if peer in current}

    async def _read_replicas(self) -> bool:
        """Whether all of them answered."""
        self._reader.read_own(self._read)
        others = [contact for contact in self._replicas if contact.peer_id != self._core.endpoint.peer_id]
        answers = await gather_answers(
            [self._reader.read_replica(contact, [self._read]) for contact in others], (NetworkError, DHTError)
        )
        return bool(self._replicas) and all(answer is not None for answer in answers)

    def _update(self, now: float) -> None:
        """Decodes what is new and drops what has ended."""
        for name, record in list(self._read.records.items()):
            if record.expiration <= now:
                # Whatever it had replaced has expired too, or would come back as news of some replica.
                del self._read.records[name]
            elif name != NO_SUBKEY and record.value != TOMBSTONE:
                seen = self._seen.get(name)
                if seen is None or seen[0] is not record:
                    value = ValueWithExpiration(decode_value(record.value), record.expiration)
                    self._seen[name] = (record, decode_subkey(name), value)
        for name, seen in list(self._seen.items()):
            if self._read.records.get(name) is not seen[0]:
                del self._seen[name]
