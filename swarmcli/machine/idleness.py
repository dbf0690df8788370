"""How long nobody has used keyboard and mouse.

On Linux and similar systems several may know: the desktop (GNOME's and KDE's own services, the X server), the login
manager, and the terminals. The one that saw somebody last is right: a user who works in a terminal over the network
leaves the desktop idle, and the other way round.
"""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil


def answer_of(*command: str) -> str | None:
    """Returns the output of a program; None: it is missing, fails, or does not answer in time."""
    program = shutil.which(command[0])
    if program is None:
        return None
    flags = getattr(subprocess, "CREATE_NO_WINDOW", 0)
    try:
        done = subprocess.run(
            [program, *command[1:]],
            capture_output=True,
            stdin=subprocess.DEVNULL,
            timeout=2.0,
            env={**os.environ, "LC_ALL": "C"},
            creationflags=flags,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.decode("utf-8", "replace")


def seconds_without_input() -> float | None:
    """Returns the seconds since somebody last used keyboard or mouse; None: unknown."""
    if sys.platform == "win32":
        return _of_windows()
    if sys.platform == "darwin":
        return of_ioreg(answer_of("ioreg", "-c", "IOHIDSystem", "-d", "4"))
    return min((found for found in _of_unix() if found is not None), default=None)


def _of_unix() -> Iterator[float | None]:
    yield of_busctl(
        answer_of(
            "busctl", "--user", "call", "org.gnome.Mutter.IdleMonitor", "/org/gnome/Mutter/IdleMonitor/Core",
            "org.gnome.Mutter.IdleMonitor", "GetIdletime",
        )
    )  # fmt: skip
    yield of_busctl(
        answer_of(
            "busctl", "--user", "call", "org.kde.screensaver", "/ScreenSaver", "org.freedesktop.ScreenSaver",
            "GetSessionIdleTime",
        )
    )  # fmt: skip
    if os.environ.get("DISPLAY"):
        yield of_milliseconds(answer_of("xprintidle"))
    yield of_loginctl(
        answer_of("loginctl", "show-user", "--property=IdleHint,IdleSinceHint", str(os.getuid())), time.time()
    )
    yield _of_terminals()


def of_busctl(answer: str | None) -> float | None:
    """Reads a number of milliseconds as `busctl` prints it: `t 5012`."""
    found = re.fullmatch(r"[tu] ([0-9]+)", (answer or "").strip())
    return int(found[1]) / 1000 if found else None


def of_milliseconds(answer: str | None) -> float | None:
    return int(answer) / 1000 if answer and answer.strip().isdecimal() else None


def of_loginctl(answer: str | None, now: float) -> float | None:
    """Reads what the login manager says: the desktop tells it when it has become idle, minutes late but never too
    early. A user who is not idle by this may still have been idle for a while: that is unknown."""
    told = dict(line.partition("=")[::2] for line in (answer or "").splitlines())
    since = told.get("IdleSinceHint", "0")
    if told.get("IdleHint") != "yes" or not since.isdecimal() or int(since) == 0:
        return None
    return max(0.0, now - int(since) / 1e6)


def of_ioreg(answer: str | None) -> float | None:
    """Reads the nanoseconds that macOS tells."""
    found = re.search(r'"HIDIdleTime"\s*=\s*([0-9]+)', answer or "")
    return int(found[1]) / 1e9 if found else None


def _of_terminals() -> float | None:
    """A terminal's access time is when somebody last typed there."""
    found = []
    for terminal in {user.terminal for user in psutil.users() if user.terminal}:
        with suppress(OSError):
            found.append(time.time() - Path("/dev", terminal).stat().st_atime)
    return max(0.0, min(found)) if found else None


def _of_windows() -> float | None:
    class LastInput(ctypes.Structure):
        _fields_ = [("size", ctypes.c_uint), ("ticks", ctypes.c_uint)]

    windll: Any = getattr(ctypes, "windll")  # noqa: B009  # of Windows alone
    info = LastInput(ctypes.sizeof(LastInput), 0)
    if not windll.user32.GetLastInputInfo(ctypes.byref(info)):
        return None
    # Both count milliseconds since the start of the system, and begin anew after 49 days.
    return float((windll.kernel32.GetTickCount() - info.ticks) % 2**32) / 1000
