"""Answering other nodes."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from swarmcli.dht import messages
from swarmcli.dht.core import BREATH, NodeCore
from swarmcli.dht.limits import DHTLimits
from swarmcli.dht.messages import Answer, Outcome
from swarmcli.dht.records import Record, id_from_bytes, is_owned, key_id
from swarmcli.dht.routing import Contact
from swarmcli.dht.storage import Verdict
from swarmcli.network.identity import PeerID


class DHTService:
    """The four methods that a listening node serves. A peer in client mode is asked only while it is cut off, by those
    whom it is connected with."""

    def __init__(self, core: NodeCore) -> None:
        self._core = core
        self._meter = WriteMeter(core.limits)
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
        """Neighbours of the targets and, if asked for, the records under them, cut at the size of a reply."""
        self._core.heard_from(peer, request.listening)
        room, left = self._core.limits.max_reply, messages.MAX_RECORDS
        answers: list[Answer] = []
        for question in request.questions if request.values else ():
            answer = self._answer(question, room, left)
            room -= sum(record.size for record in answer.records)
            left -= len(answer.records)
            answers.append(answer)
        targets = [id_from_bytes(question.target) for question in request.questions]
        neighbours = self._neighbours(peer, targets, request.contacts)
        return messages.FindReply(self._core.instance, neighbours, tuple(answers))

    async def store(self, peer: PeerID, request: messages.StoreRequest) -> messages.StoreReply:
        """Judges each record by itself."""
        self._core.heard_from(peer, request.listening)
        now = self._core.loop_time()
        outcomes: list[Outcome] = []
        for index, record in enumerate(request.records):
            if index % BREATH == BREATH - 1:
                await asyncio.sleep(0)
            allowed = self._meter.allow(peer, record.size, now)
            outcomes.append(self._judge(peer, record) if allowed else Outcome(Verdict.BUSY))
        targets = list(dict.fromkeys(key_id(record.key) for record in request.records)) if request.contacts else []
        return messages.StoreReply(tuple(outcomes), self._neighbours(peer, targets, request.contacts))

    async def sync(self, peer: PeerID, request: messages.SyncRequest) -> messages.SyncReply:
        """Which of these keys look otherwise here."""
        self._core.heard_from(peer, request.listening)
        now = self._core.now()
        wanted: list[bytes] = []
        for number, digest in request.digests:
            entry = self._core.storage.entry(id_from_bytes(number), now)
            if entry is None or entry.digest() != digest:
                wanted.append(number)
        return messages.SyncReply(tuple(wanted))

    def _judge(self, peer: PeerID, record: Record) -> Outcome:
        verdict = self._core.accept(record)
        if verdict is Verdict.REFUSED:
            self._core.report(peer, "record", "asked to store a record that does not count")
        if verdict is Verdict.STALE and is_owned(record.subkey):
            return Outcome(verdict, self._core.storage.find(key_id(record.key), record.subkey))
        return Outcome(verdict)

    def _answer(self, question: messages.Question, room: int, left: int) -> Answer:
        """What was stored after the question's cursor, as far as `room` bytes and `left` records allow."""
        cursor = question.cursor if question.instance == self._core.instance else 0
        if room <= 0 or left <= 0:  # nothing fits any more, so nothing is looked up
            return Answer((), cursor, more=True)
        entry = self._core.storage.entry(id_from_bytes(question.target), self._core.now())
        records: list[Record] = []
        for stored in entry.since(cursor) if entry is not None else ():
            room -= stored.record.size
            if room < 0 or len(records) >= left:
                return Answer(tuple(records), cursor, more=True)
            records.append(stored.record)
            cursor = stored.version
        return Answer(tuple(records), cursor)

    def _neighbours(self, asker: PeerID, targets: Sequence[int], count: int) -> tuple[Contact, ...]:
        """The nearest known nodes of each target, once each, without the asker."""
        count = min(max(0, count), self._core.bucket_size)
        found: dict[PeerID, Contact] = {}
        for target in targets:
            if count == 0 or len(found) + count > messages.MAX_CONTACTS:
                break
            found.update((near.peer_id, near) for near in self._core.contacts.table.nearest(target, count + 1))
        found.pop(asker, None)
        return tuple(found.values())[: count * len(targets)]


@dataclass(slots=True)
class _Budget:
    records: float
    bytes: float
    updated: float


class WriteMeter:
    """Token buckets per peer. Bounded: the peers that were quiet longest are forgotten first."""

    def __init__(self, limits: DHTLimits, max_peers: int = 4096) -> None:
        self._limits = limits
        self._max_peers = max_peers
        self._budgets: OrderedDict[bytes, _Budget] = OrderedDict()

    def allow(self, peer: bytes, size: int, now: float) -> bool:
        """Whether `peer` may write one more record of `size` bytes at loop time `now`; counts it if so."""
        limits = self._limits
        budget = self._budgets.setdefault(peer, _Budget(limits.write_burst, limits.bytes_burst, now))
        self._budgets.move_to_end(peer)
        if len(self._budgets) > self._max_peers:
            self._budgets.popitem(last=False)
        passed = max(0.0, now - budget.updated)
        budget.records = min(limits.write_burst, budget.records + passed * limits.writes_per_second)
        budget.bytes = min(limits.bytes_burst, budget.bytes + passed * limits.bytes_per_second)
        budget.updated = now
        if budget.records < 1 or budget.bytes < size:
            return False
        budget.records -= 1
        budget.bytes -= size
        return True
