from __future__ import annotations

import math
import os
from collections import namedtuple
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from swarmcli.machine import idleness, sensors
from swarmcli.machine.idleness import answer_of
from swarmcli.machine.sensors import OthersUse, Readings, Seldom, Sensors, bytes_below
from swarmcli.recipe import Limits

ALL = Limits(on_battery=False, on_metered=False, only_when_idle=5.0, temperature=80.0, memory=8e9, disk=1e9)


@pytest.fixture(autouse=True)
def no_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever runs on the computer of the tests, it is not asked."""
    for module in (idleness, sensors):
        monkeypatch.setattr(module, "answer_of", lambda *command: None)
    monkeypatch.setattr(psutil, "users", list)


def test_what_no_limit_asks_for_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sensors, "psutil", None)
    found = Sensors([Path("/nowhere")]).read(Limits(upload=1e6))
    assert found == Readings(found.now)


def test_this_computer_is_read_and_what_it_does_not_tell_is_unknown(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(bytes(50_000))
    homes = [("a", "trainer"), ("a", "trainer"), ("b", "monitor"), ("c", "trainer")]
    processes = [SimpleNamespace(pid=os.getpid(), home=home, role=role) for home, role in homes]
    found = Sensors([tmp_path], lambda: processes).read(ALL)
    assert (found.peers, found.trainers) == (3, 2), "counted by their homes"
    assert found.metered is None and found.idle is None and found.others is None
    assert found.memory and found.memory_whole and found.memory_free and found.memory < found.memory_whole
    assert found.disk and found.disk >= 40_000 and found.disk_whole and found.disk_free
    (tmp_path / "below").mkdir()
    (tmp_path / "below" / "link").symlink_to(tmp_path / "gone")
    assert bytes_below(tmp_path / "below") < 10_000 and bytes_below(tmp_path / "none") == 0, "what goes away meanwhile"


def test_a_sensor_that_breaks_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    def breaks() -> None:
        raise RuntimeError("a driver")

    monkeypatch.setattr(psutil, "sensors_battery", breaks, raising=False)
    assert Sensors().read(ALL).on_battery is None
    monkeypatch.setattr(psutil, "sensors_battery", lambda: SimpleNamespace(power_plugged=False))
    assert Sensors().read(ALL).on_battery is True
    monkeypatch.setattr(psutil, "sensors_battery", lambda: None)
    assert Sensors().read(ALL).on_battery is False


def test_nonsense_of_a_broken_thermometer_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    chips = {
        "a": [SimpleNamespace(current=55.0), SimpleNamespace(current=65535.0)],
        "b": [SimpleNamespace(current=61.0)],
    }
    monkeypatch.setattr(psutil, "sensors_temperatures", lambda: chips, raising=False)
    assert sensors.hottest() == 61.0
    monkeypatch.setattr(sensors, "answer_of", lambda *command: "70\n")
    assert sensors.hottest() == 70.0


def test_a_seldom_reading_is_kept_for_a_while() -> None:
    now, taken = [0.0], []
    reading = Seldom(5.0, lambda: taken.append(1) or len(taken), clock=lambda: now[0])
    first = [reading(), reading()]
    now[0] = 5.0
    assert (first, reading()) == ([1, 1], 2)


def test_the_use_of_others_is_all_but_ours_and_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    times = namedtuple("times", "user system idle iowait")
    moments = iter([times(0, 0, 0, 0), times(6, 2, 10, 2), times(6, 2, 30, 2)])
    own = iter([100.0, 103.0, 103.0])
    monkeypatch.setattr(psutil, "cpu_times", lambda: next(moments))
    monkeypatch.setattr(sensors, "_processor_time", lambda pid: next(own))
    now = iter([0.0, 10.0, 1000.0, 2000.0])
    use = OthersUse(clock=lambda: next(now))
    assert use.read([7]) is None
    assert use.read([7]) == pytest.approx((8 - 3) / 20)
    assert use.read([7]) == pytest.approx(0.0, abs=1e-6)  # long after


def test_answers_of_programs_are_understood_or_unknown() -> None:
    assert idleness.of_busctl("t 5012\n") == 5.012 and idleness.of_busctl("s x") is None
    assert idleness.of_milliseconds("1500\n") == 1.5 and idleness.of_milliseconds("error") is None
    assert idleness.of_ioreg('  "HIDIdleTime" = 2500000000\n') == 2.5 and idleness.of_ioreg(None) is None
    told = "IdleHint=yes\nIdleSinceHint=90000000\n"
    assert idleness.of_loginctl(told, 100.0) == 10.0
    assert idleness.of_loginctl(told.replace("yes", "no"), 100.0) is None
    assert answer_of("no-such-program-anywhere") is None


def test_whether_the_network_is_paid_by_volume_is_as_the_system_says(monkeypatch: pytest.MonkeyPatch) -> None:
    def metered(platform: str, *answers: str | None) -> list[bool | None]:
        said = iter(answers)
        monkeypatch.setattr("sys.platform", platform)
        monkeypatch.setattr(sensors, "answer_of", lambda *command: next(said))
        return [sensors.is_metered() for _ in answers]

    told = metered("linux", *(f"u {n}\n" for n in range(5)), "Failed to get property", None)
    assert told == [None, True, False, True, False, None, None]
    assert metered("win32", "Variable\r\n", "Unrestricted", "") == [True, False, None]


def test_a_terminal_in_use_is_somebody(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "terminal").touch()
    monkeypatch.setattr(psutil, "users", lambda: [SimpleNamespace(terminal=str(tmp_path / "terminal"))])
    monkeypatch.setattr("sys.platform", "linux")
    idle = idleness.seconds_without_input()
    assert idle is not None and 0 <= idle < math.inf
