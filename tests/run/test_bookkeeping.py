"""Monitors that keep the book of a run together, under virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from itertools import pairwise

import msgspec
import pytest

from swarmcli.dht import DHTNode
from swarmcli.events import Booked, BookHead, EpochCredited, Event, Noticed, PeerSeen
from swarmcli.network.identity import Identity, PeerID
from swarmcli.optim import PeerDescription
from swarmcli.run import bookkeeping
from swarmcli.run.asking import Report
from swarmcli.run.bookkeeping import Bookkeeper, BookReader, Surroundings, from_rows
from swarmcli.run.contributions import Entries, Kept, Mark
from swarmcli.run.statements import digest_of, entries_of, fetch_book, signed
from swarmcli.run.values import Basis
from swarmcli.testing import virtual_time
from tests.optim.optim_swarm import nodes, record

SOON = {"FIRST_LOOK": 0.5, "LOOK_SECONDS": 1.0, "EXCHANGE_SECONDS": 2.0, "PAGES_SECONDS": 0.5}
ADA, BOB = [Identity.from_seed(seed).peer_id.text for seed in (101, 102)]  # trainers that nobody has to simulate


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is done once a minute is done every few seconds: simulated peers cost processor time."""
    for name, seconds in SOON.items():
        monkeypatch.setattr(bookkeeping, name, seconds)


class Run:
    """Peers that hear of rounds; nobody trains. Ada gives three times as much as Bob."""

    def __init__(self, peers: list[DHTNode]) -> None:
        self.nodes = peers
        self.mark = Mark()
        self.monitors: dict[PeerID, Monitor] = {}

    def epoch(self) -> None:
        """One that all monitors are in which are there."""
        self.mark = Mark(self.mark.epoch + 1, self.mark.samples + 100)
        event = EpochCredited(self.mark.epoch, self.mark.samples, {ADA: 75.0, BOB: 25.0}, {ADA: 8}, 60.0)
        for monitor in self.monitors.values():
            monitor.node.endpoint.events.emit(event)

    async def epochs(self, count: int) -> None:
        for _ in range(count):
            self.epoch()
            await asyncio.sleep(1.0)

    @property
    def given(self) -> dict[str, int]:
        return {ADA: 75 * self.mark.epoch, BOB: 25 * self.mark.epoch}

    def around(self, node: DHTNode) -> Surroundings:
        me = PeerDescription("monitor", node.peer_id.short)
        return Surroundings(
            node=node,
            identity=node.endpoint.identity,
            run_id="run",
            run="recipe",
            own=lambda: me,
            others=lambda: {peer: PeerDescription("monitor", "M") for peer in self.monitors if peer != node.peer_id},
            answers=lambda peer: True,
            position=lambda: self.mark,
            clock=lambda: 1e9 + asyncio.get_running_loop().time(),
            network=node.endpoint.prefix,
        )

    def monitor(self, kept: Kept | None = None) -> Monitor:
        return Monitor(self, self.nodes.pop(), kept)


class Monitor:
    """`rows` is what its journal would hold."""

    def __init__(self, run: Run, node: DHTNode, kept: Kept | None = None) -> None:
        self.run, self.node, self.rows = run, node, list[Event]()
        self.notices = record(node, Noticed)
        self.keeper = Bookkeeper(run.around(node), exact=True, kept=kept, record=self.rows.append)
        self.keeper.start()
        run.monitors[node.peer_id] = self

    @property
    def samples(self) -> dict[str, int]:
        return {each.peer: each.samples for each in self.keeper.contributions() if each.samples}

    def names(self, other: Monitor) -> bool:
        """Whether it has told of that one's book."""
        return any(other.node.peer_id.short in notice.text for notice in self.notices)

    def kept(self) -> Kept | None:
        lines = {row.peer: row for row in self.rows if isinstance(row, Booked)}
        heads = [row for row in self.rows if isinstance(row, BookHead)]
        return from_rows(heads[-1] if heads else None, lines.values())

    async def leave(self) -> None:
        self.run.monitors.pop(self.node.peer_id, None)
        await self.keeper.close()


@asynccontextmanager
async def simulated(count: int) -> AsyncIterator[Run]:
    async with nodes(count) as peers:
        run = Run(peers[1:])
        try:
            yield run
        finally:
            for monitor in list(run.monitors.values()):
                await monitor.leave()


def test_a_monitor_that_comes_later_learns_from_the_one_that_was_there() -> None:
    async def main() -> None:
        async with simulated(4) as run:
            monitor = run.monitor()
            await run.epochs(5)
            later = run.monitor()
            await run.epochs(5)
            assert monitor.samples == later.samples == run.given
            assert (monitor.keeper.vouched, later.keeper.vouched) == (0, 1)
            assert monitor.notices == later.notices == []
            reader = BookReader(run.around(run.nodes[0]))
            assert reader.contributions() == ()
            await asyncio.sleep(1.0)
            found = {each.peer: each for each in reader.contributions()}
            assert (found[ADA].samples, found[ADA].rounds, found[ADA].reduced_bytes) == (750, 10, 80)
            assert found[monitor.node.peer_id.text].uptime > 5
            assert run.nodes[0].peer_id.text in found  # itself, which has given nothing
            standing = await reader.standing()
            assert standing is not None and len(standing.attestations) == 2
            assert all(each.is_signed and each.rank == 0 and each.peers == 2 for each in standing.attestations)
            assert standing.best.until == run.mark
            await reader.close()

    virtual_time.run(main())


def test_who_is_seen_for_less_than_a_look_is_known_by_name() -> None:
    async def main() -> None:
        async with simulated(3) as run:
            monitor, brief = run.monitor(), run.monitor()
            monitor.node.endpoint.events.emit(PeerSeen(brief.node.peer_id.text, "M", "monitor", 0, 0, 0.0, False))
            await brief.leave()
            event = EpochCredited(1, 100, {brief.node.peer_id.text: 100.0}, {}, 60.0)
            monitor.node.endpoint.events.emit(event)
            assert ("M", 100) in {(each.name, each.samples) for each in monitor.keeper.contributions()}

    virtual_time.run(main())


def test_what_a_monitor_has_learned_from_another_one_is_in_its_pages_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bookkeeping, "PAGES_SECONDS", 60.0)

    async def main() -> None:
        async with simulated(4) as run:
            run.monitor()
            await run.epochs(5)
            later = run.monitor()
            run.epoch()

            async def samples() -> dict[str, float]:
                pages = await fetch_book(run.nodes[0].endpoint, later.node.peer_id, "run")
                return {peer.text: entry.samples for peer, entry in zip(pages.peers, pages.entries, strict=True)}

            assert (await samples())[ADA] == 75, "before the books are compared"
            await asyncio.sleep(1.0)
            assert (await samples())[ADA] == 450

    virtual_time.run(main())


def test_a_peer_learns_its_own_part_signed_by_the_monitors() -> None:
    async def main() -> None:
        async with simulated(3) as run:
            monitor = run.monitor()
            bob = run.nodes[0].peer_id
            event = EpochCredited(1, 100, {ADA: 75.0, bob.text: 25.0}, {}, 60.0)
            monitor.node.endpoint.events.emit(event)
            standing = await BookReader(run.around(run.nodes[0])).standing()
            assert standing is not None
            best = standing.best
            assert (best.entry.samples, best.rank, best.peers, best.until.samples) == (25.0, 2, 2, 100)
            assert best.is_signed and not msgspec.structs.replace(best, rank=1).is_signed
            await monitor.leave()
            assert await BookReader(run.around(run.nodes[0])).standing() is None

    virtual_time.run(main())


def test_who_leaves_right_after_an_epoch_is_told_of_that_one_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bookkeeping, "PAGES_SECONDS", 3600.0)

    async def main() -> None:
        async with simulated(3) as run:
            monitor, bob = run.monitor(), run.nodes[0]
            reader = BookReader(run.around(bob))
            reader.start()
            for number in (1, 2):
                event = EpochCredited(number, 100 * number, {ADA: 75.0, bob.peer_id.text: 25.0}, {}, 60.0)
                bob.endpoint.events.emit(event)
                asyncio.get_running_loop().call_later(0.2, monitor.node.endpoint.events.emit, event)
                standing = await reader.standing()
                assert standing is not None and standing.best.entry.samples == 25.0 * number
            await reader.close()

    virtual_time.run(main())


def test_a_reader_asks_several_monitors_so_that_one_that_lies_deceives_nobody() -> None:
    async def main() -> None:
        async with simulated(5) as run:
            liar = run.monitor()
            forge(liar, swap)
            await run.epochs(2)
            reader = BookReader(run.around(run.nodes[0]))
            reader.start()
            assert reader.basis() == Basis()
            reader.contributions()
            await asyncio.sleep(1.0)
            assert reader.contributions()[0].peer == BOB and reader.basis() == Basis(monitors=1, accounted=1.0)
            await reader.close()
            monitors = [run.monitor(), run.monitor()]
            await run.epochs(2)
            for monitor in monitors:
                monitor.keeper._book._before.clear()  # as if each had seen the epochs alone
            reader = BookReader(run.around(run.nodes[0]))
            reader.contributions()
            await asyncio.sleep(1.0)
            assert reader.contributions()[0].peer == ADA and reader.basis().monitors == 3
            await reader.close()

    virtual_time.run(main())


def test_a_reader_s_totals_never_shrink_when_the_fuller_book_leaves_and_comes_back() -> None:
    """A monitor that was there from the beginning goes away; one that came late, and never met it, tells less."""

    async def main() -> None:
        async with simulated(5) as run:
            first = run.monitor()
            await run.epochs(6)
            reader = BookReader(run.around(run.nodes[0]))
            reader.start()
            told = list[dict[str, int]]()

            async def read() -> None:
                reader._asked = float("-inf")  # it asks once in thirty seconds
                reader.contributions()
                await asyncio.sleep(1.0)
                told.append({each.peer: each.samples for each in reader.contributions() if each.samples})

            await read()
            assert told[-1] == run.given
            kept = first.kept()
            await first.leave()
            run.mark = Mark(run.mark.epoch + 1, run.mark.samples + 100)
            late = run.monitor()  # alone
            await run.epochs(2)
            await read()
            assert sum(late.samples.values()) < sum(told[0].values()), "it has seen less"
            back = run.monitor(kept)
            await run.epochs(3)
            await asyncio.sleep(10.0)  # they compare, and make their lists anew
            await read()
            assert all(after[peer] >= before[peer] for before, after in pairwise(told) for peer in before)
            assert sum(told[-1].values()) <= run.mark.samples
            assert back.samples == late.samples == told[-1], "each epoch that somebody saw counts once"
            await reader.close()

    virtual_time.run(main())


def test_a_trainer_that_writes_checkpoints_is_asked_where_no_monitor_is() -> None:
    async def main() -> None:
        async with simulated(4) as run:
            keeping, silent = run.monitor(), run.monitor()
            roles = {keeping.node.peer_id: True, silent.node.peer_id: False}
            reports = {
                peer: Report(role="trainer", name="", epoch=0, keeps=keeps, addresses=[])
                for peer, keeps in roles.items()
            }
            around = replace(run.around(run.nodes[0]), others=lambda: reports)
            assert around.bookkeepers() == [keeping.node.peer_id]
            await run.epochs(2)
            standing = await BookReader(around).standing()
            assert standing is not None and len(standing.attestations) == 1

    virtual_time.run(main())


def test_a_reader_adds_its_own_samples_of_the_epochs_that_came_since_it_was_told() -> None:
    async def main() -> None:
        async with simulated(3) as run:
            monitor, bob = run.monitor(), run.nodes[0]

            def epoch(number: int, *nodes: DHTNode) -> None:
                for node in nodes:
                    samples = {ADA: 75.0, bob.peer_id.text: 25.0}
                    node.endpoint.events.emit(EpochCredited(number, 100 * number, samples, {}, 60.0))

            reader = BookReader(run.around(bob))
            reader.start()
            for number in (1, 2):
                run.mark = Mark(number, 100 * number)
                epoch(number, monitor.node, bob)
            reader.contributions()
            await asyncio.sleep(1.0)
            own = [each.samples for each in reader.contributions() if each.peer == bob.peer_id.text]
            epoch(3, bob)
            since = [each.samples for each in reader.contributions() if each.peer == bob.peer_id.text]
            assert (own, since) == ([50], [75])
            await reader.close()

    virtual_time.run(main())


def test_a_reader_listens_to_no_book_with_more_samples_than_the_run_has() -> None:
    async def main() -> None:
        async with simulated(3) as run:
            liar = run.monitor()
            await run.epochs(8)
            forge(liar, inflate)
            reader = BookReader(run.around(run.nodes[0]))
            reader.start()
            run.nodes[0].endpoint.events.emit(EpochCredited(8, 800, {ADA: 75.0, BOB: 25.0}, {}, 60.0))
            reader.contributions()
            await asyncio.sleep(1.0)
            assert reader.contributions() == () and reader.basis() == Basis()
            await reader.close()

    virtual_time.run(main())


def test_a_monitor_that_was_away_finds_in_its_journal_and_at_the_others_what_it_missed() -> None:
    async def main() -> None:
        async with simulated(4) as run:
            monitor, other = run.monitor(), run.monitor()
            await run.epochs(3)
            await other.leave()
            await run.epochs(3)
            back = run.monitor(other.kept())
            await run.epochs(3)
            assert monitor.samples == back.samples == run.given
            assert back.notices == []

    virtual_time.run(main())


def test_a_monitor_that_comes_when_the_run_has_finished_learns_as_well() -> None:
    async def main() -> None:
        async with simulated(3) as run:
            monitor = run.monitor()
            await run.epochs(3)
            later = run.monitor()
            await asyncio.sleep(4.0)
            assert monitor.samples == later.samples == run.given

    virtual_time.run(main())


def forge(monitor: Monitor, lie: Callable[[Entries], None]) -> None:
    """From now on this monitor says something else than it has seen."""
    book = monitor.keeper._book
    told = book.told

    def forged() -> object:
        found = told()
        lie(found.entries)
        return found

    book.told = forged  # type: ignore[method-assign, assignment]


def swap(entries: Entries) -> None:
    if ADA in entries and BOB in entries:
        entries[ADA], entries[BOB] = entries[BOB], entries[ADA]


def inflate(entries: Entries) -> None:
    entries[BOB].samples *= 1000


def test_a_monitor_that_lies_changes_no_other_book_is_named_and_a_newcomer_believes_the_two_honest_ones() -> None:
    async def main() -> None:
        async with simulated(5) as run:
            monitor, second, liar = [run.monitor() for _ in range(3)]
            forge(liar, swap)
            await run.epochs(4)
            later = run.monitor()
            await run.epochs(6)
            assert monitor.samples == second.samples == later.samples == run.given
            assert later.keeper.vouched == 3
            for honest in (monitor, second, later):
                assert honest.names(liar)
                assert not any(honest.names(each) for each in (monitor, second, later))

    virtual_time.run(main())


def test_a_book_with_more_samples_than_the_run_has_is_refused() -> None:
    async def main() -> None:
        async with simulated(3) as run:
            liar = run.monitor()
            await run.epochs(3)
            forge(liar, inflate)
            later = run.monitor()
            await run.epochs(3)
            assert later.samples == {ADA: 225, BOB: 75}  # what it has seen itself
            assert "more samples than the run has" in later.notices[0].text

    virtual_time.run(main())


def test_a_book_is_signed_and_one_that_was_changed_afterwards_is_refused() -> None:
    async def main() -> None:
        async with simulated(3) as run:
            monitor, reader = run.monitor(), run.nodes[0]
            await run.epochs(2)
            whole = await fetch_book(reader.endpoint, monitor.node.peer_id, "run")
            found = {peer: round(entry.samples) for peer, entry in entries_of(whole).items() if entry.samples}
            assert found == run.given
            (await monitor.keeper._newest()).ranked[0][1].samples += 1
            with pytest.raises(ValueError, match="signed"):
                await fetch_book(reader.endpoint, monitor.node.peer_id, "run")

    virtual_time.run(main())


def test_what_stands_in_a_book_that_is_signed_as_empty_is_refused() -> None:
    async def main() -> None:
        async with simulated(3) as run:
            monitor, reader = run.monitor(), run.nodes[0]
            await run.epochs(2)
            pages = await monitor.keeper._newest()
            claimed = msgspec.structs.replace(pages.statement, pages=0, digest=digest_of([]))
            pages.statement = signed(monitor.node.endpoint.identity, claimed)
            with pytest.raises(ValueError, match="signed"):
                await fetch_book(reader.endpoint, monitor.node.peer_id, "run")

    virtual_time.run(main())


def test_a_book_of_thousands_travels_in_pages_of_bounded_size() -> None:
    async def main() -> None:
        async with simulated(4) as run:
            monitor = run.monitor()
            for number in range(1000):
                monitor.keeper._book.saw(Identity.from_seed(number).peer_id.text, "x" * 64, "y" * 64, 1.0, 1e9)
            await run.epochs(2)
            later = run.monitor()
            await run.epochs(3)
            assert len(later.keeper.contributions()) >= 1000
            assert later.samples == run.given

    virtual_time.run(main())
