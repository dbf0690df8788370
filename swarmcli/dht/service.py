"""Answering other nodes."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Hashable

from swarmcli.dht import messages
from swarmcli.dht.core import NodeCore, breathing
from swarmcli.dht.messages import FindAnswer, Outcome
from swarmcli.dht.records import LARGE_VALUE, Record, id_from_bytes, is_bytes, is_owned, key_id
from swarmcli.dht.routing import BUCKET_SIZE, Contact
from swarmcli.dht.storage import RecordWriter, StoreVerdict
from swarmcli.errors import CallRefused
from swarmcli.network.identity import PeerID
from swarmcli.network.loop_thread import loop_time
from swarmcli.network.prefix import Prefix
from swarmcli.network.token_bucket import Meter

# Units of work for each byte of a large value: decoding 100 KiB of lists takes 25 ms, most of it for the garbage
# collector, which looks at all that a peer made since it began (without `startup.over` at the whole process: 150 ms).
_VALUE_WORK = 1 / 256
_STORE_WORK, _BYTE_WORK = 2.0, 1 / 8192  # for one record to store, and for each byte of it
_PREFIX_FACTOR = 4.0  # what all of one network prefix may do, as a multiple of what one peer may
_RECORD_WORK = 0.1  # for one record in an answer, and for one key that is compared; a question is 1


def _keys(peer: PeerID, prefix: Prefix) -> dict[str, Hashable]:
    """The keys that a peer's requests are counted under: itself, and its prefix unless strangers share it."""
    return {"peer": peer} if prefix.shared else {"peer": peer, "prefix": prefix}


class DHTService:
    """The four methods that a listening node serves. A peer in client mode is asked only while it is cut off, by those
    whom it is connected with."""

    def __init__(self, core: NodeCore) -> None:
        self._core = core
        rate, burst = core.limits.work_per_second, core.limits.work_burst
        self._work = Meter(peer=(rate, burst), prefix=(_PREFIX_FACTOR * rate, _PREFIX_FACTOR * burst))
        self._serving = False

    def start(self) -> None:
        """Begins to answer. Idempotent."""
        if self._serving:
            return
        self._serving = True
        endpoint = self._core.endpoint
        endpoint.serve(messages.PING, messages.PingRequest, self.ping)
        endpoint.serve(messages.FIND, messages.FindRequest, self.find)
        endpoint.serve(messages.STORE, messages.StoreRequest, self.store)
        endpoint.serve(messages.SYNC, messages.SyncRequest, self.sync)

    def stop(self) -> None:
        """Answers no more. Idempotent."""
        self._serving = False
        self._core.endpoint.withdraw(messages.PING, messages.FIND, messages.STORE, messages.SYNC)

    async def ping(self, peer: PeerID, request: messages.PingRequest) -> messages.PingReply:
        self._core.heard_from(peer, request.listening)
        return messages.PingReply(self._core.listening)

    async def find(self, peer: PeerID, request: messages.FindRequest) -> messages.FindReply:
        """Neighbours of the target and, if asked for, the records under it, cut at the size of a reply or at the room
        that the asker has.

        Raises CallRefused ("busy") for a peer that has caused more work than one peer, or one prefix, may.
        """
        self._charge(peer, 1)
        self._core.heard_from(peer, request.listening)
        (question,) = request.questions
        target = id_from_bytes(question.target)
        answers: list[FindAnswer] = []
        if request.values:
            answers.append(self._answer(question, target, min(request.room or math.inf, self._core.limits.max_reply)))
            if work := _RECORD_WORK * len(answers[0].records):
                self._work.owe(loop_time(), work, **_keys(peer, self._core.writer(peer).prefix))
        return messages.FindReply(self._core.instance, self._neighbours(peer, target, request.contacts), tuple(answers))

    async def store(self, peer: PeerID, request: messages.StoreRequest) -> messages.StoreReply:
        """Judges each record by itself."""
        self._core.heard_from(peer, request.listening)
        now, writer = loop_time(), self._core.writer(peer)
        keys = _keys(peer, writer.prefix)
        outcomes: list[Outcome] = []
        room = self._core.limits.max_reply  # bytes, for newer records: one large record may outrank thousands of sent
        async for record in breathing(request.records):
            if record.size > LARGE_VALUE:
                await asyncio.sleep(0)
            work = _STORE_WORK + record.size * _BYTE_WORK
            if not is_bytes(record.value):
                work += max(0, record.size - LARGE_VALUE) * _VALUE_WORK
            allowed = self._work.take(now, work, **keys)
            outcome = self._judge(writer, peer, record) if allowed else Outcome(StoreVerdict.BUSY)
            if outcome.current is not None:
                room -= outcome.current.size
            outcomes.append(outcome if room >= 0 else Outcome(outcome.verdict))
        neighbours: tuple[Contact, ...] = ()
        # To name neighbours is as much work as to answer a question.
        if request.records and request.contacts > 0 and self._work.take(now, 1, **keys):
            neighbours = self._neighbours(peer, key_id(request.records[0].key), request.contacts)
        return messages.StoreReply(tuple(outcomes), neighbours)

    async def sync(self, peer: PeerID, request: messages.SyncRequest) -> messages.SyncReply:
        """Which of these keys have another digest here; each once, however often it is named. Refuses like `find`."""
        self._charge(peer, _RECORD_WORK * len(request.digests))
        self._core.heard_from(peer, request.listening)
        now = self._core.now()
        wanted: list[bytes] = []
        async for number, digest in breathing(dict(request.digests).items()):
            entry = self._core.storage.entry(id_from_bytes(number), now)
            if entry is None or entry.digest() != digest:
                wanted.append(number)
        return messages.SyncReply(tuple(wanted))

    def _charge(self, peer: PeerID, work: float) -> None:
        """Charges the peer before any work is done. Raises CallRefused."""
        if not self._work.take(loop_time(), work, **_keys(peer, self._core.writer(peer).prefix)):
            raise CallRefused("busy", "this peer has been asked too much")

    def _judge(self, writer: RecordWriter, peer: PeerID, record: Record) -> Outcome:
        verdict = self._core.accept(record, writer)
        if verdict is StoreVerdict.REFUSED:
            self._core.report(peer, "record", "asked to store a record that does not count")
        if verdict is StoreVerdict.STALE and is_owned(record.subkey):
            return Outcome(verdict, self._core.storage.find(key_id(record.key), record.subkey))
        return Outcome(verdict)

    def _answer(self, question: messages.Question, target: int, room: float) -> FindAnswer:
        """Answers with the records that were stored after the question's cursor, as far as `room` bytes allow, though
        always with one."""
        cursor = question.cursor if question.instance == self._core.instance else 0
        entry = self._core.storage.entry(target, self._core.now())
        if entry is None:
            return FindAnswer((), cursor)
        records: list[Record] = []
        for stored in entry.since(cursor):
            if len(records) >= messages.MAX_RECORDS or (records and stored.record.size > room):
                return FindAnswer(tuple(records), cursor, True, len(entry.records))
            room -= stored.record.size
            records.append(stored.record)
            cursor = stored.version
        return FindAnswer(tuple(records), cursor, False, len(entry.records))

    def _neighbours(self, asker: PeerID, target: int, count: int) -> tuple[Contact, ...]:
        """The nearest known nodes, without the asker."""
        count = min(max(0, count), BUCKET_SIZE)
        nearest = self._core.contacts.table.nearest_apart(target, count + 1) if count else []
        return tuple(near for near in nearest if near.peer_id != asker)[:count]
