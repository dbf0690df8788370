from __future__ import annotations

import math
import sqlite3
from contextlib import closing

from hypothesis import given
from hypothesis import strategies as st

from swarmcli.events import EpochAdvanced, EpochReported, Evaluated, Event, PeerSeen, RoundFinished
from swarmcli.journal import Line, RunRecord
from swarmcli.journal.options import JOURNAL
from swarmcli.journal.tables import MAX_INTEGER, from_row, to_row

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=60)
NUMBER = st.floats(allow_nan=False, allow_infinity=False)
MAYBE = st.none() | NUMBER
COUNT = st.integers(0, MAX_INTEGER)
NUMBERED = {"time": NUMBER, "id": COUNT}
VALUES = st.one_of(
    st.builds(RunRecord, TEXT, TEXT, TEXT, TEXT, TEXT, COUNT, NUMBER, NUMBER, st.none() | NUMBER, TEXT, COUNT),
    st.builds(EpochAdvanced, COUNT, TEXT, COUNT, COUNT, COUNT, MAYBE, NUMBER, NUMBER, MAYBE, MAYBE, **NUMBERED),
    st.builds(
        RoundFinished,
        round_id=TEXT,
        purpose=TEXT,
        epoch=st.integers(-1, 99),
        outcome=TEXT,
        reason=TEXT,
        leader=TEXT,
        members=st.lists(TEXT, max_size=3).map(tuple),
        contributors=st.lists(TEXT, max_size=3).map(tuple),
        left_out=st.dictionaries(TEXT, TEXT, max_size=3),
        bytes_sent=COUNT,
        bytes_received=COUNT,
        seconds=st.dictionaries(TEXT, NUMBER, max_size=3),
        **NUMBERED,
    ),
    st.builds(PeerSeen, TEXT, TEXT, TEXT, COUNT, COUNT, NUMBER, st.booleans(), TEXT, time=NUMBER, first_seen=NUMBER),
    st.builds(Line, st.sampled_from(["info", "warning"]), TEXT, TEXT, TEXT, **NUMBERED),
    st.builds(Evaluated, COUNT, NUMBER, COUNT, **NUMBERED),
    st.builds(EpochReported, TEXT, COUNT, NUMBER, COUNT, NUMBER, time=NUMBER),
)


@given(VALUES)
def test_sqlite_takes_every_row_and_what_was_written_comes_back_as_it_was(value: RunRecord | Event) -> None:
    row = to_row(value)
    with closing(sqlite3.connect(":memory:")) as connection:
        stored = connection.execute(f"SELECT {', '.join('?' * len(row))}", tuple(row.values())).fetchone()
    assert stored == tuple(row.values()) and from_row(type(value), row) == value


def test_what_a_peer_wrote_cannot_make_a_row_that_cannot_be_written() -> None:
    hostile = Line("info", "x", "half of a pair: \ud800", "y" * (JOURNAL.max_text + 5), time=math.nan)
    row = to_row(hostile)
    assert row["time"] is None and row["peer"] == "half of a pair: ?" and len(row["text"]) == JOURNAL.max_text
    assert to_row(EpochReported("p", 2**80, math.inf, -(2**80), 1.0))["epoch"] == MAX_INTEGER
    odd = EpochAdvanced(1, "ab", 2, 1, 2, math.nan, math.inf, 0.5, time=math.nan)
    epoch = from_row(EpochAdvanced, to_row(odd))
    assert (epoch.time, epoch.loss, epoch.seconds) == (0.0, None, 0.0)
