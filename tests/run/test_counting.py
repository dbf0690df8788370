"""Monitors that keep count of a run's contributions, and who reads that, under virtual time. Journals are real."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from swarmcli.dht import DHTNode
from swarmcli.events import Contribution, EpochCredited, RoundFinished
from swarmcli.journal import Journal, RunRecord
from swarmcli.network.identity import Identity, PeerID
from swarmcli.optim import PeerDescription
from swarmcli.run import contributions as given
from swarmcli.run import counting
from swarmcli.run.asking import VisitorReport
from swarmcli.run.contributions import ContributionTable, Mark, fetch_tables
from swarmcli.run.counting import ContributionKeeper, ContributionReader, RunView
from tests.optim.optim_swarm import nodes
from tests.simulation import simulated

ADA, BOB = [Identity.from_seed(seed).peer_id.text for seed in (101, 102)]  # nobody has to simulate them


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

    def around(self, node: DHTNode) -> RunView:
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
        )

    async def monitor(self, back: Monitor | None = None) -> Monitor:
        """`back`: with the journal of one that has left."""
        monitor = Monitor(self, self.nodes.pop(), back.path if back is not None else None)
        await monitor.keeper.start()
        self.monitors[monitor.node.peer_id] = monitor
        return monitor

    def reader(self, node: DHTNode) -> ContributionReader:
        return ContributionReader(self.around(node))


class Monitor:
    def __init__(self, run: Run, node: DHTNode, path: Path | None) -> None:
        self.run, self.node = run, node
        self.path = path or run.place / f"{node.peer_id.short}.sqlite"
        around = run.around(node)
        self.journal = Journal(self.path, run=RunRecord("run", "monitor", node.peer_id.text), clock=around.clock)
        self.keeper = ContributionKeeper(around, self.journal)

    @property
    def samples(self) -> dict[str, float]:
        self.journal.flush()
        with self.journal.read() as reader:
            return {row.peer: row.samples for row in reader.contributions("run") if row.samples}

    async def leave(self) -> None:
        self.run.monitors.pop(self.node.peer_id, None)
        await self.keeper.close()
        self.journal.close()


def monitors(count: int) -> Callable[[Callable[[Run], Coroutine[Any, Any, None]]], Callable[..., None]]:
    """Makes a test of a coroutine, which is given a run with so many peers; under virtual time."""

    def decorate(check: Callable[[Run], Coroutine[Any, Any, None]]) -> Callable[..., None]:
        async def test(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
            monkeypatch.setattr(counting, "PRESENCE", 1.0)  # simulated peers cost processor time
            monkeypatch.setattr(counting, "FRESH", 1.0)
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


async def read(reader: ContributionReader) -> list[tuple[str, int]]:
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
    assert later.samples == {ADA: 375, BOB: 125}, "nobody's table was taken over"
    whole, part = (
        "100% of the 1,000 samples up to epoch 10",
        "50% of the 1,000 samples up to epoch 10, counted since epoch 6",
    )
    assert whole in monitor.keeper.rests_on() and f"keeps count itself: {part}." in later.keeper.rests_on()
    reader = run.reader(run.nodes[0])
    assert reader.contributions() == () and reader.rests_on() == ""
    assert (later.keeper.told_by, reader.told_by) == ("as this peer counts", "as one peer counts")
    await read(reader)
    other = f"{later.node.peer_id.short} counts otherwise: {part}."
    assert f"the count of {monitor.node.peer_id.short}: {whole}. {other}" in reader.rests_on()
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
    assert "62% of the 800 samples up to epoch 8" in back.keeper.rests_on()


@monitors(4)
async def test_a_table_says_since_when_it_counts_and_one_of_another_shape_or_run_is_refused(run: Run) -> None:
    run.mark = Mark(5, 500)
    monitor, reader = await run.monitor(), run.nodes[0]
    await run.epochs(2)
    writer, none = monitor.node.peer_id, run.nodes[1].peer_id
    tables = await fetch_tables(reader.endpoint, [writer, none], "run")
    table = tables[writer]
    assert isinstance(table, ContributionTable) and table.since == 6
    assert {each.peer: each.samples for each in table.listed if each.samples} == {ADA: 150, BOB: 50}
    assert "serves no method" in str(tables[none]), "who has no table"
    said = await run.reader(reader).standing()
    assert said is not None and said.since == 6 and said.is_signed
    assert not msgspec.structs.replace(said, since=7).is_signed
    asked = await fetch_tables(reader.endpoint, [writer], "another")
    assert "takes part in 'run'" in str(asked[writer])
    for peers in (table.peers[:1] * len(table.peers), table.peers[1:]):
        monitor.keeper._look = lambda peers=peers: (msgspec.structs.replace(table, peers=peers), ())  # type: ignore[method-assign, misc]
        told = await fetch_tables(reader.endpoint, [writer], "run")
        assert "names a peer twice, or has rows of nobody" in str(told[writer])


@monitors(3)
async def test_a_peer_learns_its_own_part_signed_by_the_monitors(run: Run) -> None:
    monitor = await run.monitor()
    bob = run.nodes[0].peer_id
    event = EpochCredited(1, 100, {ADA: 75.0, bob.text: 25.0}, {}, 60.0)
    monitor.node.endpoint.events.emit(event)
    await asyncio.sleep(counting.BEHIND)
    standing = await run.reader(run.nodes[0]).standing()
    assert standing is not None
    assert (standing.entry.samples, standing.rank, standing.peers, standing.until.samples) == (25.0, 2, 2, 100)
    assert standing.is_signed and not msgspec.structs.replace(standing, rank=1).is_signed
    await monitor.leave()
    assert await run.reader(run.nodes[0]).standing() is None


@monitors(3)
async def test_who_leaves_right_after_an_epoch_is_told_of_that_one_too(run: Run) -> None:
    monitor, bob = await run.monitor(), run.nodes[0]
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
        peer: VisitorReport(role="trainer", name="", epoch=0, keeps=keeps, addresses=[])
        for peer, keeps in roles.items()
    }
    around = replace(run.around(run.nodes[0]), others=lambda: reports)  # type: ignore[arg-type, return-value]
    await run.epochs(2)
    standing = await ContributionReader(around).standing()
    assert standing is not None
    assert standing.monitor == keeping.node.peer_id


@monitors(4)
async def test_a_table_has_the_rows_of_those_who_gave_most_and_fits_into_a_message(run: Run) -> None:
    monitor = await run.monitor()
    for number in range(1100):
        peer = Identity.from_seed(number).peer_id.text
        monitor.journal.record(Contribution(peer, "𝕏" * 64, "𝕐" * 64, uptime=1.0, run_id="run"))
    await run.epochs(2)
    assert len(monitor.keeper.contributions()) >= 1100
    for most, rows in ((given.MOST_ROWS, 1024), (2, 2)):
        (table,) = (await fetch_tables(run.nodes[0].endpoint, [monitor.node.peer_id], "run", most)).values()
        assert isinstance(table, ContributionTable) and len(table.rows) == rows
        assert [peer.text for peer in table.peers[:2]] == [ADA, BOB] and table.samples == 200
