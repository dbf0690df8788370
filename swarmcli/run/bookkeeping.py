"""Who keeps the run's book, and who reads it.

Monitors keep it, and trainers that write checkpoints: a bookkeeper counts what it sees, compares its book with those
of the others (once a minute, and first of all when it comes), hands it out in signed pages, and writes it into its
journal. Others keep nothing: they ask bookkeepers when somebody wants to see, and for their own part when they leave.
"""

from __future__ import annotations

import asyncio
import logging
import math
import threading
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from swarmcli.dht import DHTNode
from swarmcli.errors import CallRefused, NetworkError
from swarmcli.events import Booked, BookHead, Contribution, EpochCredited, Event, Noticed, PeerSeen
from swarmcli.network.identity import Identity, PeerID
from swarmcli.network.task_owner import TaskOwner
from swarmcli.run import statements
from swarmcli.run.contributions import (
    Book,
    Dispute,
    Entries,
    Entry,
    Kept,
    Mark,
    Told,
    agreed,
    contribution,
    joined,
    listed,
    merged,
    most_samples,
    samples_of,
)
from swarmcli.run.values import Basis
from swarmcli.tasks import on_executor

if TYPE_CHECKING:
    from swarmcli.optim import PeerReport

T = TypeVar("T")
logger = logging.getLogger(__name__)

FIRST_LOOK = 2.0  # seconds after the start
LOOK_SECONDS = 10.0  # between two looks at who is there
EXCHANGE_SECONDS = 60.0  # between two comparisons with other monitors
PRESENCE_SECONDS = 60.0  # between two writings of who was there
PAGES_SECONDS = 5.0  # for which pages are handed out as they are …
PAGES_OF_BEFORE = 1.0  # … and when an epoch has been counted since: who leaves asks for what it has just given
PATIENCE = 30.0  # seconds for this peer to come to the epoch of another's book
MOST_ASKED = 8  # monitors in one exchange
NETWORKS = 3  # from so many on each network has one voice
MOST_NOTICES = 3  # of one exchange
MOST_NOTICED = 1024  # disputes that are remembered, so that each is told once
BYTES_OF_WORK = 4096  # as much work as an entry makes: from 500 on, another thread does it
LIST_SECONDS = 5.0  # for which a list is shown as it is
MOST_LISTED = 1024  # peers in a reader's list: those with most, since books that lie could name others each time
MOST_OWN = 4096  # epochs that a reader counts itself where no monitor tells of them
REFRESH_SECONDS = 30.0  # at the earliest a reader asks again
ASK_AGAIN = 0.5
ASK_SECONDS = 2.0  # for a reader's own part, when it leaves


@dataclass(frozen=True, kw_only=True)
class Surroundings:
    """What a bookkeeper or a reader sees of its run, on the event loop."""

    node: DHTNode
    identity: Identity
    run_id: str
    run: str  # the hash of the recipe
    own: Callable[[], PeerReport]
    others: Callable[[], Mapping[PeerID, PeerReport]]
    answers: Callable[[PeerID], bool]
    position: Callable[[], Mark | None]  # where this peer stands; None: it has not joined yet
    clock: Callable[[], float]  # seconds since 1970
    network: Callable[[PeerID], Hashable] = lambda peer: None

    def bookkeepers(self) -> list[PeerID]:
        """Others that answer: monitors first, in an order of their own each time."""
        reports = self.others()
        found = [peer for peer, report in reports.items() if keeps_book(report) and self.answers(peer)]
        self.node.endpoint.random.shuffle(found)
        return sorted(found, key=lambda peer: reports[peer].role != "monitor")[:MOST_ASKED]

    def one_of_each_network(self, told: Mapping[PeerID, T]) -> Mapping[PeerID, T]:
        """Identities cost nothing, addresses in several networks do. Few networks are those of friends."""
        first: dict[Hashable, PeerID] = {}
        for monitor in told:
            first.setdefault(self.network(monitor), monitor)
        return {monitor: told[monitor] for monitor in first.values()} if len(first) >= NETWORKS else told


@dataclass(frozen=True, slots=True)
class Standing:
    """How a peer stands in the book of a run; `monitors` of them say so."""

    attestations: tuple[statements.Attestation, ...]

    @property
    def best(self) -> statements.Attestation:
        """Of the monitor that knows most of the run: of the lower median of what they say of the samples, where there
        are three."""
        ranked = sorted(self.attestations, key=lambda each: each.entry.samples)
        return ranked[(len(ranked) - 1) // 2] if len(ranked) >= 3 else ranked[-1]


def keeps_book(report: PeerReport) -> bool:
    """Whether the peer of this report says that it keeps the run's book."""
    return report.role == "monitor" or (report.role == "trainer" and report.keeps)


def chosen_name(peer: PeerID, name: str) -> str:
    """A peer without a name goes by its short id, which is none that it has chosen."""
    return "" if name == peer.short else name


class Bookkeeper:
    """A bookkeeper's part. Made and closed on the event loop; `contributions` is for any thread."""

    def __init__(
        self, around: Surroundings, *, exact: bool, kept: Kept | None = None, record: Callable[[Event], None]
    ) -> None:
        """`record` takes what the journal is to keep; `kept`: what it has kept before."""
        self._around, self._record, self._exact = around, record, exact
        self._book = Book.restore(kept, exact=exact) if kept is not None else Book(exact=exact)
        self._lock = threading.Lock()  # around the book: lists are made in other threads
        self._turn = asyncio.Lock()  # whose holder lets another thread work on the book; thousands take a second
        self._noted: list[EpochCredited] = []  # epochs that wait for that
        self._listed: tuple[float, list[Contribution], Basis] = (float("-inf"), [], Basis())
        self._making = asyncio.Lock()  # of pages: for all who ask at one moment once
        self._pages: list[tuple[float, statements.Pages]] = []  # the newest two, and when they were made
        self._revised = False  # other monitors' books have changed this one since
        self._seen: set[str] = set()  # who was there since it was last written
        self._doubts: dict[tuple[str, str], bool] = {}  # monitor and peer of a dispute → whether it was told
        self._objections: set[tuple[PeerID, str]] = set()
        self._credited = asyncio.Event()  # an epoch was
        self._last: EpochCredited | None = None
        self._tasks = TaskOwner()
        self._unsubscribe: Callable[[], None] = lambda: None

    def start(self) -> None:
        endpoint = self._around.node.endpoint
        endpoint.serve(statements.BOOK, statements.BookWanted, self._answer_page)
        endpoint.serve(statements.ENTRY, statements.EntryWanted, self._answer_entry)
        self._unsubscribe = endpoint.events.subscribe(self._note)
        self._tasks.keep(endpoint.events, self._keep_looking, self._keep_comparing)

    async def close(self) -> None:
        """Writes what is not written yet. Idempotent."""
        self._unsubscribe()
        self._around.node.endpoint.withdraw(statements.BOOK, statements.ENTRY)
        await self._tasks.close()
        self._count()
        self._write(self._seen)

    def contributions(self) -> Sequence[Contribution]:
        """Most samples first. From any thread."""
        return self._list()[1]

    def basis(self) -> Basis:
        """Whose word that is. From any thread."""
        return self._list()[2]

    def _list(self) -> tuple[float, list[Contribution], Basis]:
        now = self._around.clock()
        if not self._listed[0] <= now < self._listed[0] + LIST_SECONDS:
            with self._lock:
                book = self._book
                entries, whole = book.entries(), max(1, book.until.samples)
                basis = Basis(monitors=book.vouched, seen=book.witnessed / whole, accounted=samples_of(entries) / whole)
            self._listed = now, listed(entries), basis
        return self._listed

    @property
    def vouched(self) -> int:
        """Monitors by whose word this one knows what it has not seen itself."""
        return self._book.vouched

    async def standing(self) -> Standing | None:
        """This peer's own part, as the others sign it; see `ask_for_standing`."""
        return await ask_for_standing(self._around, self._last)

    # what is seen here

    def _note(self, event: Event) -> None:
        if isinstance(event, EpochCredited | PeerSeen) and not self._turn.locked():
            self._look(0.0)  # who stays for less than a look is known by name all the same
        if isinstance(event, EpochCredited):
            self._noted.append(event)
            self._last = event
            self._count()

    def _count(self) -> None:
        """Never waits for a thread that works on the book: that one's holder counts when it is done."""
        if self._turn.locked() or not self._noted:
            return
        changed: set[str] = set()
        with self._lock:
            while self._noted:
                changed |= self._book.credit(self._noted.pop(0), self._around.clock())
        self._credited.set()
        self._write(changed)

    async def _aside(self, work: Callable[[], T]) -> T:
        """What `work` returns, which has the book for itself; in another thread if the book is large."""

        def alone() -> T:
            with self._lock:
                return work()

        try:
            async with self._turn:
                return await on_executor(self._book.size * BYTES_OF_WORK, alone)
        finally:
            self._count()

    async def _keep_looking(self) -> None:
        loop = asyncio.get_running_loop()
        before = written = loop.time()
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            now = loop.time()
            if self._turn.locked():
                continue
            self._look(min(now - before, 2 * LOOK_SECONDS))  # a machine that slept has seen nobody meanwhile
            before = now
            if now >= written + PRESENCE_SECONDS:
                self._write(self._seen)
                written, self._seen = now, set()

    def _look(self, seconds: float) -> None:
        around = self._around
        present = {peer: report for peer, report in around.others().items() if around.answers(peer)}
        present[around.node.peer_id] = around.own()
        with self._lock:
            for peer, report in present.items():
                self._book.saw(peer.text, chosen_name(peer, report.name), report.team, seconds, around.clock())
        self._seen.update(peer.text for peer in present)

    def _write(self, peers: Iterable[str]) -> None:
        with self._lock:
            kept = self._book.kept(peers)
        self._put(kept)

    def _put(self, kept: Kept) -> None:
        for row in to_rows(self._around.run_id, kept):
            self._record(row)

    # what others say

    async def _keep_comparing(self) -> None:
        await asyncio.sleep(FIRST_LOOK)
        while True:
            pause = EXCHANGE_SECONDS if await self._compare() else LOOK_SECONDS
            await asyncio.sleep(pause * (0.75 + self._around.node.endpoint.random.random() / 2))

    async def _compare(self) -> bool:
        """Whether there was anybody's book to compare with."""
        mark = self._around.position()
        if self._book.began is None:
            if mark is None:
                return False
            with self._lock:
                self._book.begin(mark)
        pages = await asyncio.gather(*map(self._fetch, self._around.bookkeepers()))
        told: dict[PeerID, Told] = {}
        for page in filter(None, pages):
            monitor, book = page[0], statements.told_by(page[1])
            await self._reach(book.until.epoch)
            if not self._book.knows(book.until):
                logger.debug("the book of %s is of an epoch that is not known here", monitor.short)
            elif why := await self._aside(partial(self._book.objection, book)):
                self._object(monitor, why)
            else:
                told[monitor] = book
        if not told:
            return False
        voices = {monitor.text: book for monitor, book in self._around.one_of_each_network(told).items()}
        changed, disputes = await self._aside(lambda: self._book.reconcile_all(voices))
        await self._aside(lambda: self._put(self._book.kept(changed)))
        self._revised = self._revised or bool(changed)
        if self._exact:  # otherwise monitors are in unlike groups, and differ by design
            self._tell(disputes)
        return True

    async def _fetch(self, monitor: PeerID) -> tuple[PeerID, statements.Page] | None:
        try:
            async with asyncio.timeout(statements.BOOK_SECONDS):
                return monitor, await statements.fetch_book(self._around.node.endpoint, monitor, self._around.run_id)
        except ValueError as error:
            self._object(monitor, str(error))
        except (NetworkError, TimeoutError) as error:
            logger.debug("no book from %s: %s", monitor.short, error)
        return None

    async def _reach(self, epoch: int) -> None:
        """Another monitor may have heard of the last epoch a moment earlier."""
        with suppress(TimeoutError):
            async with asyncio.timeout(PATIENCE):
                while self._book.until.epoch < epoch:
                    self._credited.clear()
                    await self._credited.wait()

    def _object(self, monitor: PeerID, why: str) -> None:
        if (monitor, why) not in self._objections and len(self._objections) < MOST_NOTICED:
            self._objections.add((monitor, why))
            text = f"what {self._name(monitor)} says of contributions does not count: {why}"
            self._around.node.endpoint.events.emit(Noticed("warning", text))

    def _tell(self, disputes: Sequence[Dispute]) -> None:
        """Once for each monitor and peer, when it is found for the second time in a row: what differs for a moment
        comes of an epoch that one of them had not heard of yet."""
        news = []
        found = {(each.monitor, each.peer): each for each in disputes[:MOST_NOTICED]}
        for key, dispute in found.items():
            if self._doubts.get(key) is False:
                news.append(dispute)
        self._doubts = {key: key in self._doubts for key in found}
        for each in news[:MOST_NOTICES]:
            monitor, peer = self._name(PeerID.parse(each.monitor)), self._name(PeerID.parse(each.peer))
            text = f"{monitor} says that {peer} has given {each.says:,.0f} samples; here it is {each.holds:,.0f}"
            self._around.node.endpoint.events.emit(Noticed("warning", text))

    def _name(self, peer: PeerID) -> str:
        report = self._around.others().get(peer)
        return f"{report.name} ({peer.short})" if report is not None and report.name != peer.short else peer.short

    # what it hands out

    async def _answer_page(self, peer: PeerID, wanted: statements.BookWanted) -> statements.Page:
        self._check(wanted.run_id)
        if not wanted.digest:
            return (await self._newest()).page(wanted.page)
        for _, pages in self._pages:
            if pages.statement.digest == wanted.digest:
                return pages.page(wanted.page)
        raise CallRefused("gone", "that book has been written on")

    async def _answer_entry(self, peer: PeerID, wanted: statements.EntryWanted) -> statements.Attestation:
        self._check(wanted.run_id)
        return (await self._newest()).attestation(wanted.peer)

    def _check(self, run_id: str) -> None:
        if run_id != self._around.run_id:
            raise CallRefused("run", f"this peer takes part in {self._around.run_id!r}")

    async def _newest(self) -> statements.Pages:
        """Made anew only now and then, however many ask."""
        async with self._making:
            now = asyncio.get_running_loop().time()
            if self._revised or not self._pages or now >= self._pages[0][0] + self._lasting(self._pages[0][1]):
                self._revised = False
                self._pages = [(now, await self._aside(self._cut)), *self._pages[:1]]
            return self._pages[0][1]

    def _lasting(self, pages: statements.Pages) -> float:
        return PAGES_SECONDS if pages.statement.until == self._book.until else min(PAGES_OF_BEFORE, PAGES_SECONDS)

    def _cut(self) -> statements.Pages:
        around, book = self._around, self._book
        return statements.Pages(
            around.identity,
            around.run_id,
            around.run,
            book.told(),
            vouched=book.vouched,
            witnessed=book.witnessed,
            now=around.clock(),
        )


class BookReader:
    """The part of a peer that keeps no book. Made and closed on the event loop; `contributions` is for any thread."""

    def __init__(self, around: Surroundings, *, exact: bool = True) -> None:
        """`exact`: as of a `Book`."""
        self._around, self._exact = around, exact
        self._loop = asyncio.get_running_loop()
        self._tasks = TaskOwner()
        self._asked = float("-inf")
        self._entries: Entries = {}  # the most that was told of each
        self._listed: Sequence[Contribution] = ()
        self._basis = Basis()
        self._last: EpochCredited | None = None
        self._own: dict[int, float] = {}  # epoch → this peer's samples in it, of epochs that came after those books
        self._closed = False
        self._unsubscribe: Callable[[], None] = lambda: None

    def start(self) -> None:
        """Nothing is asked before somebody wants to know."""
        self._unsubscribe = self._around.node.endpoint.events.subscribe(self._note)

    async def close(self) -> None:
        self._closed = True
        self._unsubscribe()
        await self._tasks.close()

    def contributions(self) -> Sequence[Contribution]:
        """What bookkeepers have told: those who gave most, and this peer, with what its rounds have counted since.
        Asks again now and then, and does not wait for the answers."""
        if not self._closed:
            self._loop.call_soon_threadsafe(self._refresh)
        own, since = self._around.node.peer_id.text, round(math.fsum(list(self._own.values())))
        return tuple(replace(each, samples=each.samples + since) if each.peer == own else each for each in self._listed)

    def basis(self) -> Basis:
        """Whose word that is. From any thread."""
        return self._basis

    def _note(self, event: Event) -> None:
        if isinstance(event, EpochCredited):
            self._last = event
            self._own[event.epoch] = event.samples.get(self._around.node.peer_id.text, 0.0)
            if len(self._own) > MOST_OWN:
                del self._own[next(iter(self._own))]

    def _refresh(self) -> None:
        now = self._loop.time()
        if not self._closed and now >= self._asked + REFRESH_SECONDS:
            self._asked = now
            self._tasks.spawn(self._read())

    async def _read(self) -> None:
        """Of several bookkeepers what most of them say: one that lies deceives nobody, unless it is the only one. What
        was told before stays where less is told now: the fuller book may have gone."""
        around, own = self._around, self._around.node.peer_id.text
        pages = await asyncio.gather(*map(self._first_page, sorted(around.bookkeepers())))
        told = around.one_of_each_network(dict(filter(None, pages)))
        if not told:
            return
        entries = agreed([statements.entries_of(page) for page in told.values()])
        if own not in entries and (standing := await self.standing()) is not None:
            entries[own] = standing.best.entry
        until = max((page.statement.until for page in told.values()), key=lambda mark: mark.epoch)
        counted = [samples for epoch, samples in self._own.items() if epoch <= until.epoch]
        held = joined(self._entries, {own: Entry()})
        held[own].samples += math.fsum(counted)
        most = min(self._most, most_samples(until, exact=self._exact))
        entries = merged(held, entries, most, seen={}, more=len(told) > self._basis.monitors)
        ranked = sorted(entries, key=lambda peer: entries[peer].worth, reverse=True)[:MOST_LISTED]
        self._entries = {peer: entries[peer] for peer in ranked}
        self._listed = listed(self._entries)
        self._own = {epoch: samples for epoch, samples in self._own.items() if epoch > until.epoch}
        whole = all(page.statement.pages <= 1 for page in told.values())
        samples = max(1, *(page.statement.until.samples for page in told.values()))
        self._basis = Basis(monitors=len(told), accounted=samples_of(entries) / samples if whole else None)

    async def _first_page(self, monitor: PeerID) -> tuple[PeerID, statements.Page] | None:
        endpoint, run_id = self._around.node.endpoint, self._around.run_id
        try:
            page = await statements.fetch_book(endpoint, monitor, run_id, most_pages=1)
        except (NetworkError, ValueError) as error:
            logger.debug("no book from %s: %s", monitor.short, error)
            return None
        return (monitor, page) if samples_of(statements.entries_of(page)) <= self._most else None

    @property
    def _most(self) -> float:
        """Samples that a book can have: the lineage, which everybody trains on, counts those of the run. A monitor may
        be an epoch or two ahead of this peer."""
        if (last := self._last) is None:
            return math.inf
        ahead = 2 * math.ceil(math.fsum(last.samples.values()))
        return most_samples(Mark(last.epoch + 2, last.run_samples + ahead), exact=self._exact)

    async def standing(self) -> Standing | None:
        """This peer's own part, as bookkeepers sign it; see `ask_for_standing`."""
        return await ask_for_standing(self._around, self._last)


async def ask_for_standing(around: Surroundings, last: EpochCredited | None) -> Standing | None:
    """A peer's own part, as the bookkeepers sign it; None where none of them answers within two seconds. One that has
    yet to count the `last` epoch that this peer knows of is asked again, for about as long."""
    loop, found = asyncio.get_running_loop(), dict[PeerID, statements.Attestation]()
    own, until = around.node.peer_id, loop.time() + ASK_SECONDS

    def is_behind(attestation: statements.Attestation | None) -> bool:
        return attestation is None or (last is not None and attestation.until.epoch < last.epoch)

    async def ask(monitor: PeerID) -> None:
        try:
            while is_behind(found.get(monitor)) and loop.time() < until:
                if monitor in found:
                    await asyncio.sleep(ASK_AGAIN)
                found[monitor] = await statements.fetch_attestation(
                    around.node.endpoint, monitor, around.run_id, own, ASK_SECONDS
                )
        except (NetworkError, ValueError) as error:
            logger.debug("nothing of this peer's part from %s: %s", monitor.short, error)

    await asyncio.gather(*map(ask, around.bookkeepers()))
    return Standing(tuple(found.values())) if found else None


# the journal


def to_rows(run_id: str, kept: Kept) -> Iterable[Booked | BookHead]:
    """Of these peers, and where the book stands: it comes last, so that a row may be newer than it and never older."""
    for peer, entry in kept.total.items():
        own, whole = kept.own.get(peer, Entry()), contribution(peer, entry)
        yield Booked(
            **{name: getattr(whole, name) for name in Contribution.__dataclass_fields__},
            run_id=run_id,
            own_samples=round(own.samples),
            own_hours=own.hours,
            own_rounds=own.rounds,
            own_reduced_bytes=own.reduced,
            own_uptime=own.uptime,
        )
    yield BookHead(run_id, kept.until.epoch, kept.until.samples, kept.since, kept.vouched)


def from_rows(head: BookHead | None, rows: Iterable[Booked]) -> Kept | None:
    """What was kept; None: nothing."""
    if head is None:
        return None
    total, own = {}, {}
    for row in rows:
        told = row.first, row.last, row.name, row.team
        total[row.peer] = Entry(row.samples, row.hours, row.rounds, row.reduced_bytes, row.uptime, *told)
        own[row.peer] = Entry(
            row.own_samples, row.own_hours, row.own_rounds, row.own_reduced_bytes, row.own_uptime, *told
        )
    own = {peer: entry for peer, entry in own.items() if any(entry.worth)}
    return Kept(Mark(head.epoch, head.run_samples), head.since, head.vouched, total, own)
