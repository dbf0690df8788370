from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from swarmcli.events import (
    Contribution,
    EpochAdvanced,
    EpochLoss,
    EpochReported,
    Evaluated,
    Noticed,
    PeerConnected,
    PeerSeen,
    RoundFinished,
    RunObserved,
)
from swarmcli.journal import Journal, RunRecord
from swarmcli.journal import reader as reader_module
from swarmcli.journal.options import JournalOptions
from swarmcli.run.source import LOOK_SECONDS, DashboardSource, Providers
from swarmcli.run.values import Alert, History, PeerStatus, RunStatus

ALICE, BOB, CAROL = "a" * 52, "b" * 52, "c" * 52
START = 1_790_000_000.0


class World:
    """A journal, the state of the moment, and a clock that moves by hand."""

    def __init__(self, path: Path, role: str = "trainer") -> None:
        self.now = START
        self.journal = Journal(path, run=RunRecord("r", role, ALICE, "alice"), clock=lambda: self.now)
        me = PeerStatus(peer_id=ALICE, role=role, epoch=2, name="alice", me=True)
        bob = PeerStatus(peer_id=BOB, role="trainer", epoch=2, name="bob")
        usual: dict[str, Any] = {"run_id": "r", "state": "training", "epoch": 2, "samples": 100, "target": 1000}
        self.live = RunStatus(**usual, peer_id=ALICE, role=role, peers=(me, bob))
        self.source = DashboardSource(self.journal, lambda: replace(self.live, now=self.now), clock=lambda: self.now)

    def epoch(self, number: int, loss: float | None = 2.5) -> None:
        self.journal.record(EpochAdvanced(number, "ab" * 32, 1000, 400, 2, loss, 8.0, 0.25))

    def round(self, epoch: int, outcome: str = "committed") -> None:
        left = {CAROL: "silent"}
        self.journal.record(
            RoundFinished("ab", "g", outcome, "why", epoch, BOB, (ALICE, BOB, CAROL), (ALICE, BOB), left, 100, 90, {})  # type: ignore[arg-type]
        )

    def written(self) -> None:
        """All that was recorded is in the file, and the source will look again."""
        assert self.journal.flush(30)
        self.now += LOOK_SECONDS


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    world = World(tmp_path / "home" / "journal.sqlite")
    yield world
    world.journal.close()


def test_a_look_adds_what_this_peer_did_in_all_its_lives(world: World) -> None:
    world.epoch(1, 4.0)
    world.epoch(2, 3.0)
    world.round(1)
    world.round(1, "failed")
    world.written()
    status = world.source.look()
    assert (status.epoch, status.samples, len(status.peers)) == (2, 100, 2)
    own = world.source.overview().me.totals
    assert (own.own_samples, own.epochs) == (800, 2)
    assert (own.rounds_committed, own.rounds_failed, own.bytes_sent) == (1, 1, 200)
    world.epoch(3, None)
    world.written()
    assert [row.loss for row in world.source.epochs()] == [4.0, 3.0, None]
    world.journal.record(EpochLoss(3, 3.5, 1))  # of others, whose reports come later
    world.written()
    assert [row.loss for row in world.source.epochs()] == [4.0, 3.0, 3.5]


def test_who_left_is_listed_for_a_while(world: World) -> None:
    seen = PeerSeen(CAROL, "carol", "trainer", 1, 5, 2.0, False)
    for gone in ("", "left", "", "lost"):
        world.journal.record(replace(seen, gone=gone))
        world.written()
        if gone:
            assert [(row.name, row.health) for row in world.source.look().peers][2] == ("carol", gone)
    world.now += 3600.0
    assert [row.name for row in world.source.look().peers] == ["alice", "bob"]


def test_peers_are_listed_in_an_order_that_stays(world: World) -> None:
    shown = (
        ("d", "monitor", "m"), ("c", "trainer", ""), (ALICE, "monitor", "me"), ("b", "auxiliary", "x"),
        ("a", "trainer", "z"), ("e", "spy", "a"),
    )  # fmt: skip
    peers = (PeerStatus(peer_id=i, role=role, epoch=1, name=name, me=i == ALICE) for i, role, name in shown)
    world.live = replace(world.live, peers=tuple(peers))
    assert [row.peer_id for row in world.source.look().peers] == [ALICE, "a", "c", "b", "d", "e"]


def test_rounds_and_lines_come_as_they_were_and_only_the_new_ones(world: World) -> None:
    world.journal.record(PeerSeen(CAROL, "carol", "trainer", 1, 5, 2.0, False))
    world.journal.record(PeerConnected(BOB, "tcp://h:1"))
    world.journal.record(Evaluated(1, 4.0, 256))  # many of these, and nobody would find the others
    world.round(1)
    world.journal.record(Noticed("warning", "hot"))
    world.written()
    (row,) = world.source.rounds()
    assert (row.leader, row.left_out, row.members) == (BOB, {CAROL: "silent"}, (ALICE, BOB, CAROL))
    events = world.source.events()
    assert [event.kind for event in events] == ["joined", "left out", "notice"]
    assert [event.text for event in world.source.events(after=events[1].id)] == ["hot"]
    world.round(2, "failed")
    world.written()
    assert [each.epoch for each in world.source.rounds(after=row.id)] == [2]


def test_without_a_readable_journal_the_page_still_shows_the_moment(world: World) -> None:
    world.epoch(1)
    world.written()
    assert len(world.source.epochs()) == 1
    shutil.rmtree(world.journal.path.parent)
    world.now += LOOK_SECONDS
    status = world.source.look()
    assert "journal cannot be read" in status.notice and status.epoch == 2
    assert world.source.epochs() == () and world.source.rounds() == ()
    world.epoch(2)
    world.journal.flush(30)
    world.now += LOOK_SECONDS
    assert "journal cannot be written" in world.source.look().notice


@pytest.mark.parametrize(("samples", "place"), [(25.0, (2, 3)), (30.0, (2, 3)), (75.0, (1, 3)), (0.0, (None, 2))])
def test_equals_share_a_place_among_those_who_gave_something(
    samples: float, place: tuple[int | None, int], world: World
) -> None:
    given = [Contribution(peer, samples=each) for peer, each in ((BOB, 75.0), (CAROL, 25.0), (ALICE, samples))]
    me = DashboardSource(world.journal, lambda: world.live, Providers(contributions=lambda: given)).overview().me
    assert (me.rank, me.ranked) == place


def test_an_alert_that_stands_says_for_the_page_whom_the_run_waits_for(world: World) -> None:
    world.live = replace(world.live, waits="The run stands still: it waits for bob.")
    alerts: list[Alert] = []
    source = DashboardSource(
        world.journal, lambda: world.live, Providers(alerts=lambda: alerts), clock=lambda: world.now
    )
    assert source.overview().run.waits == world.live.waits
    alerts.append(Alert(id="1", kind="stalled", text=world.live.waits, since=START))
    shown = source.overview()
    assert shown.run.waits == "" and shown.alerts == (*alerts,)
    world.live = replace(world.live, waits="The run stands still: it waits for cem, since two hours.")
    world.now += LOOK_SECONDS
    shown = source.overview()
    assert [alert.text for alert in shown.alerts] == [world.live.waits], "not whom it waited for when the alert began"
    assert source.look().waits == world.live.waits and shown.run.waits == ""


def test_however_many_look_the_run_is_put_together_a_few_times_a_second(world: World) -> None:
    looks: list[float] = []
    source = DashboardSource(world.journal, lambda: looks.append(world.now) or world.live, clock=lambda: world.now)  # type: ignore[func-returns-value]
    for step in range(10):
        world.now = START + step * 0.1
        assert source.look() is source.look()
    assert len(looks) == 4


def test_a_peer_has_a_history_of_what_it_told_and_of_its_rounds(world: World) -> None:
    for number in (1, 2):
        world.journal.record(EpochReported(BOB, number, 3.5, 400 * number, 10.0))
        world.round(number)
    world.journal.record(PeerSeen(CAROL, "carol", "trainer", 1, 5, 2.0, False))
    world.written()
    bob, carol = world.source.peer(BOB), world.source.peer(CAROL)
    assert bob is not None and [(each.epoch, each.samples) for each in bob.history] == [(1, 400), (2, 800)]
    assert [(each.epoch, each.leader) for each in bob.rounds] == [(2, BOB), (1, BOB)]
    assert carol is not None and carol.peer.name == "carol"
    assert carol.rounds[0].left_out == {CAROL: "silent"}
    assert world.source.peer("nobody") is None and world.source.peer('" OR 1') is None


def test_the_past_is_told_over_time_with_evaluations(world: World) -> None:
    assert world.source.history() == History()
    for number in range(10):
        world.journal.record(RunObserved(number, 3, 2, 50.0, 4.0 - number / 10))
        world.written()
        world.now += 10.0
    world.journal.record(Evaluated(4, 3.9, 256))
    world.written()
    history = world.source.history()
    assert [each.epoch for each in history.points] == list(range(10)) and history.points[3].alive == 3.0
    part = world.source.history(begin=3, by="epoch", points=2)
    assert part.points[-1].epoch == 9 and len(part.points) == 2 and [each.loss for each in part.evaluations] == [3.9]
    run = world.source.overview().run
    assert run.evaluation is not None and run.evaluation.epoch == 4
    assert run.evaluated.startswith("epoch 4: loss ")
    kind, rows = world.source.export("evaluations")
    assert kind is Evaluated and [each.epoch for each in rows] == [4]


def test_lists_are_exported_whole(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader_module, "JOURNAL", JournalOptions(rows_read=3))
    for number in range(1, 8):
        world.epoch(number)
        world.round(number)
    world.written()
    for name in ("epochs", "rounds"):
        kind, rows = world.source.export(name)
        assert [each.epoch for each in rows] == list(range(1, 8)) and kind.__name__.lower().startswith(name[:5])
