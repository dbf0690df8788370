from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from swarmcli.events import EpochReported, Evaluated
from swarmcli.journal import Journal, JournalReader, retention
from swarmcli.journal.retention import Retention, used_bytes
from swarmcli.journal.writer import Store, open_for_writing

from .samples import BOB, RUN, START, Clock, averaging_round, epoch

SIZE = 400_000


def fill(path: Path, epochs: int) -> None:
    with Journal(path, run=RUN, clock=Clock()) as journal:
        for number in range(epochs):
            journal.record(epoch(number))
            journal.record(averaging_round(number, "failed", "why"))
            journal.record(EpochReported(BOB, number, 3.0, 0, 10.0))
        journal.record(Evaluated(3, 2.0, 256))


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retention, "JOURNAL", replace(retention.JOURNAL, least_size=0, rows_trimmed=100))


def trimmed(path: Path, calls: int = 100) -> Retention:
    db = open_for_writing(path)
    keeping = Retention(SIZE)
    for _ in range(calls):
        if not keeping.trim(db):
            break
    assert used_bytes(db) <= SIZE
    db.close()
    return keeping


def test_the_oldest_rows_give_way_and_what_was_added_up_stays(tmp_path: Path, small: None) -> None:
    path = tmp_path / "journal.sqlite"
    fill(path, 1500)
    with JournalReader(path) as reader:
        totals = reader.totals("stdlib-lm")
    before = path.stat().st_size
    trimmed(path)
    assert before > 2 * SIZE and path.stat().st_size <= SIZE * 1.1  # the file itself has shrunk
    with JournalReader(path) as reader:
        assert reader.totals("stdlib-lm") == totals
        assert [each.epoch for each in reader.evaluations("stdlib-lm")] == [3]
        rounds = [each.epoch for each in reader.rounds("stdlib-lm")]
        assert rounds == list(range(rounds[0], 1500)) and rounds[0] > 0
        epochs = [each.epoch for each in reader.epochs("stdlib-lm")]
        assert epochs == list(range(epochs[0], 1500)) and epochs[0] > 0
        curve = [each.epoch for each in reader.chart("stdlib-lm")]
        assert curve[:3] == [0, 16, 32] and curve[-1] == 1499


def test_a_journal_that_fits_loses_nothing(tmp_path: Path, small: None) -> None:
    path = tmp_path / "journal.sqlite"
    fill(path, 50)
    db = open_for_writing(path)
    changes = db.conn.total_changes
    assert not Retention(SIZE).trim(db) and db.conn.total_changes == changes
    db.close()


def test_little_gives_way_at_a_time_so_that_rows_which_wait_are_written(
    tmp_path: Path, small: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "journal.sqlite"
    fill(path, 1500)
    monkeypatch.setattr(retention, "JOURNAL", replace(retention.JOURNAL, trims_at_once=2))
    db = open_for_writing(path)
    keeping, before = Retention(SIZE), db.conn.total_changes
    assert keeping.trim(db)
    assert 0 < db.conn.total_changes - before <= 2 * 100 * 2  # rows, and their places on the curve
    db.close()


def test_claims_of_epochs_to_come_do_not_stay(tmp_path: Path, small: None) -> None:
    path = tmp_path / "journal.sqlite"
    with Journal(path, run=RUN, clock=Clock()) as journal:
        for number in range(3):
            journal.record(epoch(number))
        for number in range(6000):
            journal.record(EpochReported(BOB, 10**6 + number, 3.0, 0, 10.0))
    trimmed(path)
    with JournalReader(path) as reader:
        (count,) = reader._connection.execute("SELECT count(*) FROM curve").fetchone()
    assert count <= 3


def test_a_store_trims_what_it_writes(tmp_path: Path, small: None) -> None:
    path = tmp_path / "journal.sqlite"
    store = Store(path, RUN, SIZE)
    for part in range(20):
        store.write([averaging_round(part * 100 + number) for number in range(100)], START)
        while not store.tidy():
            pass
    store.close()
    assert path.stat().st_size <= SIZE * 1.2
    with JournalReader(path) as reader:
        assert reader.totals("stdlib-lm").rounds_committed == 2000
