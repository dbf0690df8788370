"""Reading what each peer has given to a run, and keeping count of it.

Monitors keep count, and trainers that write checkpoints: what their rounds credit goes into their journals, which add
up, and they sign the sums for whoever asks. One that comes to the run, or has missed epochs, takes over another one's
book. Others keep nothing: they ask when somebody wants to see, and for their own part when they leave.
"""

from __future__ import annotations

import asyncio
import logging
import math
import threading
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import TYPE_CHECKING, Any

from swarmcli.dht import DHTNode
from swarmcli.errors import CallRefused, JournalError, NetworkError
from swarmcli.events import Booked, BookHead, Contribution, EpochCredited, Event, PeerSeen, RoundFinished
from swarmcli.journal import Journal
from swarmcli.network.identity import Identity, PeerID
from swarmcli.network.loop_thread import offload
from swarmcli.network.task_owner import TaskOwner
from swarmcli.recent import Recent
from swarmcli.run import contributions as given
from swarmcli.run.contributions import NOTHING, Attestation, Book, BookEntry, Entries, Mark, samples_of
from swarmcli.run.values import Basis

if TYPE_CHECKING:
    from swarmcli.optim import PeerReport

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class BookTiming:
    """Seconds."""

    presence: float = 30.0  # between two notes of who is there
    catch_up: float = 5.0  # between two questions for a book that could be taken over
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
    position: Callable[[], Mark | None]  # where this peer stands; None: it has not joined yet
    clock: Callable[[], float]  # seconds since 1970
    exact: bool = True  # as `most_samples` has it
    network: Callable[[PeerID], Hashable] = lambda peer: None
    timing: BookTiming = BookTiming()


@dataclass(frozen=True, slots=True)
class Attested:
    """Attestations of one peer's part, by those who keep count."""

    attestations: tuple[Attestation, ...]

    @property
    def best(self) -> Attestation:
        """Returns the one of the writer that knows most of the run: where there are three, the one with the lower
        median of the samples."""
        ranked = sorted(self.attestations, key=lambda each: each.entry.samples)
        return ranked[(len(ranked) - 1) // 2] if len(ranked) >= 3 else ranked[-1]


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
        self._basis = Basis()
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

    def basis(self) -> Basis:
        """Whose word that is. From any thread."""
        return self._basis

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
        """Reads books, and keeps what most writers say: one that lies deceives nobody, unless it is the only one."""
        own, books = self._around.node.peer_id.text, list((await self._books(self.LINES)).values())
        if not books:
            return
        entries, until = given.agreed(books), max((book.until for book in books), key=lambda mark: mark.epoch)
        if own not in entries and (standing := await self.standing()) is not None:
            entries[own] = standing.best.entry
        self._listed = given.listed(entries)
        for epoch in [each for each in self._own if each <= until.epoch]:
            del self._own[epoch]
        whole = all(len(book.peers) < self.LINES for book in books)
        accounted = samples_of(entries) / max(1, until.samples) if whole else None
        self._basis = Basis(monitors=len(books), accounted=accounted)

    def vouched(self, writer: PeerID) -> bool:
        """The owner of a closed run has let it in; in an open run, it was in two rounds of this peer's."""
        return self._around.node.endpoint.membership is not None or self._rounds.get(writer.text, 0) >= 2

    def _writers(self) -> list[PeerID]:
        """Others that keep count and answer: those that are vouched for first."""
        reports = [(peer, report) for peer, report in self._around.others().items() if self._around.answers(peer)]
        self._around.node.endpoint.random.shuffle(reports)
        return sorted(given.writers_among(dict(reports)), key=lambda peer: not self.vouched(peer))[: given.MOST_WRITERS]

    async def _books(self, lines: int = given.MOST_LINES) -> Mapping[PeerID, Book]:
        """Takes the books of writers that are vouched for, or of all where none of those answers. One with more samples
        than the run has counts for nothing: the lineage, which everybody trains on, counts these, and a writer is an
        epoch or two ahead of this peer at most. Of each network one, where there are three: identities cost nothing,
        addresses in several networks do, and few networks are those of friends."""
        around, here = self._around, self._around.position()
        most = given.most_samples(here, around.exact) * (1 + 3 / max(1, here.epoch)) if here else math.inf
        books, failed = await given.fetch_books(around.node.endpoint, self._writers(), around.run_id, lines)
        for writer, why in failed.items():
            logger.debug("no book of contributions from %s: %s", writer.short, why)
        books = {writer: book for writer, book in books.items() if samples_of(book.lines) <= most}
        books = {writer: book for writer, book in books.items() if self.vouched(writer)} or books
        of_networks = {around.network(writer): writer for writer in books}
        return {each: books[each] for each in of_networks.values()} if len(of_networks) >= 3 else books

    async def standing(self) -> Attested | None:
        """This peer's own part, as others sign it; None where none of them answers at once. One that has yet to count
        the last epoch that this peer knows of is asked again, for about as long."""
        around, last, found = self._around, self._last, dict[PeerID, Attestation]()
        until = self._loop.time() + self._timing.ask

        def is_behind(said: Attestation | None) -> bool:
            return said is None or (last is not None and said.until.epoch < last.epoch)

        async def ask(writer: PeerID) -> None:
            wanted = writer, around.run_id, around.node.peer_id, self._timing.ask
            try:
                while is_behind(found.get(writer)) and self._loop.time() < until:
                    if writer in found:
                        await asyncio.sleep(self._timing.ask / 4)
                    found[writer] = await given.fetch_attestation(around.node.endpoint, *wanted)
            except (NetworkError, ValueError) as error:
                logger.debug("nothing of this peer's part from %s: %s", writer.short, error)

        await asyncio.gather(*map(ask, self._writers()))
        return Attested(tuple(found.values())) if found else None


@dataclass(frozen=True, slots=True)
class Sums:
    """The sums of a journal."""

    until: Mark = given.START
    vouched: int = 0  # others by whose word it knows what it has not seen
    witnessed: float = 0.0  # samples that this peer's own rounds have credited
    entries: Entries = field(default_factory=dict)  # most samples first
    peers: tuple[PeerID, ...] = ()  # of the first of these, as many as a book has
    listed: Sequence[Contribution] = ()


class Bookkeeper(BookReader):
    """Counts, and signs what its journal has added up for whoever asks."""

    ATTEMPTS = 3  # to take over the book of somebody who is vouched for; then anybody's

    def __init__(self, around: RunView, journal: Journal) -> None:
        super().__init__(around)
        self._journal = journal
        self._lock = threading.Lock()  # around what was read: threads of pages ask as well
        self._read_at, self._sums = -math.inf, Sums()
        self._counted = self._vouchers = 0  # the last epoch; others by whose word that is known which was not seen here
        self._tries: int | None = None  # to learn of epochs that this peer has missed; None: it has not
        self._names = Recent[PeerID, tuple[str, str]](4096)  # and teams

    async def start(self) -> None:
        sums = await offload(self._look)
        self._counted, self._vouchers = sums.until.epoch, sums.vouched
        await super().start()
        endpoint = self._around.node.endpoint
        endpoint.serve(given.BOOK, given.BookWanted, self._answer_book)
        endpoint.serve(given.ENTRY, given.EntryWanted, self._answer_entry)
        self._see(self._around.node.peer_id, self._around.own())
        self._tasks.keep(endpoint.events, self._keep_noting_presence, self._keep_catching_up)

    async def close(self) -> None:
        self._around.node.endpoint.withdraw(given.BOOK, given.ENTRY)
        await super().close()

    def contributions(self) -> Sequence[Contribution]:
        return self._look().listed

    def basis(self) -> Basis:
        sums = self._look()
        whole = max(1, sums.until.samples)
        return Basis(monitors=sums.vouched, seen=sums.witnessed / whole, accounted=samples_of(sums.entries) / whole)

    def _look(self, *, anew: bool = False) -> Sums:
        """Returns the journal's sums, read now and then; it may wait for the disk. From any thread."""
        with self._lock:
            now = self._around.clock()
            lasting = self._timing.fresh if self._sums.until.epoch >= self._counted else self._timing.behind
            if anew or not self._read_at <= now < self._read_at + lasting:
                self._read_at = now
                self._journal.flush(1.0)
                try:
                    with self._journal.read() as reader:
                        head, rows = reader.book(self._around.run_id)
                except JournalError as error:
                    logger.warning("contributions are told as they were: %s", error)
                else:
                    until, vouched = (Mark(head.epoch, head.run_samples), head.vouched) if head else (given.START, 0)
                    witnessed = math.fsum(row.own_samples for row in rows)
                    entries = {row.peer: BookEntry.of(row) for row in rows}
                    peers = tuple(map(PeerID.parse, islice(entries, given.MOST_LINES)))
                    self._sums = Sums(until, vouched, witnessed, entries, peers, given.listed(entries))
            return self._sums

    # what is seen here

    def _note(self, event: Event) -> None:
        super()._note(event)
        match event:
            case PeerSeen():
                peer = PeerID.parse(event.peer)
                if (report := self._around.others().get(peer)) is not None:
                    self._see(peer, report)
            # An epoch counts once. Of a run that was begun anew, or from an old checkpoint, they count from there.
            case EpochCredited(epoch=epoch) if not self._counted - 64 <= epoch <= self._counted:
                if epoch != self._counted + 1 and self._tries is None:
                    self._tries = 0
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
        self._come_to(Mark(event.epoch, event.run_samples))

    def _come_to(self, mark: Mark) -> None:
        self._counted = mark.epoch
        self._journal.record(BookHead(self._around.run_id, mark.epoch, mark.samples, self._vouchers))

    async def _keep_noting_presence(self) -> None:
        period, before = self._timing.presence, self._loop.time()
        await asyncio.sleep(period)
        seconds = min(self._loop.time() - before, 2 * period)  # a machine that slept has seen nobody meanwhile
        present = {peer: report for peer, report in self._around.others().items() if self._around.answers(peer)}
        for peer, report in (present | {self._around.node.peer_id: self._around.own()}).items():
            self._see(peer, report)
            self._add(peer.text, uptime=seconds)

    # what others have seen

    async def _keep_catching_up(self) -> None:
        """Where this peer has missed epochs, it takes over a book that goes as far as the run does now: of
        several the one that differs least from what a reader of all of them is told."""
        before = self._around.position()
        await asyncio.sleep(self._timing.catch_up)
        if before is not None and before.epoch > self._counted:
            self._tries = self._tries or 0
        if self._tries is None or not (found := await self._books()):
            return
        self._tries += 1
        here, sums = self._around.position(), await offload(self._look, anew=True)
        books = [book for writer, book in found.items() if self.vouched(writer) or self._tries > self.ATTEMPTS]
        books = [book for book in books if book.until == here and sums.until.epoch <= here.epoch]
        if fuller := [book for book in books if self._is_fuller(book, sums)]:
            shown = given.agreed(fuller)
            self._take_over(min(fuller, key=lambda book: given.distance(book.lines, shown)), sums)
        if books:
            self._tries = None

    def _is_fuller(self, book: Book, sums: Sums) -> bool:
        """Whether it knows more than this peer, and both can be true: nobody has given less than was seen here, nor all
        together more than the run has."""
        both = given.greater(sums.entries, book.lines)
        possible = samples_of(both) <= given.most_samples(book.until, self._around.exact)
        possible = possible and all(entry.rounds <= book.until.epoch for entry in both.values())
        return possible and samples_of(book.lines) > samples_of(sums.entries)

    def _take_over(self, book: Book, sums: Sums) -> None:
        """Both tell of the same epochs, so of each number the greater one holds: what is missing is added."""
        for peer, entry in given.greater(sums.entries, book.lines).items():
            more = given.less(entry, sums.entries.get(peer, NOTHING))
            self._add(peer, **more, first=entry.first, last=entry.last, name=entry.name, team=entry.team)
        self._vouchers, self._read_at = 1, -math.inf
        if self._counted <= book.until.epoch:
            self._come_to(book.until)

    # what it hands out

    async def _answer_book(self, _: PeerID, wanted: given.BookWanted) -> Book:
        about, sums, now = await self._asked_for(wanted.run_id)
        lines = sums.peers[: wanted.most], tuple(islice(sums.entries.values(), wanted.most))
        return given.signed(self._around.identity, Book(*about, sums.until, sums.witnessed, sums.vouched, *lines, now))

    async def _answer_entry(self, _: PeerID, wanted: given.EntryWanted) -> Attestation:
        """With nothing in it for a peer that has given nothing."""
        about, sums, now = await self._asked_for(wanted.run_id)
        giving = [peer for peer, entry in sums.entries.items() if entry.samples > 0]
        entry, asked = sums.entries.get(wanted.peer.text, NOTHING), wanted.peer.text
        rank = giving.index(asked) + 1 if asked in giving else 0
        said = Attestation(*about, wanted.peer, entry, rank, len(giving), sums.until, sums.vouched, now)
        return given.signed(self._around.identity, said)

    async def _asked_for(self, run_id: str) -> tuple[tuple[str, str, PeerID], Sums, float]:
        around = self._around
        if run_id != around.run_id:
            raise CallRefused("run", f"this peer takes part in {around.run_id!r}")
        return (run_id, around.run, around.identity.peer_id), await offload(self._look), around.clock()
