"""What a volunteer writes once for all runs: who it is, how much it lends, and when."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swarmcli.errors import RecipeError
from swarmcli.recipe import Limits
from swarmcli.recipe.config import config_file, load_config, parse_config
from swarmcli.recipe.hours import DAY, DAYS, parse_hours
from swarmcli.recipe.limit_store import read_limits
from swarmcli.recipe.limits import amount_of, as_text, limit, merged

FILE = """\
# mine
name: Ada  # as on the dashboard
team: Lovelace's
"""


def test_a_file_that_is_not_there_says_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SWARM_CONFIG", str(tmp_path / "mine.yaml"))
    assert config_file() == tmp_path / "mine.yaml"
    assert load_config().name is None
    assert parse_config("# nothing\n\n", "mine").team is None


def test_it_says_who() -> None:
    config = parse_config(FILE, "mine.yaml")
    assert (config.name, config.team) == ("Ada", "Lovelace's")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("nam: Ada\n", "mine.yaml:1: unknown key nam; did you mean name?"),
        ("team: Owls\nname: [1]\n", "mine.yaml:2: name should be text, not [1]; name: how your peers are called"),
        ("just words\n", "mine.yaml:1: a configuration is a list of"),
    ],
)
def test_errors_name_file_line_key_and_fix(text: str, said: str) -> None:
    with pytest.raises(RecipeError) as error:
        parse_config(text, "mine.yaml")
    assert str(error.value).startswith(said)


@pytest.mark.parametrize(
    ("key", "written", "value", "text"),
    [
        ("upload", "2 MB/s", 2e6, "2 MB/s"),
        ("upload", "10 Mbit/s", 1.25e6, "1.25 MB/s"),
        ("upload", "1 MiB/s", 1048576.0, "1.04858 MB/s"),
        ("upload", "no limit", None, "none"),
        ("processor", "50%", 0.5, "50%"),
        ("memory", "512 MiB", 536870912.0, "536.871 MB"),
        ("disk", "20 %", 0.2, "20%"),
        ("hours", "22:00-08:00,  sat-sun 00:00-24:00", "22:00-08:00, sat-sun 00:00-24:00", None),
        ("only_when_idle", "yes", 5.0, "5 min"),
        ("only_when_idle", False, None, "none"),
        ("on_battery", "no", False, "no"),
        ("temperature", "80 °C", 80.0, "80 °C"),
    ],
)
def test_what_people_write_becomes_base_units_and_words_again(key: str, written: Any, value: Any, text: str) -> None:
    found = getattr(Limits.model_validate({key: written}), key)
    assert found == value and type(found) is type(value)
    assert as_text(key, found) == (text or written.replace("  ", " "))
    again = getattr(Limits.model_validate({key: as_text(key, found)}), key)
    assert again == (pytest.approx(found, rel=1e-5) if isinstance(found, float) else found)


@pytest.mark.parametrize(
    ("key", "written", "said"),
    [
        ("upload", "2 parsecs", "2 MB/s"),
        ("upload", 2, "too slow"),
        ("processor", 50, "write for example 50%"),
        ("upload", "1 kB/s", "is too slow for a peer"),
        ("upload", "3 PB/s", "is too fast to be meant"),
        ("memory", "8 Gb", "8 GB"),
        ("hours", "25:00-03:00", "at most 24:00"),
        ("hours", "someday 1-2", "mon-fri"),
        ("hours", "08:00-08:00", "00:00-24:00"),
        ("only_when_idle", "soon", "10 min"),
        ("on_battery", "maybe", "true or false"),
        ("upload", {"a": 1}, "no rate"),
    ],
)
def test_a_value_that_makes_no_sense_is_refused_with_what_to_write(key: str, written: Any, said: str) -> None:
    with pytest.raises(RecipeError, match=f"there: .*{key}") as error:
        read_limits({key: written}, "there")
    assert said in str(error.value)


class MoreLimits(Limits):
    on_shared_line: bool | None = limit(None, "", "pauses on a shared line", "no: pauses on a shared line")


@pytest.mark.parametrize("key", MoreLimits.model_fields)
def test_no_is_the_limit_where_a_limit_says_yes_or_no_and_lifts_every_other(key: str) -> None:
    says_yes_or_no = key in ("on_battery", "on_metered", "on_shared_line")
    for written in ("no", "No", False):
        assert getattr(MoreLimits.model_validate({key: written}), key) is (False if says_yes_or_no else None)
    for written in ("none", "", None):
        assert getattr(MoreLimits.model_validate({key: written}), key) is None


def test_what_is_written_as_none_takes_a_weaker_limit_away_and_amounts_are_sizes_or_shares() -> None:
    weak, strong = Limits(upload=1e6, processor=0.5), Limits.model_validate({"upload": "none"})
    assert merged(weak, strong) == Limits(upload=None, processor=0.5) and merged(weak, Limits()) == weak
    assert (amount_of(0.5, 100.0), amount_of(4e9, 100.0), amount_of(None, 100.0)) == (50.0, 4e9, None)


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
