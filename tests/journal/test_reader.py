from __future__ import annotations

import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from swarmcli.errors import JournalError
from swarmcli.events import Contribution, ContributionsCounted, EpochLoss, Evaluated, PeerConnected
from swarmcli.journal import Journal, JournalReader, RunRecord
from swarmcli.journal import reader as reader_module
from swarmcli.journal.options import JournalOptions

from .samples import ALICE, BOB, RUN, Clock, averaging_round, epoch, seen


@pytest.fixture
def journal(tmp_path: Path) -> Iterator[Journal]:
    with Journal(tmp_path / "journal.sqlite", run=RUN, clock=Clock()) as journal:
        yield journal


@pytest.fixture
def reader(journal: Journal) -> Iterator[JournalReader]:
    journal.flush(30)
    with journal.read() as reader:
        yield reader


def test_an_epoch_that_was_come_to_twice_counts_as_it_was_the_last_time(
    journal: Journal, reader: JournalReader
) -> None:
    for number, loss in ((1, 4.0), (2, 3.0), (2, 2.0), (3, 1.0)):
        journal.record(epoch(number, loss))
    journal.flush(30)
    assert [row.loss for row in reader.epochs("stdlib-lm")] == [4.0, 2.0, 1.0]
    assert [row.epoch for row in reader.epochs("stdlib-lm", after=1)] == [2, 3]
    assert [row.epoch for row in reader.epochs("stdlib-lm", limit=2)] == [2, 3]
    assert reader.totals("stdlib-lm").epochs == 3
    download = replace(epoch(3, None, samples=0), peers=0)  # of which a step has told more
    for event in (download, replace(download, epoch=4)):
        journal.record(event)
    journal.flush(30)
    assert [(row.samples, row.loss) for row in reader.epochs("stdlib-lm", after=2)] == [(1000, 1.0), (0, None)]


def test_of_an_epoch_that_was_evaluated_twice_the_last_loss_counts(journal: Journal, reader: JournalReader) -> None:
    for epoch_number, loss in ((10, 4.0), (20, 3.5), (20, 3.0)):
        journal.record(Evaluated(epoch_number, loss, 256, {"accuracy": 0.5, "f1": 0.25}))
    journal.flush(30)
    first, last = reader.evaluations("stdlib-lm")
    assert (first.epoch, first.loss, last.epoch, last.loss) == (10, 4.0, 20, 3.0)
    assert last.metrics == {"accuracy": 0.5, "f1": 0.25}
    assert [row.epoch for row in reader.evaluations("stdlib-lm", after=10)] == [20]
    said = reader.events("stdlib-lm")[0].text
    assert "evaluated epoch 10: loss 4.0000, accuracy 0.5000, f1 0.2500 on 256" in said


def test_rows_after_an_id_are_only_the_newer_ones(journal: Journal, reader: JournalReader) -> None:
    for number in range(5):
        journal.record(averaging_round(number, "failed" if number == 2 else "committed", "why"))
    journal.flush(30)
    rounds = reader.rounds("stdlib-lm")
    assert [row.epoch for row in rounds] == [0, 1, 2, 3, 4]
    assert [row.epoch for row in reader.rounds("stdlib-lm", after=rounds[2].id)] == [3, 4]
    assert [row.epoch for row in reader.added("stdlib-lm", "rounds", after=rounds[2].id, limit=1)] == [4]
    totals = reader.totals("stdlib-lm")
    assert (totals.rounds_committed, totals.rounds_failed, totals.bytes_sent) == (4, 1, 5000)
    before = reader.events("stdlib-lm")
    journal.record(PeerConnected(BOB, "tcp://h:1"))
    journal.flush(30)
    assert len(reader.events("stdlib-lm")) == len(before) + 1
    assert reader.events("stdlib-lm", details=False) == before


def test_a_chart_shows_the_loss_of_the_swarm_where_it_is_known(journal: Journal, reader: JournalReader) -> None:
    """No epoch is there that others alone claim to have reached, and a later word replaces an earlier one."""
    claimed = EpochLoss(1_000_000, 0.5, 1)
    for told in (
        EpochLoss(1, 4.0, 1),
        EpochLoss(1, 2.5, 2),
        EpochLoss(2, 3.0, 1),
        EpochLoss(3, float("nan"), 5),
        claimed,
    ):
        journal.record(told)
    journal.record(epoch(3, 1.5))
    journal.flush(30)
    assert [(row.epoch, row.loss, row.samples, row.peers) for row in reader.chart("stdlib-lm")] == [
        (1, 2.5, 0, 2),
        (2, 3.0, 0, 1),
        (3, 1.5, 1000, 2),
    ]
    assert [row.epoch for row in reader.chart("stdlib-lm", after=2)] == [3]
    assert list(reader.every("stdlib-lm", "epochs")) == reader.chart("stdlib-lm")  # tables say what pages draw
    assert reader.chart("stdlib-lm", after=3) == []


@pytest.mark.parametrize(("count", "limit"), [(0, 1), (1, 1), (7, 3), (60, 59), (60, 60), (200, 7)])
def test_thinning_keeps_the_bound_the_order_and_the_last(tmp_path: Path, count: int, limit: int) -> None:
    with Journal(tmp_path / "journal.sqlite", run=RUN, clock=Clock()) as journal:
        for number in range(count):
            journal.record(epoch(number))
    with JournalReader(tmp_path / "journal.sqlite") as reader:
        kept = [row.epoch for row in reader.chart("stdlib-lm", limit=limit)]
    assert len(kept) == min(count, limit) and kept == sorted(set(kept))
    assert not count or kept[-1] == count - 1


def test_a_peer_is_listed_once_over_all_starts_and_since_when_it_was_known(tmp_path: Path) -> None:
    """And with the highest epoch that it ever had."""
    path = tmp_path / "journal.sqlite"
    for now, name in ((100.0, "bob"), (200.0, "robert")):
        with Journal(path, run=RUN, clock=Clock(now)) as journal:
            for number in (399, 400) if now == 100.0 else (0,):
                journal.record(seen(name=name, epoch=number, gone="left" if number == 400 else ""))
    with JournalReader(path) as reader:
        (peer,) = reader.peers("stdlib-lm")
    assert (peer.name, peer.first_seen, peer.time) == ("robert", 100.0, 200.0)
    assert (peer.epoch, peer.gone) == (400, "")


def test_another_run_in_the_same_file_does_not_mix_in(tmp_path: Path) -> None:
    path = tmp_path / "journal.sqlite"
    for run_id in ("one", "two"):
        with Journal(path, run=RunRecord(run_id, "trainer", ALICE), clock=Clock()) as journal:
            journal.record(epoch(1 if run_id == "one" else 2))
            journal.record(averaging_round(1))
    with JournalReader(path) as reader:
        assert [row.epoch for row in reader.epochs("one")] == [1]
        assert [row.epoch for row in reader.epochs("two")] == [2]
        assert reader.totals("one").rounds_committed == 1


def test_reading_changes_nothing_and_needs_no_permission_to_write(journal: Journal, reader: JournalReader) -> None:
    with pytest.raises(sqlite3.OperationalError, match="readonly"):
        reader._connection.execute("DELETE FROM runs")


def test_what_is_no_journal_or_damaged_is_an_error_with_its_name(tmp_path: Path) -> None:
    path = tmp_path / "journal.sqlite"
    with pytest.raises(JournalError, match=r"journal\.sqlite does not exist"):
        JournalReader(path)
    assert list(tmp_path.iterdir()) == []
    for content in (b"", b"not a database" * 100):
        path.write_bytes(content)
        with pytest.raises(JournalError, match=r"journal\.sqlite"):
            JournalReader(path)
    path.unlink()
    with Journal(path, run=RUN, clock=Clock()) as journal:
        for number in range(200):
            journal.record(epoch(number))
    damaged = bytearray(path.read_bytes())
    page = damaged.rindex(b"ab" * 32) // 4096 * 4096  # one that holds rows, and not what tables there are
    damaged[page : page + 4096] = b"\xff" * 4096
    path.write_bytes(bytes(damaged))
    with pytest.raises(JournalError, match=r"journal\.sqlite cannot be read"), JournalReader(path) as reader:
        reader.epochs("stdlib-lm")


def test_on_a_medium_that_takes_no_files_the_journal_is_read_as_it_lies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SQLite wants to make an index beside a journal in WAL mode, and cannot there."""
    path = tmp_path / "journal.sqlite"
    with Journal(path, run=RUN, clock=Clock()) as journal:
        journal.record(epoch(1))
    real = reader_module._open

    def on_read_only_medium(where: Path, mode: str) -> sqlite3.Connection:
        if mode == "mode=ro":
            where = tmp_path / "nothing" / where.name  # what SQLite says of it is what it says of such a medium
        return real(where, mode)

    monkeypatch.setattr(reader_module, "_open", on_read_only_medium)
    with JournalReader(path) as reader:
        assert [row.epoch for row in reader.epochs("stdlib-lm")] == [1]


def test_a_locked_journal_is_not_read_past_its_lock(journal: Journal, monkeypatch: pytest.MonkeyPatch) -> None:
    def locked(where: Path, mode: str) -> sqlite3.Connection:
        assert mode == "mode=ro"
        error = sqlite3.OperationalError("database is locked")
        error.sqlite_errorcode = sqlite3.SQLITE_BUSY
        raise error

    monkeypatch.setattr(reader_module, "_open", locked)
    with pytest.raises(JournalError, match="database is locked"):
        journal.read()


def test_what_peers_have_given_is_added_up_by_peer_and_never_more_than_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("swarmcli.journal.tables.JOURNAL", JournalOptions(most_rows=3))
    path = tmp_path / "journal.sqlite"
    with Journal(path, run=RunRecord("run", "monitor", "me"), clock=lambda: 5.0) as journal:
        for number in range(6):
            given = Contribution(f"peer {number}", "Ada", samples=number, rounds=1, first=1.0, last=1.0, run_id="run")
            journal.record(given)
        more = {"rounds": 2, "uptime": 0.5, "first": 2.0, "last": 2.0}
        journal.record(Contribution("peer 3", samples=50, run_id="run", **more))
        journal.record(Contribution("peer 4", "Bob", run_id="run"))
        journal.record(ContributionsCounted("run", 9, 900, 1))
    with JournalReader(path) as reader:
        assert reader.counted("run") == ContributionsCounted("run", 9, 900, 1, time=5.0)
        assert reader.contributions("run") == [
            Contribution("peer 3", "Ada", "", 53.0, 0.0, 3, 0, 0.5, 1.0, 2.0, "run", time=5.0),
            Contribution("peer 5", "Ada", "", 5.0, 0.0, 1, 0, 0.0, 1.0, 1.0, "run", time=5.0),
            Contribution("peer 4", "Bob", "", 4.0, 0.0, 1, 0, 0.0, 1.0, 1.0, "run", time=5.0),
        ]
        assert (reader.counted("another"), reader.contributions("another")) == (None, [])


def test_who_only_reads_does_not_load_what_writes() -> None:
    """Where pandas is installed, sqlite-utils loads it: that takes a quarter of a second."""
    code = "import sys, swarmcli.journal; sys.exit('sqlite_utils' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
