"""Journals that earlier builds wrote are read as they are, and go on: see tests/kept/journals/make.py."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest

from swarmcli.events import Contribution, ContributionsCounted, EpochAdvanced, EpochLoss, RoundFinished, RunObserved
from swarmcli.journal import Journal, JournalReader, RunRecord
from swarmcli.journal.tables import VERSION

KEPT = Path(__file__).parents[1] / "kept" / "journals"
ALICE, BOB, CAROL = "a" * 52, "b" * 52, "c" * 52
START = 1_790_000_000.0


@pytest.fixture(params=[6, 7])
def path(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    path = tmp_path / "journal.sqlite"
    connection = sqlite3.connect(path)
    connection.executescript((KEPT / f"format-{request.param}.sql").read_text())
    assert connection.execute("PRAGMA user_version").fetchone() == (request.param,)
    connection.close()
    return path


def test_all_of_it_is_read_as_it_is_and_its_sums_go_on(path: Path) -> None:
    for starts in (1, 2):
        added = starts - 1
        with JournalReader(path) as reader:
            assert [run.name for run in reader.runs()] == ["alice"] * starts
            assert [each.epoch for each in reader.epochs("kept")] == list(range(1, 3 + starts))
            assert [row.loss for row in reader.chart("kept")] == [3.5, 3.0, 2.5, 2.0][: 2 + starts]
            assert [each.loss for each in reader.evaluations("kept")] == [3.0, 2.5, 2.0]
            totals = reader.totals("kept")
            assert (totals.epochs, totals.rounds_committed, totals.rounds_failed) == (2 + starts, 2 + added, 1)
            assert totals.bytes_sent == 3000 + 1000 * added
            assert [(each.what, each.count) for each in reader.failures("kept")][-1] == ("round", 1)
            assert reader.rounds("kept")[2].reason == "bob was lost" and len(reader.rounds("kept")) == 3 + added
            assert [(peer.name, peer.gone) for peer in reader.peers("kept")] == [("bob", "left")]
            assert [line.text for line in reader.events("kept") if line.kind == "notice"] == [
                f"word {number}" for number in (1, 2, 3)
            ]
            moments = reader.moments("kept")
            assert [(each.epoch, each.loss) for each in moments] == [(1, 3.5), (2, 3.0), (3, 2.5), (4, 2.0)][
                : 2 + starts
            ]
            assert [each.samples for each in reader.reports_of("kept", BOB)] == [400, 800, 1200]
        if starts == 1:
            go_on(path)


def go_on(path: Path) -> None:
    now = START + 100.0
    with Journal(path, run=RunRecord("kept", "monitor", ALICE, "alice"), clock=lambda: now) as journal:
        journal.record(EpochAdvanced(4, "cd" * 32, 1000, 0, 2, None, 8.0, 0.25))
        journal.record(EpochLoss(4, 2.0, 1))
        journal.record(
            RoundFinished("ab", "kept_grads", "committed", "", 4, BOB, (ALICE, BOB), (BOB,), {}, 1000, 900, {})
        )
        journal.record(RunObserved(4, 3, 2, 125.0, 2.0))
        journal.record(Contribution(BOB, samples=100.0, rounds=1, run_id="kept"))
        journal.record(ContributionsCounted("kept", 4, 4000, 1))


def test_of_a_table_of_contributions_what_its_writer_has_seen_goes_on_and_no_others_word(path: Path) -> None:
    with JournalReader(path) as reader:
        (bob,) = reader.contributions("kept")  # before it is converted, too
        assert (bob.name, bob.samples, bob.rounds) in (("Bob", 200.0, 1), ("Bob", 600.0, 3))
    go_on(path)
    with JournalReader(path) as reader:
        (bob,) = reader.contributions("kept")
        assert (bob.peer, bob.name, bob.team) == (BOB, "Bob", "reds")
        # In format 6 a row replaced the one before.
        assert (bob.samples, bob.rounds) in ((200.0 + 100.0, 2), (3 * 200.0 + 100.0, 4))
        assert reader.counted("kept") == ContributionsCounted("kept", 4, 4000, 1, time=START + 100.0)
    connection = sqlite3.connect(path)
    assert connection.execute("PRAGMA user_version").fetchone() == (VERSION,)
    connection.close()
    go_on(path)
    with JournalReader(path) as reader:
        assert reader.contributions("kept")[0].samples == bob.samples + 100.0, "it is converted once"
