from __future__ import annotations

import sqlite3
import threading
from collections.abc import Iterator, Sequence

import pytest

from swarmcli.events import Event
from swarmcli.journal import Line
from swarmcli.journal.options import JOURNAL
from swarmcli.journal.writer import Writer

from .samples import Clock


class Disk:
    """A store in memory that can be full."""

    def __init__(self) -> None:
        self.full = False
        self.rows: list[str] = []
        self.batches: list[int] = []
        self.outcome: str | None = None
        self.closed = False

    def write(self, batch: Sequence[Event], now: float, outcome: str | None = None) -> None:
        if self.full:
            raise sqlite3.OperationalError("database or disk is full")
        self.rows += [record.text for record in batch if isinstance(record, Line)]
        self.batches += [len(batch)] if batch else []  # without one it is a sign of life
        self.outcome = outcome

    def tidy(self) -> bool:
        return True

    def close(self) -> None:
        self.closed = True


class Bench:
    """A writer that writes only when it is told to."""

    def __init__(self, capacity: int = 100) -> None:
        self.disk = Disk()
        self.clock = Clock()
        self.notices: list[tuple[str, str]] = []
        self.writer = Writer(
            self.disk,  # type: ignore[arg-type]
            self.clock,
            lambda level, text: self.notices.append((level, text)),
            interval=3600.0,
            capacity=capacity,
        )

    def put(self, *texts: str) -> None:
        for text in texts:
            self.writer.put(Line("info", "test", "", text, time=self.clock()))


@pytest.fixture
def bench() -> Iterator[Bench]:
    bench = Bench()
    yield bench
    bench.writer.close("done", timeout=10)


def test_rows_are_written_by_themselves_within_a_second() -> None:
    assert JOURNAL.interval < 1.0
    written = threading.Event()

    class Waking(Disk):
        def write(self, batch: Sequence[Event], now: float, outcome: str | None = None) -> None:
            super().write(batch, now, outcome)
            if self.rows:
                written.set()

    disk = Waking()
    writer = Writer(disk, Clock(), lambda level, text: None, interval=0.01)  # type: ignore[arg-type]
    writer.put(Line("info", "test", "", "hello"))
    assert written.wait(30)
    writer.close("done")
    assert disk.rows == ["hello"]


def test_a_full_disk_gives_one_warning_and_loses_nothing_that_fits_in_memory(bench: Bench) -> None:
    bench.disk.full = True
    for text in ("one", "two", "three"):
        bench.put(text)
        assert not bench.writer.flush(30)
    (warning,) = bench.notices
    assert warning[0] == "warning" and "cannot be written (database or disk is full); training goes on" in warning[1]
    assert bench.writer.statistics().failing == "database or disk is full"
    bench.disk.full = False
    assert bench.writer.flush(30)
    assert bench.disk.rows == ["one", "two", "three"]
    assert bench.notices[1:] == [("info", "the journal is written again; no row was lost")]


def test_beyond_its_memory_the_oldest_rows_give_way_and_are_counted() -> None:
    bench = Bench(capacity=3)
    bench.disk.full = True
    bench.put("one", "two")
    bench.writer.flush(30)
    bench.put("three", "four", "five")
    assert bench.writer.statistics().waiting == 3
    bench.disk.full = False
    bench.writer.flush(30)
    assert bench.disk.rows == ["three", "four", "five"]
    assert bench.notices[-1] == ("warning", "the journal is written again; 2 rows were lost")
    bench.writer.close("done")


def test_rows_that_came_while_a_batch_failed_stay_behind_it() -> None:
    bench = Bench(capacity=3)
    entered = threading.Event()
    released = threading.Event()
    fails = bench.disk.write

    def slow_failure(batch: Sequence[Event], now: float, outcome: str | None = None) -> None:
        entered.set()
        released.wait(30)
        fails(batch, now, outcome)

    bench.disk.full = True
    bench.disk.write = slow_failure  # type: ignore[method-assign]
    bench.put("one", "two")
    flushing = threading.Thread(target=bench.writer.flush, args=(30,))
    flushing.start()
    assert entered.wait(30)
    bench.put("three", "four")
    released.set()
    flushing.join(30)
    bench.disk.full = False
    bench.writer.flush(30)
    assert bench.disk.rows == ["two", "three", "four"]
    bench.writer.close("done")


def test_a_disk_that_is_full_every_other_second_is_reported_once(bench: Bench) -> None:
    for _ in range(5):
        for full in (True, False):
            bench.disk.full = full
            bench.put("row")
            bench.writer.flush(30)
    assert [level for level, _ in bench.notices].count("warning") == 1
    bench.clock.now += JOURNAL.warn_again
    bench.disk.full = True
    bench.writer.flush(30)
    assert [level for level, _ in bench.notices].count("warning") == 2
    bench.disk.full = False


def test_a_large_backlog_is_written_in_several_transactions() -> None:
    bench = Bench(capacity=10_000)
    bench.put(*map(str, range(2 * JOURNAL.max_batch + 5)))
    bench.writer.flush(60)
    assert bench.disk.batches == [JOURNAL.max_batch, JOURNAL.max_batch, 5]
    assert bench.disk.rows == list(map(str, range(2 * JOURNAL.max_batch + 5)))
    bench.writer.close("done")


def test_closing_writes_the_rest_and_how_it_ended_and_can_be_repeated(bench: Bench) -> None:
    bench.put("last")
    assert bench.writer.close("done")
    assert (bench.disk.rows, bench.disk.outcome, bench.disk.closed) == (["last"], "done", True)
    assert bench.writer.close("again")
    assert bench.disk.outcome == "done"
    assert bench.writer.flush(30), "all is written, and nobody is left to wait for"
    full = Bench()
    full.disk.full = True
    full.put("last")
    assert not full.writer.close("done") and full.writer.statistics().waiting == 1
