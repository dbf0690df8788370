from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from typing import Any

import pytest
from sqlite_utils import Database

from swarmcli.events import RunObserved
from swarmcli.journal import moments
from swarmcli.journal.moments import Moment, add_moments, read_moments
from swarmcli.journal.options import JournalOptions

from .samples import START


class Table:
    """The table alone, and how many rows were read of it."""

    def __init__(self) -> None:
        self.db = Database(memory=True)
        self.db.conn.row_factory = sqlite3.Row
        moments.make(self.db)

    def observe(self, seconds: float, epoch: int, alive: int = 3, loss: float | None = 2.0) -> None:
        event = RunObserved(epoch, alive, alive - 1, 10.0 * alive, loss, time=START + seconds)
        add_moments(self.db, "r", [event])

    def query(self, sql: str, parameters: Sequence[Any]) -> list[sqlite3.Row]:
        return self.db.execute(sql, parameters).fetchall()

    def read(self, begin: float | None = None, points: int = 300) -> list[Moment]:
        return read_moments(self.query, "r", begin=begin, by="time", points=points)


def test_every_moment_is_there_as_long_as_there_are_few() -> None:
    table = Table()
    for number in range(20):
        table.observe(number * 4.0, number // 5, alive=3 + number % 2, loss=None if number < 5 else 2.0)
    read = table.read()
    assert [each.time for each in read] == [START + number * 4.0 for number in range(20)]
    assert [(each.epoch, each.loss) for each in read][4:6] == [(0, None), (1, 2.0)]
    assert (read[1].alive, read[1].trainers, read[1].samples_per_second, read[1].seconds) == (4.0, 3.0, 40.0, 4.0)


@pytest.mark.parametrize("points", [1, 7, 60])
def test_points_are_means_and_no_more_than_wanted(points: int) -> None:
    table = Table()
    for number in range(1000):
        table.observe(number * 4.0, number, alive=2 + 4 * (number % 2))
    read = table.read(points=points)
    assert points / 2 <= len(read) <= points and read[-1].epoch == 999
    assert all(each.alive == pytest.approx(4.0, abs=0.5) for each in read)


def test_a_span_begins_at_a_time_or_at_an_epoch() -> None:
    table = Table()
    for number in range(1000):
        table.observe(number * 4.0, number // 10)
    assert [each.time for each in table.read(begin=START + 3600.0)][::99] == [START + 3600.0, START + 3996.0]
    by_epoch = read_moments(table.query, "r", begin=90, by="epoch", points=300)
    assert (by_epoch[0].epoch, by_epoch[-1].epoch, len(by_epoch)) == (90, 99, 100)
    assert table.read(begin=START + 1e6) == [] == read_moments(table.query, "q", begin=0, by="time", points=9)


def test_what_is_long_past_is_known_less_exactly_and_the_table_stays_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(moments, "JOURNAL", JournalOptions(moments=50))
    table = Table()
    for number in range(2000):
        table.observe(number * 4.0, number)
    (rows,) = table.db.execute("SELECT count(*) FROM moments").fetchone()
    assert rows <= 51 * 5  # of nearly as old as the run: one of 256 s
    read = table.read()
    assert (read[0].time, read[0].seconds, read[-1].epoch) == (START, 256.0, 1999)
    assert sum(row["count"] for row in table.query("SELECT count FROM moments", ())) == 2000
    lately = table.read(begin=START + 1990 * 4.0)
    assert [each.seconds for each in lately] == [4.0] * 10
    (first, *_) = read_moments(table.query, "r", begin=1000, by="epoch", points=300)
    assert first.epoch >= 1000


def test_a_moment_that_is_no_number_spoils_nothing() -> None:
    table = Table()
    table.observe(0.0, 1)
    for odd in (float("nan"), float("inf")):
        add_moments(table.db, "r", [RunObserved(1, 3, 2, odd, odd, time=START)])
    assert table.read() == [Moment(START, 4.0, 1, 3.0, 2.0, 10.0, 2.0)]
