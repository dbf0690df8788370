"""Text for people. What others have written (names, reasons, refusals, errors that quote them) is made harmless; lists
of names, amounts and times are put into words."""

from __future__ import annotations

import re
import time
import unicodedata
from collections.abc import Sequence

MAX_TEXT = 300  # characters in one line, unless its reader allows more

# Control characters steer a terminal, format characters turn the direction of reading or are invisible, separators
# break lines.
_HARMFUL = frozenset(("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"))
_NUMBERED = re.compile(r"\[(?:Errno|WinError) -?\d+\] ")  # before the words of an error of the system


def harmless(text: str) -> str:
    """The text without what could steer a terminal or turn the direction of reading, and without the numbers of the
    system's errors; its lines stay."""
    if "[" in text:
        text = _NUMBERED.sub("", text)
    if text.isascii() and text.isprintable():  # nearly always
        return text
    return "".join(each for each in text if each in "\n\t" or unicodedata.category(each) not in _HARMFUL)


def printable(text: str, limit: int = MAX_TEXT) -> str:
    """The same in one line of at most `limit` characters."""
    line = text[: limit + 1]
    if not (line.isascii() and line.isprintable()):
        line = "".join(" " if each in "\r\n\t" else each for each in line)
    line = harmless(line)
    return line if len(line) <= limit else line[: limit - 1] + "…"


def first_words(error: Exception) -> str:
    """The first two lines of an error, in one; the name of its class if it has no words."""
    if isinstance(error, KeyError):
        return f"it does not know {error}"
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines[:2])[:MAX_TEXT] if lines else type(error).__name__


def listed(names: Sequence[str], most: int = 4) -> str:
    """Names in a sentence: "Ada, Bob and Cem"; of more than `most` the others are counted: "Ada, Bob and 3 more"."""
    if len(names) > most:
        names = [*names[:most], f"{len(names) - most} more"]
    return " and ".join(filter(None, [", ".join(names[:-1]), *names[-1:]]))


def some(names: Sequence[str], most: int = 4) -> str:
    """The same with commas alone, for a list of facts: "Ada, Bob, Cem", or "Ada, Bob and 3 more"."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def plural(count: int, one: str, many: str = "") -> str:
    """For example: 1 peer, 1,200 peers."""
    return f"{count:,} {one if count == 1 else many or one + 's'}"


def format_size(nbytes: float) -> str:
    """Bytes in decimal units: 999 B, 1.8 MB, 463 kB."""
    return _scaled(nbytes, ("B", "kB", "MB", "GB", "TB"))


def format_rate(bytes_per_second: float) -> str:
    """How fast a link is, as it is sold: 600 kbit/s, 2.6 Mbit/s."""
    return _scaled(8 * bytes_per_second, ("bit/s", "kbit/s", "Mbit/s", "Gbit/s", "Tbit/s"))


def _scaled(value: float, units: Sequence[str]) -> str:
    unit = 0
    while abs(value) >= 999.5 and unit < len(units) - 1:
        value, unit = value / 1000, unit + 1
    return f"{value:.{0 if unit == 0 or abs(value) >= 9.95 else 1}f} {units[unit]}"


def format_duration(seconds: float) -> str:
    """As exact as it is long: 80 ms, 9.5 s, 40 s, 12 min, 2.5 h, 55 h is 2.3 days."""
    if seconds < 0.0995:
        return f"{max(0.0, 1000 * seconds):.0f} ms"
    for unit, size, least in (("s", 1, 99.5), ("min", 60, 99.5), ("h", 3600, 47.5)):
        if seconds < least * size:
            return f"{seconds / size:.{1 if unit != 'min' and seconds / size < 9.95 else 0}f} {unit}"
    return f"{seconds / 86_400:.{1 if seconds < 9.95 * 86_400 else 0}f} days"


def roughly(seconds: float) -> str:
    """The same of an estimate, in whole seconds: nobody needs their tenths."""
    return f"{max(1.0, seconds):.0f} s" if seconds < 99.5 else format_duration(seconds)


def format_moment(seconds: float) -> str:
    """A moment (seconds since 1970) in local time, to the minute; with the day if it is not today. A stranger may name
    a moment beyond every calendar's end: it is shown as one of the year 9892."""
    then, now = time.localtime(min(seconds, 250_000_000_000)), time.localtime()
    return time.strftime("%H:%M" if then[:3] == now[:3] else "%Y-%m-%d %H:%M", then)
