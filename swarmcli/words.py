"""Words for people that others have written: names, reasons, refusals, errors that quote them. And in words: names in a
row, how much there is of something, how long it takes."""

from __future__ import annotations

import math
import re
import unicodedata
from collections.abc import Sequence

MAX_TEXT = 300  # characters in one line, unless its reader allows more

# Control characters steer a terminal, formats turn the direction of reading or are not seen, separators break lines.
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
    """The first two lines of an error, in one; the name of its kind if it has no words."""
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
    """The same in a list of facts, whose names stand apart by commas: "Ada, Bob, Cem", or "Ada, Bob and 3 more"."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def amount(nbytes: float, digits: int = 3) -> str:
    """Bytes as people write them, in decimal units: 10 kB, 1.77 MB."""
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if nbytes >= size:
            return f"{float(f'{nbytes / size:.{digits}g}'):g} {unit}"  # 460 kB, and not 4.6e+02
    return f"{nbytes:g} B"


def megabytes(size: float) -> str:
    """Bytes as people read them, in decimal units."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(size) < 1000:
            return f"{size:.0f} {unit}" if unit == "B" or size >= 100 else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"


def roughly(seconds: float) -> str:
    """For example: 40 s, 12 min, 2.5 h, 3 days."""
    if seconds < 99.5:
        return f"{max(1.0, seconds):.0f} s"
    if seconds < 5970:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h" if seconds < 172800 else f"{math.ceil(seconds / 86400)} days"
