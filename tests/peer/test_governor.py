from __future__ import annotations

import math
from dataclasses import replace
from datetime import UTC, datetime, timedelta, tzinfo
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

import pytest

from swarmcli.machine.sensors import Readings
from swarmcli.network.rates import LEAST_RATE
from swarmcli.peer.activity import Activity
from swarmcli.peer.controls import OF_CARD, PeerControls
from swarmcli.peer.governor import MARGINS, SETTLE, Governor, GovernorThread, PeerShare, share_of
from swarmcli.peer.lending import files_of, room_for
from swarmcli.recipe import Limits
from swarmcli.recipe.hours import WEEK, parse_hours
from swarmcli.recipe.limit_store import LimitStore, keep_limits, limits_file
from tests.training.small_tasks import small

BERLIN = ZoneInfo("Europe/Berlin")
GB = 1e9


def limits(**values: Any) -> Limits:
    return Limits.model_validate(values)


def story(given: Limits, *moments: tuple[float, dict[str, Any]]) -> list[str]:
    """What holds the peer at each of these moments (seconds), by the readings of each; "": nothing."""
    governor = Governor()
    decided = (governor.decide(given, Readings(now, **readings)) for now, readings in moments)
    return ["; ".join(reason.text for reason in reasons.values()) for reasons in decided]


def test_without_limits_nothing_holds() -> None:
    worst = {"on_battery": True, "metered": True, "idle": 0.0, "others": 1.0, "temperature": 120.0, "memory": 9 * GB}
    assert story(Limits(), (0, worst)) == [""]
    assert story(limits(on_battery="yes", on_metered="yes"), (0, worst)) == [""]


def test_it_holds_at_once_and_goes_on_when_all_was_well_for_a_while_also_where_the_clock_was_set_back() -> None:
    settle = SETTLE["battery"]
    for limit, key, words in (("battery", "on_battery", "on battery"), ("metered", "metered", "on a metered network")):
        given, bad, well = limits(**{f"on_{limit}": "no"}), {key: True}, {key: False}
        moments = ((0, well), (1, bad), (2, well), (3, bad), (4, well), (4 + settle - 0.1, well), (4 + settle, well))
        assert story(given, *moments) == ["", words, words, words, words, words, ""]
        assert story(given, (1000, bad), (1001, well), (10, well), (10 + settle, well))[-1] == ""


def test_it_runs_again_only_when_it_is_cooler_or_the_limit_is_taken_back() -> None:
    degrees = [79.0, 81.0, 90.0, 79.0, 80 - MARGINS.cooler, 80 - MARGINS.cooler]
    told = story(limits(temperature=80), *((30.0 * i, {"temperature": d}) for i, d in enumerate(degrees)))
    assert told == ["", *["81 °C hot, and your limit is 80 °C"] * 4, ""]
    governor, hot = Governor(), Readings(0.0, temperature=85.0)
    assert governor.decide(limits(temperature=80), hot)
    assert governor.decide(limits(temperature=90), replace(hot, now=1.0)) == {}


def test_somebody_who_works_comes_first_and_so_do_other_programs() -> None:
    given = limits(only_when_idle=10)
    settle = SETTLE["busy"]
    used, unused = {"idle": 599.0, "others": 0.0}, {"idle": 601.0, "others": 0.1}
    assert story(given, (0, used), (2, unused), (2 + settle, unused)) == ["somebody uses this computer"] * 2 + [""]
    busy, between = {"idle": 900.0, "others": 0.3}, {"idle": 900.0, "others": 0.2}
    told = story(given, (0, between), (1, busy), (2, between), (2 + 2 * settle, between))
    assert told == ["", *["other programs use this computer"] * 3]


def test_memory_and_disk_hold_above_the_limit_and_where_the_computer_runs_short() -> None:
    memory = {"memory": 9 * GB, "memory_free": 20 * GB, "memory_whole": 32 * GB}
    assert story(limits(memory="8 GB"), (0, memory)) == ["it takes 9.0 GB of memory, and your limit is 8.0 GB"]
    (said,) = story(limits(memory="8 GB"), (0, {**memory, "peers": 2}))
    assert said == "your 2 peers here together take 9.0 GB of memory, and your limit is 8.0 GB"
    assert story(limits(memory="50%"), (0, memory)) == [""]
    assert story(limits(memory="50%"), (0, {**memory, "memory_free": GB / 10})) == [
        "this computer has only 100 MB of memory left"
    ]
    disk = {"disk": 9 * GB, "disk_free": 20 * GB, "disk_whole": 100 * GB}
    assert story(limits(disk="10%"), (0, disk)) == [""]
    assert "your limit is 5.0 GB" in story(limits(disk="10%"), (0, {**disk, "peers": 2}))[0]


def test_what_a_computer_does_not_tell_is_said_and_holds_nobody() -> None:
    governor = Governor()
    given = limits(on_battery="no", on_metered="no", only_when_idle=5, temperature=80, memory="50%", disk="50%")
    assert governor.decide(given, Readings(0.0)) == {}
    assert len(governor.unknown) == 6 and any("only_when_idle" in text for text in governor.unknown)
    assert governor.decide(given, Readings(0.0, others=0.9))["busy"].text == "other programs use this computer"


def test_outside_of_the_hours_it_says_when_it_goes_on() -> None:
    given = limits(hours="22:00-08:00, sat-sun")
    noon = datetime(2026, 11, 23, 12)  # a Monday, by this computer's clock
    reason = Governor().decide(given, Readings(noon.timestamp()))["hours"]
    assert reason.text == "outside the hours that you lend, on again at 22:00"
    assert reason.until == noon.replace(hour=22).timestamp()
    assert Governor().decide(given, Readings(noon.replace(hour=23).timestamp())) == {}
    only = limits(hours="sat 10-12")
    assert "on again on Saturday at 10:00" in Governor().decide(only, Readings(noon.timestamp()))["hours"].text


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


class Told:
    """Sensors that the test sets, and what the governor did."""

    def __init__(self, file: Path) -> None:
        self.readings = Readings(0.0)
        self.shares: list[PeerShare] = []
        self.said: list[str] = []
        self.activity = Activity()
        self.store = LimitStore(None, file)
        self.governor = GovernorThread(self.store, self, self.activity, self.shares.append, self.said.append)

    def read(self, limits: Limits) -> Readings:
        return self.readings


def test_what_is_decided_is_applied_once_and_taken_back(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    told = Told(file)
    told.store.change({"on_battery": "no", "upload": "1 MB/s"})
    told.readings = Readings(0.0, on_battery=True)
    events: list[object] = []
    told.activity.subscribe(lambda: events.append(told.activity.status().state))
    told.governor.look()
    told.governor.look()
    assert told.activity.status().sentence.endswith("on battery") and len(events) == 1
    assert [share.upload for share in told.shares] == [1e6]
    told.store.change({"on_battery": "yes", "upload": "default"})
    told.governor.look()
    assert told.activity.status().state == "running" and told.shares[-1] == PeerShare()
    keep_limits({"upload": 3e6}, file)
    told.governor.look()
    assert told.shares[-1].upload == 3e6
    limits_file(file).write_text("torn")
    told.governor.look()
    told.governor.look()
    assert len(told.said) == 1 and str(limits_file(file)) in told.said[0] and told.shares[-1].upload == 3e6


def test_limits_of_a_graphics_card_that_is_not_there_are_shown_only_where_one_was_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SWARM_CONFIG", str(tmp_path / "config.yaml"))
    for has_card in (True, False):
        controls = PeerControls(Activity(), LimitStore(), bool, has_card=has_card)
        assert all((key in controls.limits()["limits"]) is has_card for key in OF_CARD)
        assert "upload" in controls.limits()["limits"]
    controls.change_limits({"gpu": "50%"}, keep=False)
    assert controls.limits()["limits"]["gpu"]["value"] == 0.5


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
