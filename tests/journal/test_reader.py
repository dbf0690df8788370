from __future__ import annotations

import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from swarmcli.errors import JournalError
from swarmcli.events import Booked, BookHead, EpochLoss, Evaluated
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


def test_a_step_tells_more_of_an_epoch_than_a_later_download_of_it(journal: Journal, reader: JournalReader) -> None:
    for event in (epoch(1, 4.0), epoch(1, 3.0), replace(epoch(1, None, samples=0), peers=0)):
        journal.record(event)
    journal.record(replace(epoch(2, None, samples=0), peers=0))
    journal.flush(30)
    assert [(row.samples, row.loss) for row in reader.epochs("stdlib-lm")] == [(1000, 3.0), (0, None)]


def test_of_an_epoch_that_was_evaluated_twice_the_last_loss_counts(journal: Journal, reader: JournalReader) -> None:
    for epoch_number, loss in ((10, 4.0), (20, 3.5), (20, 3.0)):
        journal.record(Evaluated(epoch_number, loss, 256))
    journal.flush(30)
    assert [(row.epoch, row.loss, row.samples) for row in reader.evaluations("stdlib-lm")] == [
        (10, 4.0, 256),
        (20, 3.0, 256),
    ]
    assert [row.epoch for row in reader.evaluations("stdlib-lm", after=10)] == [20]
    assert "evaluated epoch 10: loss 4.0000" in reader.events("stdlib-lm")[0].text


def test_metrics_of_an_evaluation_come_back(journal: Journal, reader: JournalReader) -> None:
    journal.record(Evaluated(10, 4.0, 256, {"accuracy": 0.5, "f1": 0.25}))
    journal.flush(30)
    assert reader.evaluations("stdlib-lm")[0].metrics == {"accuracy": 0.5, "f1": 0.25}
    assert "loss 4.0000, accuracy 0.5000, f1 0.2500 on 256" in reader.events("stdlib-lm")[0].text


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


def test_details_can_be_left_out_of_the_events(journal: Journal, reader: JournalReader) -> None:
    from swarmcli.events import PeerConnected

    journal.record(PeerConnected(BOB, "tcp://h:1"))
    journal.record(seen())
    journal.flush(30)
    assert len(reader.events("stdlib-lm")) == 2
    assert [event.kind for event in reader.events("stdlib-lm", details=False)] == ["joined"]


def test_a_chart_shows_the_loss_of_the_swarm_where_it_is_known(journal: Journal, reader: JournalReader) -> None:
    for told in (EpochLoss(1, 2.5, 2), EpochLoss(2, 3.0, 1), EpochLoss(3, float("nan"), 5)):
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


def test_a_chart_shows_no_epoch_that_only_others_claim_to_have_reached(journal: Journal, reader: JournalReader) -> None:
    journal.record(epoch(3))
    for number in (3, 4, 1_000_000):
        journal.record(EpochLoss(number, 0.5, 1))
    journal.flush(30)
    assert [(row.epoch, row.loss) for row in reader.chart("stdlib-lm")] == [(3, 0.5)]
    assert [row.epoch for row in reader.every("stdlib-lm", "epochs")] == [3]


def test_a_later_word_on_the_loss_of_an_epoch_replaces_the_earlier(journal: Journal, reader: JournalReader) -> None:
    for event in (EpochLoss(1, 4.0, 1), EpochLoss(1, 3.0, 2), epoch(1)):
        journal.record(event)
    journal.flush(30)
    assert [row.loss for row in reader.chart("stdlib-lm")] == [3.0]


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
    path = tmp_path / "journal.sqlite"
    for now, name in ((100.0, "bob"), (200.0, "robert")):
        with Journal(path, run=RUN, clock=Clock(now)) as journal:
            journal.record(seen(name=name))
    with JournalReader(path) as reader:
        (peer,) = reader.peers("stdlib-lm")
    assert (peer.name, peer.first_seen, peer.time) == ("robert", 100.0, 200.0)


def test_a_known_peer_keeps_the_moment_it_was_first_seen(tmp_path: Path) -> None:
    clock = Clock(100.0)
    with Journal(tmp_path / "journal.sqlite", run=RUN, clock=clock) as journal:
        journal.record(seen())
        journal.record(seen(gone="left"))
        clock.now = 200.0
        journal.record(seen())
        journal.flush(30)
        with journal.read() as reader:
            assert [(peer.first_seen, peer.gone) for peer in reader.peers("stdlib-lm")] == [(100.0, "")]


def test_the_highest_epoch_of_a_peer_outlasts_its_leaving_and_a_new_start(tmp_path: Path) -> None:
    path = tmp_path / "journal.sqlite"
    for now, epochs in ((100.0, (399, 400, 0)), (200.0, (0,))):
        with Journal(path, run=RUN, clock=Clock(now)) as journal:
            for number in epochs:
                journal.record(seen(epoch=number, gone="left" if number == 0 else ""))
    with JournalReader(path) as reader:
        (peer,) = reader.peers("stdlib-lm")
    assert (peer.epoch, peer.gone, peer.time) == (400, "left", 200.0)


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


@pytest.mark.parametrize("content", [b"", b"not a database" * 100])
def test_what_is_no_journal_is_named(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "journal.sqlite"
    path.write_bytes(content)
    with pytest.raises(JournalError, match=r"journal\.sqlite"):
        JournalReader(path)


def test_a_journal_that_is_not_there_is_named_and_not_made(tmp_path: Path) -> None:
    with pytest.raises(JournalError, match="does not exist"):
        JournalReader(tmp_path / "journal.sqlite")
    assert list(tmp_path.iterdir()) == []


def test_a_journal_damaged_in_the_middle_is_an_error_with_its_name(tmp_path: Path) -> None:
    path = tmp_path / "journal.sqlite"
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
            journal.record(Booked("run", f"peer {number}", number, number, rounds=1, first=1.0, last=1.0, name="Ada"))
        journal.record(Booked("run", "peer 3", 50, 7.5, rounds=2, uptime=0.5, first=2.0, last=2.0))
        journal.record(Booked("run", "peer 4", name="Bob"))
        journal.record(BookHead("run", 9, 900, 1))
    with JournalReader(path) as reader:
        head, lines = reader.book("run")
        assert head == BookHead("run", 9, 900, 1, time=5.0)
        assert lines == [
            Booked("run", "peer 3", 53.0, 10.5, 0.0, 3, 0, 0.5, 1.0, 2.0, "Ada", time=5.0),
            Booked("run", "peer 5", 5.0, 5.0, 0.0, 1, 0, 0.0, 1.0, 1.0, "Ada", time=5.0),
            Booked("run", "peer 4", 4.0, 4.0, 0.0, 1, 0, 0.0, 1.0, 1.0, "Bob", time=5.0),
        ]
        assert reader.book("another") == (None, [])


def test_who_only_reads_does_not_load_what_writes() -> None:
    """Where pandas is installed, sqlite-utils loads it: that takes a quarter of a second."""
    code = "import sys, swarmcli.journal; sys.exit('sqlite_utils' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
