"""Monitors that keep count of a run's contributions, and who reads that, under virtual time. Journals are real."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable, Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from swarmcli.dht import DHTNode
from swarmcli.events import EpochCredited, PeerSeen, RoundFinished
from swarmcli.journal import Journal, RunRecord
from swarmcli.network.identity import Identity, PeerID
from swarmcli.optim import PeerDescription
from swarmcli.run import contributions as given
from swarmcli.run.asking import ShownReport
from swarmcli.run.bookkeeping import Bookkeeper, BookReader, BookTiming, RunView
from swarmcli.run.contributions import (
    Attestation,
    Book,
    BookEntry,
    Mark,
    fetch_books,
    is_signed,
    samples_of,
    signed,
)
from tests.optim.optim_swarm import nodes
from tests.simulation import simulated

# What is done every few seconds, or minutes, is done at once: simulated peers cost processor time.
SOON = BookTiming(presence=1.0, fresh=0.5, behind=0.0)
ADA, BOB, EVE = [Identity.from_seed(seed).peer_id.text for seed in (101, 102, 103)]  # nobody has to simulate them
Lie = Callable[[dict[str, BookEntry]], None]


class Run:
    """Peers that hear of rounds; nobody trains. Ada gives three times as much as Bob."""

    def __init__(self, peers: list[DHTNode], place: Path) -> None:
        self.nodes, self.place = peers, place
        self.mark = Mark()
        self.monitors: dict[PeerID, Monitor] = {}

    def epoch(self, *also: DHTNode) -> None:
        """One that all monitors are in which are there, and some others."""
        self.mark = Mark(self.mark.epoch + 1, self.mark.samples + 100)
        there = [*(monitor.node for monitor in self.monitors.values()), *also]
        members = tuple(node.peer_id.text for node in there)
        ended = RoundFinished("ab", "run", "committed", "", self.mark.epoch, members[0], members, (), {}, 0, 0)
        event = EpochCredited(self.mark.epoch, self.mark.samples, {ADA: 75.0, BOB: 25.0}, {ADA: 8}, 60.0)
        for node in there:
            node.endpoint.events.emit(ended)
            node.endpoint.events.emit(event)

    async def epochs(self, count: int, *also: DHTNode) -> None:
        for _ in range(count):
            self.epoch(*also)
            await asyncio.sleep(2.0)

    @property
    def given(self) -> dict[str, int]:
        return {ADA: 75 * self.mark.epoch, BOB: 25 * self.mark.epoch}

    def around(self, node: DHTNode, timing: BookTiming = SOON) -> RunView:
        me = PeerDescription("monitor", node.peer_id.short)
        loop = asyncio.get_running_loop()
        return RunView(
            node=node,
            identity=node.endpoint.identity,
            run_id="run",
            run="recipe",
            own=lambda: me,  # type: ignore[arg-type, return-value]
            others=lambda: {peer: PeerDescription("monitor", "M") for peer in self.monitors if peer != node.peer_id},  # type: ignore[misc]
            answers=lambda peer: True,
            clock=lambda: 1e9 + loop.time(),
            timing=timing,
        )

    async def monitor(self, back: Monitor | None = None, timing: BookTiming = SOON) -> Monitor:
        """`back`: with the journal of one that has left."""
        monitor = Monitor(self, self.nodes.pop(), timing, back.path if back is not None else None)
        await monitor.keeper.start()
        self.monitors[monitor.node.peer_id] = monitor
        return monitor

    def reader(self, node: DHTNode) -> BookReader:
        return BookReader(self.around(node))


class Monitor:
    def __init__(self, run: Run, node: DHTNode, timing: BookTiming, path: Path | None) -> None:
        self.run, self.node = run, node
        self.path = path or run.place / f"{node.peer_id.short}.sqlite"
        around = run.around(node, timing)
        self.journal = Journal(self.path, run=RunRecord("run", "monitor", node.peer_id.text), clock=around.clock)
        self.keeper = Bookkeeper(around, self.journal)

    @property
    def samples(self) -> dict[str, int]:
        self.journal.flush()
        with self.journal.read() as reader:
            return {row.peer: round(row.samples) for row in reader.book("run")[1] if row.samples}

    def lie(self, lie: Lie) -> None:
        """From now on this monitor says something else than it has seen."""
        look = self.keeper._look

        def forged() -> object:
            sums = look()
            entries = dict(sums.entries)
            lie(entries)
            peers, lines = tuple(map(PeerID.parse, entries)), tuple(entries.values())
            book = msgspec.structs.replace(sums.book, peers=peers, entries=lines)
            return replace(sums, entries=entries, book=book)

        self.keeper._look = forged  # type: ignore[method-assign, assignment]

    async def leave(self) -> None:
        self.run.monitors.pop(self.node.peer_id, None)
        await self.keeper.close()
        self.journal.close()


def give_all_to_eve(entries: dict[str, BookEntry]) -> None:
    whole = samples_of(entries)
    entries.clear()
    entries[EVE] = BookEntry(whole)


def monitors(count: int) -> Callable[[Callable[[Run], Coroutine[Any, Any, None]]], Callable[..., None]]:
    """Makes a test of a coroutine, which is given a run with so many peers; under virtual time."""

    def decorate(check: Callable[[Run], Coroutine[Any, Any, None]]) -> Callable[..., None]:
        async def test(tmp_path: Path) -> None:
            async with nodes(count) as peers:
                run = Run(peers[1:], tmp_path)
                try:
                    await check(run)
                finally:
                    for monitor in list(run.monitors.values()):
                        await monitor.leave()

        test.__name__, test.__doc__ = check.__name__, check.__doc__
        return simulated(test)

    return decorate


async def read(reader: BookReader) -> list[tuple[str, int]]:
    """What a reader lists once it has been told."""
    reader.contributions()
    await asyncio.sleep(1.0)
    return [(each.peer, each.samples) for each in reader.contributions() if each.samples]


@monitors(4)
async def test_each_monitor_counts_what_it_was_there_for_once_and_a_reader_is_told_whose_count_it_sees(
    run: Run,
) -> None:
    monitor = await run.monitor()
    await run.epochs(5)
    later = await run.monitor()
    await run.epochs(5)
    monitor.node.endpoint.events.emit(EpochCredited(10, 1000, {ADA: 75.0, BOB: 25.0}, {}, 60.0))  # once more
    assert monitor.samples == run.given
    assert later.samples == {ADA: 375, BOB: 125}, "nobody's book was taken over"
    whole, part = (
        "100% of the run's 1,000 samples, counted up to epoch 10",
        "50% of the run's 1,000 samples, counted since epoch 6 up to epoch 10",
    )
    assert whole in monitor.keeper.rests_on() and f"own count: {part}." in later.keeper.rests_on()
    reader = run.reader(run.nodes[0])
    assert reader.contributions() == () and reader.rests_on() == ""
    await read(reader)
    assert f"the count of one peer, {monitor.node.peer_id.short}: {whole}" in reader.rests_on()
    found = {each.peer: each for each in reader.contributions()}
    assert (found[ADA].samples, found[ADA].rounds, found[ADA].reduced_bytes) == (750, 10, 80)
    assert found[ADA].hours == pytest.approx(10 / 60) and found[ADA].first < found[ADA].last
    assert found[monitor.node.peer_id.text].uptime > 5
    assert run.nodes[0].peer_id.text in found  # itself, which has given nothing
    await reader.close()


@monitors(3)
async def test_a_monitor_whose_home_moves_takes_its_table_along(run: Run) -> None:
    monitor = await run.monitor()
    await run.epochs(3)
    await monitor.leave()
    run.mark = Mark(6, 600)  # three epochs that nobody counts
    back = await run.monitor(monitor)
    assert back.samples == {ADA: 225, BOB: 75}
    await run.epochs(2)
    assert back.samples == {ADA: 375, BOB: 125}
    assert "62% of the run's 800 samples, counted up to epoch 8" in back.keeper.rests_on()


@monitors(3)
async def test_a_certificate_says_since_when_and_a_peer_of_an_earlier_version_still_finds_all_signed(run: Run) -> None:
    run.mark = Mark(5, 500)
    monitor, reader = await run.monitor(), run.nodes[0]
    await run.epochs(2)
    writer = monitor.node.peer_id

    async def told(since: bool) -> Attestation:
        wanted = given.EntryWanted("run", PeerID.parse(ADA), since)
        return await reader.endpoint.call(writer, given.ENTRY, wanted, Attestation, timeout=5.0)

    assert (await told(True)).since == 6 and is_signed(await told(True))
    assert not is_signed(msgspec.structs.replace(await told(True), since=7))
    assert (await told(False)).since is msgspec.UNSET and is_signed(await told(False))
    book = (await fetch_books(reader.endpoint, [writer], "run"))[0][writer]
    assert book.since == 6
    bare = msgspec.structs.replace(book, since=msgspec.UNSET, signature=b"")
    assert signed(monitor.node.endpoint.identity, bare).signature == book.signature


@monitors(4)
async def test_a_book_of_somebody_else_or_of_another_shape_is_refused(run: Run) -> None:
    monitor, reader = await run.monitor(), run.nodes[0]
    await run.epochs(2)
    writer = monitor.node.peer_id
    (book,) = (await fetch_books(reader.endpoint, [writer], "run"))[0].values()
    assert {peer: entry.samples for peer, entry in book.lines.items() if entry.samples} == run.given
    assert book.fault(writer, "run") == ""

    def changed(**changes: object) -> Book:
        return msgspec.structs.replace(book, **changes)

    assert "another peer or run" in book.fault(writer, "another")
    assert "another peer or run" in book.fault(reader.peer_id, "run")
    assert "format 2, known here is 1; update" in changed(format=2).fault(writer, "run")
    twice = changed(peers=book.peers[:1] * 2, entries=book.entries[:1] * 2)
    assert "a peer twice" in twice.fault(writer, "run")
    assert "lines of nobody" in changed(peers=book.peers[1:]).fault(writer, "run")
    books, failed = await fetch_books(reader.endpoint, [run.nodes[1].peer_id], "run")
    assert books == {} and "older swarm" in failed[run.nodes[1].peer_id], "who has no book"


@monitors(5)
async def test_those_count_first_who_were_in_two_rounds_of_the_readers(run: Run) -> None:
    liars = [await run.monitor() for _ in range(2)]
    for liar in liars:
        liar.lie(give_all_to_eve)
    await run.epochs(1)
    strangers, run.monitors = run.monitors, {}
    known, reading = await run.monitor(), run.nodes[0]  # who has counted less than they say they have
    reader = run.reader(reading)
    await reader.start()
    await run.epochs(2, reading)
    run.monitors |= strangers
    assert await read(reader) == [(ADA, 150), (BOB, 50)]
    await known.leave()
    stranger = run.reader(reading)
    assert (await read(stranger))[0][0] == EVE, "whom nobody has met is believed where nobody else is"
    await reader.close()
    await stranger.close()


@monitors(3)
async def test_who_is_seen_for_a_moment_is_known_by_name(run: Run) -> None:
    monitor, brief = await run.monitor(), await run.monitor()
    monitor.node.endpoint.events.emit(PeerSeen(brief.node.peer_id.text, "M", "monitor", 0, 0, 0.0, False))
    await brief.leave()
    event = EpochCredited(1, 100, {brief.node.peer_id.text: 100.0}, {}, 60.0)
    monitor.node.endpoint.events.emit(event)
    assert ("M", 100) in {(each.name, each.samples) for each in monitor.keeper.contributions()}


@monitors(3)
async def test_a_peer_learns_its_own_part_signed_by_the_monitors(run: Run) -> None:
    monitor = await run.monitor()
    bob = run.nodes[0].peer_id
    event = EpochCredited(1, 100, {ADA: 75.0, bob.text: 25.0}, {}, 60.0)
    monitor.node.endpoint.events.emit(event)
    standing = await run.reader(run.nodes[0]).standing()
    assert standing is not None
    assert (standing.entry.samples, standing.rank, standing.peers, standing.until.samples) == (25.0, 2, 2, 100)
    assert is_signed(standing) and not is_signed(msgspec.structs.replace(standing, rank=1))
    await monitor.leave()
    assert await run.reader(run.nodes[0]).standing() is None


@monitors(3)
async def test_who_leaves_right_after_an_epoch_is_told_of_that_one_too(run: Run) -> None:
    monitor, bob = await run.monitor(timing=replace(SOON, fresh=3600.0)), run.nodes[0]
    reader = run.reader(bob)
    await reader.start()
    for number in (1, 2):
        event = EpochCredited(number, 100 * number, {ADA: 75.0, bob.peer_id.text: 25.0}, {}, 60.0)
        bob.endpoint.events.emit(event)
        asyncio.get_running_loop().call_later(0.2, monitor.node.endpoint.events.emit, event)
        standing = await reader.standing()
        assert standing is not None and standing.entry.samples == 25.0 * number
    await reader.close()


@monitors(4)
async def test_a_trainer_that_writes_checkpoints_is_asked_where_no_monitor_is(run: Run) -> None:
    keeping, silent = await run.monitor(), await run.monitor()
    roles = {keeping.node.peer_id: True, silent.node.peer_id: False}
    reports = {
        peer: ShownReport(role="trainer", name="", epoch=0, keeps=keeps, addresses=[]) for peer, keeps in roles.items()
    }
    around = replace(run.around(run.nodes[0]), others=lambda: reports)  # type: ignore[arg-type, return-value]
    await run.epochs(2)
    standing = await BookReader(around).standing()
    assert standing is not None
    assert standing.monitor == keeping.node.peer_id


@monitors(3)
async def test_a_reader_adds_its_own_samples_of_the_epochs_that_came_since_it_was_told(run: Run) -> None:
    monitor, bob = await run.monitor(), run.nodes[0]

    def epoch(number: int, *nodes: DHTNode) -> None:
        run.mark = Mark(number, 100 * number)
        for node in nodes:
            samples = {ADA: 75.0, bob.peer_id.text: 25.0}
            node.endpoint.events.emit(EpochCredited(number, 100 * number, samples, {}, 60.0))

    reader = run.reader(bob)
    await reader.start()
    for number in (1, 2):
        epoch(number, monitor.node, bob)
    told = dict(await read(reader))
    epoch(3, bob)
    since = {each.peer: each.samples for each in reader.contributions()}
    assert (told[bob.peer_id.text], since[bob.peer_id.text]) == (50, 75)
    await reader.close()


@monitors(4)
async def test_a_book_has_the_lines_of_those_who_gave_most_and_fits_into_a_message(run: Run) -> None:
    monitor = await run.monitor()
    for number in range(1100):
        monitor.keeper._add(Identity.from_seed(number).peer_id.text, name="𝕏" * 64, team="𝕐" * 64, uptime=1.0)
    await run.epochs(2)
    assert len(monitor.keeper.contributions()) >= 1100
    books, _ = await fetch_books(run.nodes[0].endpoint, [monitor.node.peer_id], "run")
    assert len(books[monitor.node.peer_id].lines) == 1024
    books, _ = await fetch_books(run.nodes[0].endpoint, [monitor.node.peer_id], "run", 2)
    assert [peer.text for peer in books[monitor.node.peer_id].peers] == [ADA, BOB]


@monitors(3)
async def test_the_journal_of_an_older_swarm_goes_on(run: Run) -> None:
    """Its lines had what was seen beside what holds, and its book did not say since when it counts."""
    path = run.place / "journal.sqlite"
    with Journal(path, run=RunRecord("run", "monitor", "me"), clock=lambda: 5.0):
        pass
    with sqlite3.connect(path) as old:
        for column in ("own_hours", "own_rounds", "own_reduced_bytes", "own_uptime"):
            old.execute(f"ALTER TABLE contributions ADD COLUMN {column} FLOAT")
        old.execute("ALTER TABLE books DROP COLUMN since")
        old.execute(
            "INSERT INTO contributions (run_id, peer, samples, own_samples, own_hours, hours, rounds, name, first)"
            " VALUES ('run', ?, 150, 75, 0.5, 1.0, 2, 'Ada', 4.0)",
            (ADA,),
        )
        old.execute("INSERT INTO books (run_id, epoch, run_samples, vouched) VALUES ('run', 2, 200, 1)")
    old.close()
    run.mark = Mark(2, 200)
    monitor = Monitor(run, run.nodes.pop(), SOON, path)
    await monitor.keeper.start()
    run.monitors[monitor.node.peer_id] = monitor
    run.epoch()
    assert monitor.samples == {ADA: 225, BOB: 25}
    told = "58% of the run's 300 samples, counted up to epoch 3; the rest is another peer's word"
    assert told in monitor.keeper.rests_on(), "what it took over then it has not seen itself"
    (ada, *_) = monitor.keeper.contributions()
    assert (ada.name, ada.first, ada.rounds) == ("Ada", 4.0, 3)
    with monitor.journal.read() as reader:
        head, _ = reader.book("run")
        assert head is not None and head.epoch == 3
