from __future__ import annotations

import math
from collections.abc import Callable
from datetime import UTC, datetime, timedelta, tzinfo
from pathlib import Path
from typing import Any, cast
from zoneinfo import ZoneInfo

import pytest

from swarmcli.machine.sensors import Readings, Sensors
from swarmcli.network.rates import LEAST_RATE
from swarmcli.peer.activity import Activity
from swarmcli.peer.disk import files_of, room_for
from swarmcli.peer.governor import COOLER, SETTLE, Governor, PeerShare, judge, outside_hours, share_of
from swarmcli.recipe import Limits
from swarmcli.recipe.hours import WEEK, parse_hours
from swarmcli.recipe.limit_store import LimitStore, keep_limits, limits_file
from swarmcli.training.loop import ComputePace
from tests.training.small_tasks import small

BERLIN = ZoneInfo("Europe/Berlin")
GB = 1e9


def limits(**values: Any) -> Limits:
    return Limits.model_validate(values)


class Told:
    """A governor with sensors and a clock that the test sets, and what it did."""

    def __init__(self, file: Path, wall: Callable[[float], float] = lambda now: now) -> None:
        self.now, self.readings = 0.0, Readings(0.0)
        self.rates: list[float | None] = []
        self.said: list[str] = []
        self.pace = ComputePace()
        self.activity = Activity(clock=lambda: wall(self.now), steady=lambda: self.now)
        self.store = LimitStore(None, file)
        self.governor = Governor(
            self.store,
            cast(Sensors, self),
            self.activity,
            self.pace,
            lambda upload, download: self.rates.append(upload),
            self.said.append,
        )

    def read(self, limits: Limits) -> Readings:
        return self.readings

    def look(self, now: float = 0.0, **readings: Any) -> str:
        """What holds the peer at this moment; "": nothing."""
        self.now, self.readings = now, Readings(now, **readings)
        self.governor.look()
        return "; ".join(reason.text for reason in self.activity.status().reasons)


@pytest.fixture
def told(tmp_path: Path) -> Told:
    return Told(tmp_path / "config.yaml")


def story(told: Told, given: dict[str, Any], *moments: tuple[float, dict[str, Any]]) -> list[str]:
    """What holds the peer at each of these moments (seconds), by the readings of each; "": nothing."""
    told.store.change(given)
    return [told.look(now, **readings) for now, readings in moments]


def test_without_limits_nothing_holds(told: Told) -> None:
    worst = {"on_battery": True, "metered": True, "idle": 0.0, "others": 1.0, "temperature": 120.0, "memory": 9 * GB}
    assert story(told, {}, (0, worst)) == [""]
    assert story(told, {"on_battery": "yes", "on_metered": "yes"}, (0, worst)) == [""]


@pytest.mark.parametrize("set_back", [0.0, 1e6])
def test_it_holds_at_once_and_goes_on_when_all_was_well_for_a_while_also_where_the_clock_was_set_back(
    tmp_path: Path, set_back: float
) -> None:
    settle = SETTLE["battery"]
    for limit, key, words in (("battery", "on_battery", "on battery"), ("metered", "metered", "on a metered network")):
        told = Told(tmp_path / "config.yaml", wall=lambda now: 1e9 + now - (set_back if now > 3 else 0))
        bad, well = {key: True}, {key: False}
        moments = ((0, well), (1, bad), (2, well), (3, bad), (4, well), (3 + settle - 0.1, well), (3 + settle, well))
        assert story(told, {f"on_{limit}": "no"}, *moments) == ["", words, words, words, words, words, ""]


def test_it_runs_again_only_when_it_is_cooler_or_the_limit_is_taken_back(told: Told) -> None:
    degrees = [79.0, 81.0, 90.0, 79.0, 80 - COOLER - 1]
    moments = [(10.0 * i, {"temperature": d}) for i, d in enumerate(degrees)]
    held = story(told, {"temperature": 80}, *moments, (59.0, {"temperature": 74.0}))
    assert held == ["", *["81 °C hot, and your limit is 80 °C"] * 4, ""]
    assert told.look(60.0, temperature=85.0)
    told.store.change({"temperature": 90})
    assert told.look(61.0, temperature=85.0) == ""


def test_somebody_who_works_comes_first_and_so_do_other_programs(told: Told) -> None:
    settle = SETTLE["busy"]
    used, unused = {"idle": 599.0, "others": 0.0}, {"idle": 601.0, "others": 0.1}
    moments = (0, used), (2, unused), (settle, unused)
    assert story(told, {"only_when_idle": 10}, *moments) == ["somebody uses this computer"] * 2 + [""]
    busy, between = {"idle": 900.0, "others": 0.3}, {"idle": 900.0, "others": 0.2}
    later = [told.look(100 + at, **readings) for at, readings in ((0, between), (1, busy), (2, between), (21, between))]
    assert later == ["", *["other programs use this computer"] * 3]


def test_while_no_sensor_can_be_read_what_holds_goes_on(told: Told, monkeypatch: pytest.MonkeyPatch) -> None:
    story(told, {"memory": "4 GB"}, (0.0, {"memory": 5e9, "memory_free": 9e9, "memory_whole": 16e9}))
    with monkeypatch.context() as broken:
        broken.setattr(told, "read", lambda limits: 1 / 0)
        for now in range(1, 60):
            with pytest.raises(ZeroDivisionError):
                told.look(float(now))
            assert told.activity.status().state == "pausing"
    assert told.look(61.0, memory=1e9, memory_free=9e9, memory_whole=16e9) != "", "it settles first"
    assert told.look(90.0, memory=1e9, memory_free=9e9, memory_whole=16e9) == ""


def test_memory_and_disk_hold_above_the_limit_and_where_the_computer_runs_short() -> None:
    def why(given: Limits, **readings: Any) -> list[str]:
        return list(judge(given, Readings(0.0, **readings))[0].values())

    memory = {"memory": 9 * GB, "memory_free": 20 * GB, "memory_whole": 32 * GB}
    assert why(limits(memory="8 GB"), **memory) == ["it takes 9.0 GB of memory, and your limit is 8.0 GB"]
    (said,) = why(limits(memory="8 GB"), **memory, peers=2)
    assert said == "your 2 peers here together take 9.0 GB of memory, and your limit is 8.0 GB"
    assert why(limits(memory="50%"), **memory) == []
    short = why(limits(memory="50%"), **{**memory, "memory_free": GB / 10})
    assert short == ["this computer has only 100 MB of memory left"]
    disk = {"disk": 9 * GB, "disk_free": 20 * GB, "disk_whole": 100 * GB}
    assert why(limits(disk="10%"), **disk) == []
    assert "your limit is 5.0 GB" in why(limits(disk="10%"), **disk, peers=2)[0]


def test_what_a_computer_does_not_tell_is_said_once_and_holds_nobody(told: Told) -> None:
    given = {"on_battery": "no", "on_metered": "no", "only_when_idle": 5, "temperature": 80, "memory": "50%"}
    assert story(told, {**given, "disk": "50%"}, (0, {}), (1, {})) == ["", ""]
    assert len(told.said) == 6 and any("only_when_idle" in text for text in told.said)
    assert told.look(2, others=0.9) == "other programs use this computer"


def test_outside_of_the_hours_it_says_when_it_goes_on_and_goes_on_then(told: Told) -> None:
    given = limits(hours="22:00-08:00, sat-sun")
    noon = datetime(2026, 11, 23, 12)  # a Monday, by this computer's clock
    reason = outside_hours(given, noon.timestamp())
    assert reason and reason.text == "outside the hours that you lend, on again at 22:00"
    assert reason.until == noon.replace(hour=22).timestamp()
    assert outside_hours(given, noon.replace(hour=23).timestamp()) is None
    on_saturday = outside_hours(limits(hours="sat 10-12"), noon.timestamp())
    assert on_saturday and "on again on Saturday at 10:00" in on_saturday.text
    begun = noon.timestamp()
    assert "on again at 22:00" in story(told, {"hours": "22:00-08:00"}, (begun, {}))[0]
    assert told.look(begun + 10 * 3600) == "" and told.look(begun + 20 * 3600) != ""
    told.store.change({"hours": "none"})
    assert told.look(begun + 20 * 3600 + 1) == ""


def test_hours_that_are_asked_for_again_and_again_are_not_looked_through_each_time() -> None:
    class Greenwich(tzinfo):
        looks = 0

        def utcoffset(self, moment: datetime | None) -> timedelta:
            self.looks += 1
            return timedelta(0)

        dst = utcoffset

    zone, monday = Greenwich(), datetime(2026, 11, 23, tzinfo=UTC)
    when = {parse_hours("sun 23:59-24:00").next_change(monday.timestamp() + second, zone) for second in range(60)}
    assert when == {(monday + timedelta(days=7, minutes=-1)).timestamp()}
    assert zone.looks < 4 * WEEK, "one look at each minute until then"


def test_the_peers_of_a_computer_share_its_link_and_its_card() -> None:
    given = limits(upload="2 MB/s", download="6 kB/s", processor="50%", gpu="50%")
    alone, two = share_of(given, Readings(0.0)), share_of(given, Readings(0.0, peers=4, trainers=2))
    assert alone == PeerShare(2e6, 6e3, 0.5, 0.5)
    assert two == PeerShare(5e5, LEAST_RATE, 0.5, 0.25, divided=1.2)
    assert share_of(Limits(), Readings(0.0, trainers=2)) == PeerShare()


def test_what_is_decided_is_applied_once_and_taken_back(tmp_path: Path, told: Told) -> None:
    file, events = tmp_path / "config.yaml", list[object]()
    divided = list[float]()
    told.governor.when_rates_change(divided.append)
    told.activity.subscribe(lambda: events.append(told.activity.status().state))
    told.store.change({"on_battery": "no", "upload": "1 MB/s", "gpu": "50%"})
    assert told.look(on_battery=True) == "on battery" and told.look(1.0, on_battery=True) and len(events) == 1
    assert told.rates == [1e6] and divided == [1.0, 1.0] and told.pace.share == 1.0
    told.governor.compute_on_card(True)
    assert told.pace.share == 0.5
    told.store.change({"on_battery": "yes", "upload": "default", "gpu": "default"})
    assert told.look(2.0, on_battery=True) == "" and told.rates[-1] is None and told.pace.share == 1.0
    keep_limits({"upload": 3e6}, file)
    told.look(3.0)
    assert told.rates[-1] == 3e6
    limits_file(file).write_text("torn")
    told.look(4.0)
    told.look(5.0)
    assert len(told.said) == 1 and str(limits_file(file)) in told.said[0] and told.rates[-1] == 3e6


HUB = "datasets=[{source: huggingface, path: ada/texts}]"


def test_what_a_peer_may_still_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub-home"))
    monkeypatch.setenv("SWARM_RUNTIME_DIR", str(tmp_path / "runtime"))
    for name in ("HF_DATASETS_CACHE", "HF_HUB_CACHE"):
        monkeypatch.delenv(name, raising=False)
    home, recipe = tmp_path / "home", small(tmp_path, HUB)
    limits = LimitStore(None, tmp_path / "config.yaml")
    assert room_for(limits, recipe, home) == math.inf
    limits.change({"disk": "10 MB"})
    cache = tmp_path / "hub-home" / "datasets" / "ada___texts"
    for place in (home / "checkpoints", cache):
        place.mkdir(parents=True)
        (place / "file").write_bytes(bytes(1 << 20))
    assert files_of(recipe, home)[:2] == [home, cache]
    assert room_for(limits, recipe, home) == pytest.approx(10e6 - (2 << 20), abs=50_000)
    evaluates = small(tmp_path, HUB, "evaluation={every_epochs: 1, dataset: {source: huggingface, path: bob/others}}")
    assert sum("bob" in place.name for place in files_of(evaluates, tmp_path)) == 2
