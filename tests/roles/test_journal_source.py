from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from coordinator_web.feed import Feed
from coordinator_web.source import LivePeer, LiveStatus
from swarmcli.events import EpochAdvanced, EpochReported, Noticed, PeerConnected, PeerSeen, RoundFinished
from swarmcli.journal import Journal, RunDescription
from swarmcli.roles import journal_source
from swarmcli.roles.journal_source import REREAD_SECONDS, JournalSource

ALICE, BOB, CAROL = "a" * 52, "b" * 52, "c" * 52
START = 1_790_000_000.0


class World:
    """A journal, the state of the moment, and a clock that moves by hand."""

    def __init__(self, path: Path, role: str = "trainer") -> None:
        self.now = START
        self.journal = Journal.open(path, run=RunDescription("r", role, ALICE, "alice"), clock=lambda: self.now)
        self.live = LiveStatus(
            run_id="r",
            state="training",
            peer_id=ALICE,
            role=role,
            name="alice",
            epoch=2,
            samples=100,
            target=1000,
            eta_seconds=3.0,
            join_line="swarm join",
            peers=(
                LivePeer(peer_id=ALICE, role=role, epoch=2, name="alice", samples=60, samples_per_second=30.0),
                LivePeer(peer_id=BOB, role="trainer", epoch=2, name="bob", samples=40, samples_per_second=10.0),
            ),
        )
        self.source = JournalSource(self.journal, lambda: self.live)

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


def test_the_status_joins_the_moment_and_the_history(world: World) -> None:
    world.epoch(1, 4.0)
    world.epoch(2, 3.0)
    world.round(1)
    world.round(1, "failed")
    world.written()
    status = world.source.status()
    assert (status.epoch, status.samples, status.target, status.loss) == (2, 100, 1000, 3.0)
    assert (status.samples_per_second, status.trainers, status.started) == (40.0, 2, START)
    own = status.own
    assert own is not None
    assert (own.samples, own.total_samples, own.epochs, own.share) == (60, 800, 2, 0.75)
    assert (own.rounds_committed, own.rounds_failed, own.bytes_sent) == (1, 1, 200)


def test_a_monitor_contributes_nothing(tmp_path: Path) -> None:
    world = World(tmp_path / "journal.sqlite", "monitor")
    assert world.source.status().own is None
    world.journal.close()


def test_a_peer_that_does_not_answer_no_longer_counts(world: World) -> None:
    alice, bob = world.live.peers
    world.live = replace(world.live, peers=(alice, replace(bob, answers=False)))
    status = world.source.status()
    assert (status.trainers, status.samples_per_second) == (1, 30.0)
    assert [row.health for row in world.source.peers()] == ["in step", "not answering"]


def test_who_left_is_listed_for_a_while(world: World) -> None:
    seen = PeerSeen(CAROL, "carol", "trainer", 1, 5, 2.0, False)
    for gone in ("", "left", "", "lost"):
        world.journal.record(replace(seen, gone=gone))
        world.written()
        if gone:
            assert [(row.name, row.health) for row in world.source.peers()][2] == ("carol", gone)
    world.now += 3600.0
    assert [row.name for row in world.source.peers()] == ["alice", "bob"]


def test_the_losses_of_others_fill_in_when_their_reports_arrive(world: World) -> None:
    world.epoch(1, None)
    world.written()
    assert [row.loss for row in world.source.epochs()] == [None]
    world.journal.record(EpochReported(BOB, 1, 3.5, 400, 10.0))
    world.written()
    assert [row.loss for row in world.source.epochs()] == [3.5]


def test_rounds_and_events_come_with_names_and_only_the_new_ones(world: World) -> None:
    world.journal.record(PeerSeen(CAROL, "carol", "trainer", 1, 5, 2.0, False))
    world.journal.record(PeerConnected(BOB, "tcp://h:1"))
    world.round(1)
    world.journal.record(Noticed("warning", "hot"))
    world.written()
    world.source.status()
    (row,) = world.source.rounds()
    assert (row.leader, row.left_out[0].name, row.members, row.contributors) == ("bob", "carol", 3, 2)
    events = world.source.events()
    assert [event.kind for event in events] == ["joined", "left out", "notice"]
    assert [event.text for event in world.source.events(after=events[1].id)] == ["hot"]
    world.round(2, "failed")
    world.written()
    assert [each.epoch for each in world.source.rounds(after=row.id)] == [2]


def test_a_long_run_is_thinned_out_in_memory(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal_source, "MOST_EPOCHS", 100)
    for first in range(0, 300, 50):
        for number in range(first, first + 50):
            world.epoch(number)
        world.written()
        world.source.status()
    assert len(world.source._epochs) <= 100
    epochs = [row.epoch for row in world.source.epochs()]
    assert epochs == sorted(epochs) and epochs[-1] == 299 and epochs[0] < 50
    assert len(world.source.epochs(limit=10)) == 10


def test_without_a_readable_journal_the_page_still_shows_the_moment(world: World) -> None:
    world.epoch(1)
    world.written()
    assert len(world.source.epochs()) == 1
    shutil.rmtree(world.journal.path.parent)
    world.now += REREAD_SECONDS
    status = world.source.status()
    assert "journal cannot be read" in status.notice and status.epoch == 2
    assert len(world.source.epochs()) == 1 and world.source.rounds() == []
    world.epoch(2)
    world.journal.flush(30)
    world.now += REREAD_SECONDS
    assert "journal cannot be written" in world.source.status().notice


def test_a_journal_is_read_once_for_several_questions(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.written()
    opened = []
    read = world.journal.read
    monkeypatch.setattr(world.journal, "read", lambda: opened.append(1) or read())
    world.source.status()
    world.source.peers()
    world.source.epochs()
    assert len(opened) == 1


def test_it_is_what_the_dashboard_asks_for(world: World) -> None:
    world.epoch(1)
    world.round(0)
    world.written()
    snapshot = Feed(world.source).snapshot()
    assert (len(snapshot.peers), len(snapshot.epochs), len(snapshot.rounds)) == (2, 1, 1)
