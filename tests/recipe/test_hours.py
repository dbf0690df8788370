from __future__ import annotations

from datetime import datetime
from zoneinfo import ZoneInfo

from hypothesis import given, settings
from hypothesis import strategies as st

from swarmcli.recipe.hours import DAY, DAYS, parse_hours

BERLIN = ZoneInfo("Europe/Berlin")
ZONES = [BERLIN, *map(ZoneInfo, ("UTC", "America/New_York", "Asia/Kathmandu", "Australia/Lord_Howe"))]


def at(text: str, zone: ZoneInfo = BERLIN) -> float:
    return datetime.fromisoformat(text).replace(tzinfo=zone).timestamp()


def test_nights_go_over_midnight_and_over_the_week() -> None:
    nights = parse_hours("22:00-08:00, sat-sun 00:00-24:00")
    inside = ["2026-11-23 22:00", "2026-11-24 07:59", "2026-11-28 12:00", "2026-11-30 07:59"]  # a Monday, the next one
    outside = ["2026-11-23 21:59", "2026-11-24 08:00", "2026-11-27 12:00", "2026-11-30 08:00"]
    assert all(nights.hold(at(text), BERLIN) for text in inside)
    assert not any(nights.hold(at(text), BERLIN) for text in outside)
    assert nights.next_change(at("2026-11-23 12:00"), BERLIN) == at("2026-11-23 22:00")
    assert nights.next_change(at("2026-11-27 23:00"), BERLIN) == at("2026-11-30 08:00")
    assert parse_hours("sun 22-6").hold(at("2026-11-30 05:59"), BERLIN)  # Monday morning


def test_days_may_stand_alone_and_hours_without_minutes() -> None:
    assert parse_hours("Sat – Sun") == parse_hours("weekends 00:00-24:00") == parse_hours("saturday, sunday")
    assert parse_hours("weekdays 18-23") == parse_hours("mon-fri 18:00-23:00")
    assert parse_hours("fri-mon 1-2") == parse_hours("fri 1-2, sat 1-2, sun 1-2, mon 1-2")
    assert parse_hours("00:00-24:00").next_change(0.0) is None


def test_the_night_in_which_clocks_go_back_has_an_hour_more() -> None:
    hours = parse_hours("02:00-03:00")
    began, ended = at("2026-10-25 02:00"), at("2026-10-25 03:00")
    assert ended - began == 2 * 3600
    assert hours.next_change(began, BERLIN) == ended
    spring = at("2026-03-29 01:30")  # 02:00 does not come: the next one is a day later
    assert hours.next_change(spring, BERLIN) == at("2026-03-30 02:00")


MINUTES = st.integers(0, DAY - 1)


@settings(max_examples=15, deadline=None)
@given(
    st.sampled_from(DAYS),
    st.sampled_from(DAYS),
    MINUTES,
    MINUTES,
    st.sampled_from(ZONES),
    st.datetimes(datetime(2026, 1, 1), datetime(2027, 12, 31)),
)
def test_nothing_changes_before_the_next_change_and_something_does_then(
    first: str, last: str, begin: int, end: int, zone: ZoneInfo, now: datetime
) -> None:
    hours = parse_hours(
        f"{first}-{last} {begin // 60}:{begin % 60:02}-{(end + 1) // 60}:{(end + 1) % 60:02}"
        if begin != end + 1
        else first
    )
    moment = now.replace(tzinfo=zone).timestamp()
    change = hours.next_change(moment, zone)
    if change is None:
        assert len(set(hours.week)) == 1
        return
    before = hours.hold(moment, zone)
    assert hours.hold(change, zone) != before == hours.hold(change - 1, zone)
    for step in range(1, 20):
        assert hours.hold(moment + (change - 1 - moment) * step / 20, zone) == before
