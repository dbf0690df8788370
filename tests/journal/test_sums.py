"""What is added up as rows come, against the same asked of all rows; that nothing reads them all."""

from __future__ import annotations

import random
import sqlite3
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from swarmcli.events import EpochLoss, EpochReported
from swarmcli.journal import Journal, JournalReader
from swarmcli.journal.failures import MOST_CAUSES, cause_of

from .samples import ALICE, BOB, CAROL, RUN, Clock, averaging_round, epoch

R = RUN.run_id


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "journal.sqlite"


@pytest.fixture
def busy(path: Path) -> Iterator[JournalReader]:
    """A journal of two starts in which epochs come twice and reports are replaced."""
    draw = random.Random(5)
    for _ in range(2):
        with Journal(path, run=RUN, clock=Clock()) as journal:
            for number in range(300):
                which = draw.randrange(60)
                journal.record(epoch(which, None if which % 7 else 2.0, samples=draw.choice((0, 1000))))
                journal.record(averaging_round(number, draw.choice(("committed", "failed", "undecided")), "why"))
                journal.record(EpochReported(draw.choice((ALICE, BOB, CAROL)), which, 2.5, 0, 10.0))
                journal.record(EpochLoss(which, draw.choice((1.0, 2.5, float("nan"))), 3))
    with JournalReader(path) as reader:
        yield reader


def asked(reader: JournalReader, sql: str) -> list[tuple[object, ...]]:
    return [tuple(row) for row in reader._connection.execute(sql).fetchall()]


def test_sums_are_those_of_the_rows(busy: JournalReader) -> None:
    totals = busy.totals(R)
    [(epochs, samples)] = asked(busy, "SELECT count(DISTINCT epoch), sum(own_samples) FROM epochs")
    [(good, bad, sent)] = asked(
        busy, "SELECT sum(outcome = 'committed'), sum(outcome = 'failed'), sum(bytes_sent) FROM rounds"
    )
    assert (totals.epochs, totals.own_samples) == (epochs, samples)
    assert (totals.rounds_committed, totals.rounds_failed, totals.bytes_sent) == (good, bad, sent)
    assert totals.rounds_undecided == 600 - totals.rounds_committed - totals.rounds_failed
    best = asked(
        busy,
        "SELECT coalesce(max(CASE WHEN samples > 0 THEN id END), max(id)) FROM epochs GROUP BY epoch ORDER BY epoch",
    )
    assert [row.id for row in busy.epochs(R)] == [number for (number,) in best]


def test_no_question_of_an_open_page_reads_a_whole_list(busy: JournalReader) -> None:
    """Told by SQLite: every table is entered by a key, or walked from its end with a limit."""
    plans: list[tuple[str, str]] = []
    query = busy._query

    def explained(sql: str, parameters: object = ()) -> list[sqlite3.Row]:
        steps = busy._connection.execute("EXPLAIN QUERY PLAN " + sql, parameters).fetchall()  # type: ignore[arg-type]
        plans.extend((sql, step["detail"]) for step in steps)
        return query(sql, parameters)  # type: ignore[arg-type]

    busy._query = explained  # type: ignore[method-assign,assignment]
    for ask in (
        lambda: busy.totals(R), lambda: busy.chart(R, limit=20), lambda: busy.chart(R, after=55),
        lambda: busy.epochs(R, limit=5), lambda: busy.rounds(R, limit=100), lambda: busy.rounds(R, after=590),
        lambda: busy.events(R, limit=200, details=False), lambda: busy.events(R, after=3, details=False),
        lambda: busy.departed(R, 5.0), lambda: busy.peers(R, BOB), lambda: busy.reports_of(R, BOB),
        lambda: busy.failures(R), lambda: busy.moments(R), lambda: busy.moments(R, begin=3, by="epoch"),
    ):  # fmt: skip
        ask()
    for sql, step in plans:
        read_whole = step.startswith("SCAN") and "SELECT id FROM runs" not in sql
        assert not read_whole or "events_told" in step or "rounds_troubled" in step, (sql, step)
        assert "TEMP B-TREE" not in step or "GROUP BY" in sql or "peer = ?" in sql, (sql, step)


def test_a_long_chart_reads_as_many_rows_as_it_shows(path: Path) -> None:
    with Journal(path, run=RUN, clock=Clock()) as journal:
        for number in range(3000):
            journal.record(epoch(number))
    with JournalReader(path) as reader:
        asked_for: list[int] = []
        real = reader._charted
        reader._charted = lambda *args: asked_for.append(args[3]) or real(*args)  # type: ignore[method-assign,func-returns-value]
        rows = reader.chart(R, limit=60)
    assert len(rows) == 60 and rows[-1].epoch == 2999 and asked_for == [1] * 60


def test_failures_are_counted_by_reason_without_what_differs(path: Path) -> None:
    with Journal(path, run=RUN, clock=Clock()) as journal:
        for number, outcome, reason in (
            (1, "failed", f"{BOB} sent 17 parts at tcp://203.0.113.7:31330/{BOB} in 4.0 s"),
            (2, "failed", f"{CAROL} sent 3 parts at tcp://198.51.100.2:1 in 12.5 s"),
            (3, "undecided", ""),
            (4, "committed", ""),
        ):
            journal.record(averaging_round(number, outcome, reason))  # type: ignore[arg-type]
    assert cause_of("the connection was lost", [ALICE]) == "the connection was lost", "a reason keeps its words"
    with JournalReader(path) as reader:
        found = [(each.what, each.reason, each.count) for each in reader.failures(R)]
    assert found == [
        ("left out", "no part arrived for … s", 4),
        ("round", "… sent … parts at … in … s", 2),
        ("round", "its outcome could not be learned", 1),
    ]


def test_reasons_that_strangers_make_up_do_not_fill_the_list(path: Path) -> None:
    with Journal(path, run=RUN, clock=Clock()) as journal:
        for number in range(MOST_CAUSES + 50):
            made_up = "x" * (number // 20) + "y" * (number % 20)
            journal.record(replace(averaging_round(number, "failed", f"word {made_up}"), left_out={}))
    with JournalReader(path) as reader:
        found = reader.failures(R)
    assert len(found) == MOST_CAUSES


def test_a_journal_from_before_a_column_was_added_is_read_and_written_on(path: Path) -> None:
    with Journal(path, run=RUN, clock=Clock()) as journal:
        journal.record(epoch(1))
    with sqlite3.connect(path) as connection:
        for column in ("gradient_norm", "update_norm"):
            connection.execute(f"ALTER TABLE epochs DROP COLUMN {column}")
    connection.close()
    with JournalReader(path) as reader:
        (before,) = reader.epochs(R)
        assert (before.epoch, before.gradient_norm, before.update_norm) == (1, None, None)
        assert [row.update_norm for row in reader.every(R, "epochs")] == [None]
    with Journal(path, run=RUN, clock=Clock()) as journal:
        journal.record(replace(epoch(2), gradient_norm=1.5, update_norm=0.25))
    with JournalReader(path) as reader:
        assert [(row.gradient_norm, row.update_norm) for row in reader.epochs(R)] == [(None, None), (1.5, 0.25)]
