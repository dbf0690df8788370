from __future__ import annotations

import shutil
import sqlite3
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from click.testing import CliRunner
from sqlite_utils.cli import cli

from swarmcli.errors import JournalError
from swarmcli.events import EpochLoss, EpochReported, Events
from swarmcli.journal import Journal, JournalReader
from swarmcli.journal.tables import CONVERTED

from .samples import ALICE, BOB, RUN, START, Clock, averaging_round, epoch, seen


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "trainer-1" / "journal.sqlite"


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def journal(path: Path, clock: Clock) -> Iterator[Journal]:
    with Journal(path, run=RUN, clock=clock) as journal:
        yield journal


def test_what_is_emitted_can_be_read_while_the_run_goes_on(journal: Journal, clock: Clock) -> None:
    events = Events()
    journal.listen(events)
    events.emit(seen())
    clock.now += 8
    events.emit(averaging_round(0))
    events.emit(epoch(1, loss=3.5))
    events.emit(EpochReported(BOB, 1, 3.0, 600, 12.5))
    events.emit(EpochLoss(1, 3.0, 1))
    assert journal.flush(30)
    with journal.read() as reader:
        (run,) = reader.runs()
        assert (run.run_id, run.role, run.peer, run.finished) == ("stdlib-lm", "trainer", ALICE, None)
        assert [(row.epoch, row.loss, row.time) for row in reader.epochs("stdlib-lm")] == [(1, 3.5, START + 8)]
        assert reader.rounds("stdlib-lm")[0].contributors == (ALICE, BOB)
        assert [peer.name for peer in reader.peers("stdlib-lm")] == ["bob"]
        assert [row.loss for row in reader.chart("stdlib-lm")] == [3.0]
        assert [event.kind for event in reader.events("stdlib-lm")] == ["joined", "left out"]


def test_other_programs_can_read_the_tables(journal: Journal, path: Path) -> None:
    journal.record(epoch(1))
    journal.flush(30)
    with closing(sqlite3.connect(path)) as other:
        tables = {name for (name,) in other.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
        assert {"runs", "epochs", "rounds", "peers", "events", "reports", "evaluations"} <= tables
        assert other.execute("PRAGMA journal_mode").fetchone() == ("wal",)
        assert other.execute("SELECT own_samples FROM epochs").fetchone() == (400,)
    asked = CliRunner().invoke(cli, ["query", str(path), "SELECT own_samples FROM epochs", "--csv"])
    assert asked.output.split() == ["own_samples", "400"]


def test_a_journal_that_is_taken_away_is_begun_anew(journal: Journal, path: Path) -> None:
    journal.record(epoch(1))
    journal.flush(30)
    shutil.rmtree(path.parent)
    journal.record(epoch(2))
    assert not journal.flush(30)
    path.parent.mkdir()
    assert journal.flush(30)
    with journal.read() as reader:
        assert len(reader.runs()) == 1
        assert [row.epoch for row in reader.epochs("stdlib-lm")] == [2]


def test_closing_writes_the_end_hears_no_more_and_leaves_no_thread_and_no_file(path: Path, clock: Clock) -> None:
    before = set(threading.enumerate())  # one of an earlier test may be about to end
    events = Events()
    with Journal(path, run=RUN, clock=clock) as journal:
        journal.listen(events)
        clock.now += 60
    journal.close()
    events.emit(epoch(1))
    assert journal.statistics().waiting == 0 and set(threading.enumerate()) <= before
    assert [each.name for each in path.parent.iterdir()] == ["journal.sqlite"]
    with pytest.raises(ZeroDivisionError), Journal(path, run=RUN, clock=clock):
        raise ZeroDivisionError
    with JournalReader(path) as reader:
        first, second = reader.runs()
    assert (first.started, first.finished, first.outcome) == (START, START + 60, "done")
    assert second.outcome == "ended by ZeroDivisionError"


def test_what_is_no_journal_is_refused_with_what_to_do_and_left_alone_and_an_empty_file_becomes_one(
    tmp_path: Path, clock: Clock
) -> None:
    (tmp_path / "diary").write_bytes(b"my diary, which is no database at all" * 40)
    for name, statement in (
        ("foreign", "CREATE TABLE bookmarks (url TEXT)"),
        ("newer", "PRAGMA user_version=99"),
        ("older", f"PRAGMA user_version={min(CONVERTED) - 1}"),
    ):
        if name != "foreign":
            Journal(tmp_path / name, run=RUN, clock=clock).close()
        with closing(sqlite3.connect(tmp_path / name)) as connection:
            connection.execute(statement)
    before = {file: file.read_bytes() for file in tmp_path.iterdir()}
    for name, words in (
        (".", r"is a directory; name a file in it, for example .*/journal\.sqlite"),
        ("diary/journal.sqlite", "is no directory"),
        ("diary", r"not a journal or is damaged .*move it away"),
        ("foreign", "database of another program; name another file"),
        ("newer", r"written by a newer swarm .*update swarm"),
        ("older", r"written by an older swarm .*move it away"),
    ):
        with pytest.raises(JournalError, match=words):
            Journal(tmp_path / name, run=RUN, clock=clock)
    assert {file: file.read_bytes() for file in tmp_path.iterdir()} == before
    (tmp_path / "empty").touch()
    Journal(tmp_path / "empty", run=RUN, clock=clock).close()
    with JournalReader(tmp_path / "empty") as reader:
        assert [run.run_id for run in reader.runs()] == [RUN.run_id]


@pytest.mark.parametrize("torn", ["zeros", "pages of zeros"])
def test_a_torn_journal_is_set_aside_and_a_new_one_begun(torn: str, path: Path, clock: Clock) -> None:
    """A peer that a manager starts after a power cut comes back by itself."""
    with Journal(path, run=RUN, clock=clock) as journal:
        for number in range(200):
            journal.record(epoch(number))
    whole = path.read_bytes()
    path.write_bytes((whole[: 4096 * (torn != "zeros")]).ljust(len(whole), b"\0"))
    with Journal(path, run=RUN, clock=clock) as journal:
        journal.record(epoch(1000))
        assert journal.flush(10)
        with journal.read() as reader:
            assert [each.epoch for each in reader.epochs(RUN.run_id)] == [1000]
    assert path.with_name("journal.sqlite.damaged").stat().st_size == len(whole)
