"""Reading what each peer has given to a run, and keeping count of it.

Monitors keep count, and trainers that write checkpoints: each notes what its own rounds credit in its journal, which
adds up, and tells the sums to whoever asks. Others keep nothing: they ask when somebody wants to see, show one
writer's count and say whose it is, and ask for their own part when they leave.
"""

from __future__ import annotations

import asyncio
import logging
import math
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import TYPE_CHECKING, Any

from msgspec import UNSET
from msgspec.structs import replace as replace_fields

from swarmcli.dht import DHTNode
from swarmcli.errors import CallRefused, JournalError
from swarmcli.events import Booked, BookHead, Contribution, EpochCredited, Event, PeerSeen, RoundFinished
from swarmcli.journal import Journal
from swarmcli.network.identity import Identity, PeerID
from swarmcli.network.loop_thread import offload
from swarmcli.network.task_owner import TaskOwner
from swarmcli.recent import Recent
from swarmcli.run import contributions as given
from swarmcli.run.contributions import NOTHING, Attestation, Book, BookEntry, Entries, Mark

if TYPE_CHECKING:
    from swarmcli.optim import PeerReport

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class BookTiming:
    """Seconds."""

    presence: float = 30.0  # between two notes of who is there
    fresh: float = 5.0  # for which sums are told as they are …
    behind: float = 1.0  # … and where an epoch has been counted since: who leaves asks for what it has just given
    refresh: float = 30.0  # at the earliest a reader asks again
    ask: float = 2.0  # for a peer's own part, when it leaves


@dataclass(frozen=True, kw_only=True)
class RunView:
    """A peer's view of its run, on the event loop."""

    node: DHTNode
    identity: Identity
    run_id: str
    run: str  # the hash of the recipe
    own: Callable[[], PeerReport]
    others: Callable[[], Mapping[PeerID, PeerReport]]
    answers: Callable[[PeerID], bool]
    clock: Callable[[], float]  # seconds since 1970
    timing: BookTiming = BookTiming()


class BookReader:
    """The part of a peer that keeps no count. Made and closed on the event loop."""

    LINES = 128  # of a book, that are asked for

    def __init__(self, around: RunView) -> None:
        self._around, self._timing = around, around.timing
        self._loop = asyncio.get_running_loop()
        self._tasks = TaskOwner()
        self._rounds = Recent[str, int](4096)  # peer → committed rounds in which it was with this one
        self._last: EpochCredited | None = None
        self._own = Recent[int, float](4096)  # epoch → this peer's samples in it, of those that nobody has told of yet
        self._asked = -math.inf
        self._listed: Sequence[Contribution] = ()
        self._rests_on = ""
        self._closed = False

    async def start(self) -> None:
        """Nothing is asked before somebody wants to know."""
        self._tasks.hear(self._around.node.endpoint.events, self._note)

    async def close(self) -> None:
        self._closed = True
        await self._tasks.close()

    def contributions(self) -> Sequence[Contribution]:
        """Returns what others have told, most samples first, with what this peer's rounds have counted of it since.
        Asks again now and then, and does not wait for the answers. From any thread."""
        if not self._closed:
            self._loop.call_soon_threadsafe(self._refresh)
        own, since = self._around.node.peer_id.text, round(math.fsum(list(self._own.values())))
        return tuple(replace(each, samples=each.samples + since) if each.peer == own else each for each in self._listed)

    def rests_on(self) -> str:
        """Whose count that is, in a sentence; "": nobody's yet. From any thread."""
        return self._rests_on

    def _note(self, event: Event) -> None:
        match event:
            case RoundFinished(outcome="committed"):
                for peer in event.members:
                    self._rounds[peer] = self._rounds.get(peer, 0) + 1
            case EpochCredited():
                self._last = event
                self._own[event.epoch] = event.samples.get(self._around.node.peer_id.text, 0.0)

    def _refresh(self) -> None:
        now = self._loop.time()
        if not self._closed and now >= self._asked + self._timing.refresh:
            self._asked = now
            self._tasks.spawn(self._read())

    async def _read(self) -> None:
        """Reads books, and keeps the fullest of those whose writers are vouched for, or of all where none is."""
        around, own, writers = self._around, self._around.node.peer_id.text, self._writers()
        books, failed = await given.fetch_books(around.node.endpoint, writers, around.run_id, self.LINES)
        for writer, why in failed.items():
            logger.debug("no book of contributions from %s: %s", writer.short, why)
        if not books:
            return
        book = given.fullest({writer: each for writer, each in books.items() if self.vouched(writer)} or books)
        entries = dict(book.lines)
        if own not in entries and (standing := await self.standing()) is not None:
            entries[own] = standing.entry
        self._listed = given.listed(entries)
        for epoch in [each for each in self._own if each <= book.until.epoch]:
            del self._own[epoch]
        self._rests_on = f"This is the count of one peer, {book.writer.short}: {book.in_words}."

    def vouched(self, writer: PeerID) -> bool:
        """The owner of a closed run has let it in; in an open run, it was in two rounds of this peer's."""
        return self._around.node.endpoint.membership is not None or self._rounds.get(writer.text, 0) >= 2

    def _writers(self) -> list[PeerID]:
        """Others that keep count and answer: those that are vouched for first."""
        reports = [(peer, report) for peer, report in self._around.others().items() if self._around.answers(peer)]
        self._around.node.endpoint.random.shuffle(reports)
        return sorted(given.writers_among(dict(reports)), key=lambda peer: not self.vouched(peer))[: given.MOST_WRITERS]

    async def standing(self) -> Attestation | None:
        """This peer's own part, as the one signs it that has counted most of it; None where none of them answers at
        once. One that has yet to count the last epoch that this peer knows of is asked again, for about as long."""
        node, run_id, ask = self._around.node, self._around.run_id, self._timing.ask
        last, until = self._last, self._loop.time() + ask
        while True:
            said = await given.fetch_attestation(node.endpoint, self._writers(), run_id, node.peer_id, ask)
            is_behind = said is not None and last is not None and said.until.epoch < last.epoch
            if not is_behind or self._loop.time() >= until:
                return said
            await asyncio.sleep(ask / 4)


@dataclass(frozen=True, slots=True)
class Sums:
    """The sums of a journal."""

    head: BookHead
    book: Book  # not signed yet
    entries: Entries  # of everybody, most samples first
    listed: Sequence[Contribution]


class Bookkeeper(BookReader):
    """Counts, and tells what its journal has added up to whoever asks."""

    def __init__(self, around: RunView, journal: Journal) -> None:
        super().__init__(around)
        self._journal = journal
        self._lock = threading.Lock()  # around what was read: threads of pages ask as well
        self._head = BookHead(around.run_id, 0, 0, 0)  # up to where this peer has counted
        self._read_at, self._sums = -math.inf, self._sums_of(self._head, [])
        self._names = Recent[PeerID, tuple[str, str]](4096)  # and teams

    async def start(self) -> None:
        self._head = (await offload(self._look)).head
        await super().start()
        endpoint = self._around.node.endpoint
        endpoint.serve(given.BOOK, given.BookWanted, self._answer_book)
        endpoint.serve(given.ENTRY, given.EntryWanted, self._answer_entry)
        self._see(self._around.node.peer_id, self._around.own())
        self._tasks.keep(endpoint.events, self._keep_noting_presence)

    async def close(self) -> None:
        self._around.node.endpoint.withdraw(given.BOOK, given.ENTRY)
        await super().close()

    def contributions(self) -> Sequence[Contribution]:
        return self._look().listed

    def rests_on(self) -> str:
        return f"This is this peer's own count: {self._look().book.in_words}."

    def _look(self) -> Sums:
        """Returns the journal's sums, read now and then; it may wait for the disk. From any thread."""
        with self._lock:
            now = self._around.clock()
            lasting = self._timing.fresh if self._sums.head.epoch >= self._head.epoch else self._timing.behind
            if not self._read_at <= now < self._read_at + lasting:
                self._read_at = now
                self._journal.flush(1.0)
                try:
                    with self._journal.read() as reader:
                        head, rows = reader.book(self._around.run_id)
                except JournalError as error:
                    logger.warning("contributions are told as they were: %s", error)
                else:
                    self._sums = self._sums_of(head or self._sums.head, rows)
            return self._sums

    def _sums_of(self, head: BookHead, rows: Sequence[Booked]) -> Sums:
        around, entries = self._around, {row.peer: BookEntry.of(row) for row in rows}
        about = around.run_id, around.run, around.identity.peer_id, Mark(head.epoch, head.run_samples)
        counted = math.fsum(row.own_samples for row in rows), head.vouched
        peers, lines = list(islice(entries, given.MOST_LINES)), tuple(islice(entries.values(), given.MOST_LINES))
        since = head.since if head.since > 1 else UNSET
        book = Book(*about, *counted, tuple(map(PeerID.parse, peers)), lines, around.clock(), since=since)
        return Sums(head, book, entries, given.listed(entries))

    # what is seen here

    def _note(self, event: Event) -> None:
        super()._note(event)
        match event:
            case PeerSeen():
                peer = PeerID.parse(event.peer)
                if (report := self._around.others().get(peer)) is not None:
                    self._see(peer, report)
            # An epoch counts once. Of a run that was begun anew, or from an old checkpoint, they count from there.
            case EpochCredited(epoch=epoch) if not self._head.epoch - 64 <= epoch <= self._head.epoch:
                self._count(event)

    def _see(self, peer: PeerID, report: PeerReport) -> None:
        """A peer without a name goes by its short id, which is none that it has chosen."""
        called = "" if report.name == peer.short else report.name, report.team
        if self._names.get(peer) != called:
            self._names[peer] = called
            self._add(peer.text, name=called[0], team=called[1])

    def _add(self, peer: str, **more: Any) -> None:
        now = self._around.clock()
        self._journal.record(Booked(self._around.run_id, peer, **({"first": now, "last": now} | more)))

    def _count(self, event: EpochCredited) -> None:
        hours = max(0.0, event.seconds) / 3600
        for peer in event.samples.keys() | event.reduced.keys():
            samples, reduced = event.samples.get(peer, 0.0), event.reduced.get(peer, 0)
            self._add(peer, samples=samples, own_samples=samples, hours=hours, rounds=1, reduced_bytes=reduced)
        # One that comes later counts from there on: what came before is in the tables of those who were there.
        since = self._head.since if self._head.epoch else event.epoch
        self._head = replace(self._head, epoch=event.epoch, run_samples=event.run_samples, since=since)
        self._journal.record(self._head)

    async def _keep_noting_presence(self) -> None:
        period, before = self._timing.presence, self._loop.time()
        await asyncio.sleep(period)
        seconds = min(self._loop.time() - before, 2 * period)  # a machine that slept has seen nobody meanwhile
        present = {peer: report for peer, report in self._around.others().items() if self._around.answers(peer)}
        for peer, report in (present | {self._around.node.peer_id: self._around.own()}).items():
            self._see(peer, report)
            self._add(peer.text, uptime=seconds)

    # what it hands out

    async def _answer_book(self, _: PeerID, wanted: given.BookWanted) -> Book:
        book, most = (await self._asked_for(wanted.run_id)).book, wanted.most
        first = replace_fields(book, peers=book.peers[:most], entries=book.entries[:most], since=UNSET)
        return replace_fields(given.signed(self._around.identity, first), since=book.since)

    async def _answer_entry(self, _: PeerID, wanted: given.EntryWanted) -> Attestation:
        """With nothing in it for a peer that has given nothing."""
        sums = await self._asked_for(wanted.run_id)
        book, asked = sums.book, wanted.peer.text
        giving = [peer for peer, entry in sums.entries.items() if entry.samples > 0]
        rank = giving.index(asked) + 1 if asked in giving else 0
        about, rest = (book.run_id, book.run, book.writer), (book.until, book.vouched, book.time)
        entry, since = sums.entries.get(asked, NOTHING), book.since if wanted.since else UNSET
        said = Attestation(*about, wanted.peer, entry, rank, len(giving), *rest, since=since)
        return given.signed(self._around.identity, said)

    async def _asked_for(self, run_id: str) -> Sums:
        if run_id != self._around.run_id:
            raise CallRefused("run", f"this peer takes part in {self._around.run_id!r}")
        return await offload(self._look)
