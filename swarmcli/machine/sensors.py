"""Reads what a computer tells of itself: its power, network, keyboard, heat, memory and disk, and what else computes on
it.

Each reading may be None: this computer does not tell. Nothing is guessed. Only what a limit asks for is read; a reading
that starts a program or walks over files is taken seldom.
"""

from __future__ import annotations

import logging
import math
import os
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Generic, TypeVar

import psutil

from swarmcli.machine.idleness import answer_of, seconds_without_input
from swarmcli.machine.registry import LocalPeer
from swarmcli.recipe.limits import Limits

logger = logging.getLogger(__name__)

_WINDOWS = (
    "[void][Windows.Networking.Connectivity.NetworkInformation,Windows.Networking.Connectivity,ContentType=WindowsRuntime];"
    "[Windows.Networking.Connectivity.NetworkInformation]::GetInternetConnectionProfile()"
    ".GetConnectionCost().NetworkCostType"
)
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Readings:
    """The readings of one moment. None: unknown, or no limit asks for it."""

    now: float  # seconds since 1970
    on_battery: bool | None = None
    metered: bool | None = None
    idle: float | None = None  # seconds since somebody last used keyboard or mouse
    others: float | None = None  # share of all processors that programs other than peers of this user take, 0 to 1
    temperature: float | None = None  # °C, of the hottest processor or graphics card
    memory: float | None = None  # bytes that the peers of this user take
    memory_free: float | None = None
    memory_whole: float | None = None
    disk: float | None = None  # bytes of this peer's files
    disk_free: float | None = None
    disk_whole: float | None = None
    peers: int = 1  # of this user on this computer, this one too
    trainers: int = 1


class Sensors:
    """This computer's sensors, for one peer. For one thread."""

    def __init__(self, files: Sequence[Path] = (), processes: Callable[[], Sequence[LocalPeer]] = tuple) -> None:
        """`files`: what the limit for the disk counts; the disk of the first one is looked at. `processes`: those of
        this user's peers on this computer, see LocalPeers."""
        self._processes = processes
        self._files = files
        self._others = OthersUse()
        self._metered = Seldom(30.0, is_metered)
        self._idle = Seldom(3.0, seconds_without_input)
        self._temperature = Seldom(10.0, hottest)
        self._disk = Seldom(30.0, lambda: float(sum(map(bytes_below, self._files))))

    def read(self, limits: Limits) -> Readings:
        """Takes the readings that these limits ask for. Never raises."""
        processes = _known(self._processes) or ()
        homes = {each.home for each in processes}
        found = Readings(
            time.time(),
            peers=max(1, len(homes)),
            trainers=max(1, len({each.home for each in processes if each.role == "trainer"})),
        )
        own = [each.pid for each in processes] or [os.getpid()]
        if limits.on_battery is False:
            found = replace(found, on_battery=_known(on_battery))
        if limits.on_metered is False:
            found = replace(found, metered=self._metered())
        if limits.only_when_idle is not None:
            found = replace(found, idle=self._idle(), others=self._others.read(own))
        if limits.temperature is not None:
            found = replace(found, temperature=self._temperature())
        if limits.memory is not None and (memory := _known(psutil.virtual_memory)) is not None:
            taken = float(sum(filter(None, map(memory_of, own))))
            found = replace(found, memory=taken, memory_free=memory.available, memory_whole=memory.total)
        if limits.disk is not None and self._files:
            disk = _known(lambda: psutil.disk_usage(str(self._files[0])))
            if disk is not None:
                found = replace(found, disk=self._disk(), disk_free=disk.free, disk_whole=disk.total)
        return found


class Seldom(Generic[T]):
    """A reading that is taken at most once in so many seconds. If it fails, the value is unknown."""

    def __init__(self, seconds: float, read: Callable[[], T], clock: Callable[[], float] = time.monotonic) -> None:
        self._seconds, self._read, self._clock = seconds, read, clock
        self._at = -math.inf
        self._value: T | None = None

    def __call__(self) -> T | None:
        if self._clock() >= self._at + self._seconds:
            self._value = _known(self._read)
            self._at = self._clock()
        return self._value


def _known(read: Callable[[], T]) -> T | None:
    try:
        return read()
    except Exception as error:  # drivers and other programs may raise anything; a peer does not end for it
        logger.debug("a sensor cannot be read: %s", error)
        return None


def on_battery() -> bool:
    """A computer without a battery runs on mains. Raises AttributeError where psutil has no such sensor."""
    found = psutil.sensors_battery()
    return found is not None and found.power_plugged is False


def hottest() -> float | None:
    """Returns the highest temperature of processors and graphics cards, as far as the system and NVIDIA's program
    tell."""
    sensors: dict[str, list[Any]] = getattr(psutil, "sensors_temperatures", dict)()  # only on Linux and FreeBSD
    found = [each.current for of_one in sensors.values() for each in of_one]
    cards = answer_of("nvidia-smi", "--query-gpu=temperature.gpu", "--format=csv,noheader,nounits") or ""
    found += [float(line) for line in cards.split() if line.isdecimal()]
    return max((degrees for degrees in found if -50 < degrees < 150), default=None)  # broken sensors show nonsense


class OthersUse:
    """The share of all processors that is used by other processes than the given ones; smoothed."""

    def __init__(self, clock: Callable[[], float] = time.monotonic, smoothed: float = 10.0) -> None:
        """`smoothed`: seconds over which it is averaged: a program that starts does not mean that somebody works."""
        self._smoothed = smoothed
        self._clock = clock
        self._before: tuple[float, float, dict[int, float]] | None = None
        self._at = clock()
        self._smooth: float | None = None

    def read(self, own: Iterable[int]) -> float | None:
        """Returns None at the first call, and where the system does not tell."""
        times = _known(lambda: psutil.cpu_times())
        if times is None:
            return None
        idle = times.idle + getattr(times, "iowait", 0.0)
        # user and nice already contain the time of guests.
        total = sum(times) - getattr(times, "guest", 0.0) - getattr(times, "guest_nice", 0.0)
        of_own = {pid: seconds for pid in own if (seconds := _processor_time(pid)) is not None}
        now, before = self._clock(), self._before
        self._before = total, idle, of_own
        if before is None or total <= before[0]:
            return self._smooth
        used = (total - before[0]) - (idle - before[1])
        # A process that is seen for the first time counts from its next reading on.
        used -= sum(seconds - before[2][pid] for pid, seconds in of_own.items() if pid in before[2])
        share = min(1.0, max(0.0, used / (total - before[0])))
        weight = 1 - math.exp(-max(0.0, now - self._at) / self._smoothed)
        self._at = now
        self._smooth = share if self._smooth is None else self._smooth + weight * (share - self._smooth)
        return self._smooth


def _processor_time(pid: int) -> float | None:
    try:
        times = psutil.Process(pid).cpu_times()
    except psutil.Error:
        return None
    return times.user + times.system


def memory_of(pid: int) -> int | None:
    """Returns the bytes that a process takes; None: it is gone, or somebody else's."""
    try:
        return int(psutil.Process(pid).memory_info().rss)
    except psutil.Error:
        return None


def bytes_below(path: Path) -> int:
    """Returns the bytes that the files of a directory take on the disk; files that go away meanwhile count nothing."""
    total = 0
    for directory, _, names in os.walk(path):
        for name in names:
            with suppress(OSError):
                found = Path(directory, name).lstat()
                total += getattr(found, "st_blocks", 0) * 512 or found.st_size
    return total


def is_metered() -> bool | None:
    """Whether the network is paid by volume. None: unknown, as on macOS, which tells only its own programs."""
    if sys.platform == "win32":
        cost = answer_of("powershell", "-NoProfile", "-NonInteractive", "-Command", _WINDOWS)
        return {"Unrestricted": False, "Fixed": True, "Variable": True}.get((cost or "").strip())
    bus = "org.freedesktop.NetworkManager"
    told = answer_of("busctl", "--system", "get-property", bus, "/org/freedesktop/NetworkManager", bus, "Metered")
    # NMMetered: yes, no, and what NetworkManager guesses from the kind of connection: yes, no.
    return {"u 1": True, "u 2": False, "u 3": True, "u 4": False}.get((told or "").strip())
