from __future__ import annotations

from datetime import datetime
from zoneinfo import ZoneInfo

import pytest

from swarmcli.errors import UsageError
from swarmcli.machine.moments import duration, moment

BERLIN = ZoneInfo("Europe/Berlin")


def test_durations() -> None:
    told = {"2h": 7200, "90 min": 5400, "1h30m": 5400, "1 hour 30 minutes": 5400, "1,5 h": 5400, "2 Days": 172800}
    assert {text: duration(text) for text in told} == told
    for text in ("", "2", "h", "2 parsecs", "-1h", "0 min", "18:00", "2h x", "1h,", "9999999 days"):
        with pytest.raises(UsageError, match="write it like 45 min, 2h or 1h30m"):
            duration(text)


def at(text: str) -> float:
    return datetime.fromisoformat(text).replace(tzinfo=BERLIN).timestamp()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("18:00", "2026-11-25 18:00"),
        ("9:30", "2026-11-26 09:30"),  # over for today
        ("12:00", "2026-11-26 12:00"),  # this very moment is over too
        ("6pm", "2026-11-25 18:00"),
        ("6:30 PM", "2026-11-25 18:30"),
        ("12 am", "2026-11-26 00:00"),
        ("today 13:00", "2026-11-25 13:00"),
        ("tomorrow 8:00", "2026-11-26 08:00"),
        ("tomorrow 8 am", "2026-11-26 08:00"),
        ("wed 13:00", "2026-11-25 13:00"),
        ("wed 11:00", "2026-12-02 11:00"),
        ("Monday 08:00", "2026-11-30 08:00"),
        ("2026-12-24 18:00", "2026-12-24 18:00"),
        ("2026-12-24T17:00:00+00:00", "2026-12-24 18:00"),
    ],
)
def test_moments(text: str, expected: str) -> None:
    assert moment(text, at("2026-11-25 12:00"), BERLIN) == at(expected)  # a Wednesday


def test_what_is_no_moment_to_come() -> None:
    past = ("today 9:00", "2026-11-24 18:00")
    for text in ("", "18", "25:00", "13pm", "noon", *past, "2026-12-24", "2036-01-01 18:00", "moonday"):
        with pytest.raises(UsageError, match="write it like 18:00"):
            moment(text, at("2026-11-25 12:00"), BERLIN)


def test_the_nights_in_which_clocks_are_set() -> None:
    assert moment("8:00", at("2026-03-28 22:00"), BERLIN) - at("2026-03-28 22:00") == 9 * 3600
    assert moment("8:00", at("2026-10-24 22:00"), BERLIN) - at("2026-10-24 22:00") == 11 * 3600
    first, second = at("2026-10-25 02:30"), at("2026-10-25 02:30") + 3600
    assert moment("2:30", first - 60, BERLIN) == first
    assert moment("2:30", first + 60, BERLIN) == second  # the clock shows it twice
