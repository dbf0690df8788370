from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from coordinator_web.source import REREAD_SECONDS, DashboardSource, PeerStatus, RunStatus
from swarmcli.events import EpochAdvanced, EpochReported, Noticed, PeerConnected, PeerSeen, RoundFinished
from swarmcli.journal import Journal, RunRecord

ALICE, BOB, CAROL = "a" * 52, "b" * 52, "c" * 52
START = 1_790_000_000.0


class World:
    """A journal, the state of the moment, and a clock that moves by hand."""

    def __init__(self, path: Path, role: str = "trainer") -> None:
        self.now = START
        self.journal = Journal(path, run=RunRecord("r", role, ALICE, "alice"), clock=lambda: self.now)
        self.live = RunStatus(
            run_id="r",
            state="training",
            peer_id=ALICE,
            role=role,
            epoch=2,
            samples=100,
            target=1000,
            peers=(
                PeerStatus(peer_id=ALICE, role=role, epoch=2, name="alice", me=True),
                PeerStatus(peer_id=BOB, role="trainer", epoch=2, name="bob"),
            ),
        )
        self.source = DashboardSource(self.journal, lambda: replace(self.live, now=self.now))

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
        self.now += REREAD_SECONDS


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
    own = status.own
    assert own is not None and (own.own_samples, own.epochs) == (800, 2)
    assert (own.rounds_committed, own.rounds_failed, own.bytes_sent) == (1, 1, 200)


def test_a_monitor_contributes_nothing(tmp_path: Path) -> None:
    world = World(tmp_path / "journal.sqlite", "monitor")
    assert world.source.look().own is None
    world.journal.close()


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


def test_the_losses_of_others_fill_in_when_their_reports_arrive(world: World) -> None:
    world.epoch(1, None)
    world.written()
    assert [row.loss for row in world.source.epochs()] == [None]
    world.journal.record(EpochReported(BOB, 1, 3.5, 400, 10.0))
    world.written()
    assert [row.loss for row in world.source.epochs()] == [3.5]


def test_rounds_and_lines_come_as_they_were_and_only_the_new_ones(world: World) -> None:
    world.journal.record(PeerSeen(CAROL, "carol", "trainer", 1, 5, 2.0, False))
    world.journal.record(PeerConnected(BOB, "tcp://h:1"))
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
    world.now += REREAD_SECONDS
    status = world.source.look()
    assert "journal cannot be read" in status.notice and status.epoch == 2
    assert world.source.epochs() == () and world.source.rounds() == ()
    world.epoch(2)
    world.journal.flush(30)
    world.now += REREAD_SECONDS
    assert "journal cannot be written" in world.source.look().notice
