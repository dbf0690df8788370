"""How people write durations and moments: "90 min", "2h", "18:00", "tomorrow 8:00", "mon 8:00", "2026-12-24 18:00"."""

from __future__ import annotations

import re
import time as clock
from datetime import datetime, time, timedelta, tzinfo

from swarmcli.errors import UsageError

SECONDS = {
    **dict.fromkeys(("s", "sec", "secs", "second", "seconds"), 1.0),
    **dict.fromkeys(("m", "min", "mins", "minute", "minutes"), 60.0),
    **dict.fromkeys(("h", "hr", "hrs", "hour", "hours"), 3600.0),
    **dict.fromkeys(("d", "day", "days"), 86400.0),
    **dict.fromkeys(("w", "week", "weeks"), 604800.0),
}
LONGEST = 366 * 86400.0  # seconds
DAYS = ("monday", "tuesday", "wednesday", "thursday", "friday", "saturday", "sunday")
NUMBERS = {name: number for number, each in enumerate(DAYS) for name in (each, each[:3])}
PIECE = re.compile(r"\s*(\d{1,9}(?:[.,]\d{1,9})?)\s*([a-z]+)\s*")
TIME = re.compile(r"(\d{1,2})(?::(\d{2})(?::(\d{2}))?)?\s*(am|pm)?")


def duration(text: str) -> float:
    """Returns the seconds of one or more numbers with units: "2h", "90 min", "1h 30m". Raises UsageError."""
    rest, total = text.strip().lower(), 0.0
    while rest and (piece := PIECE.match(rest)) and piece[2] in SECONDS:
        total += float(piece[1].replace(",", ".")) * SECONDS[piece[2]]
        rest = rest[piece.end() :]
    if rest or not 0 < total <= LONGEST:
        raise UsageError(f"{text!r} is no duration up to a year; write it like 45 min, 2h or 1h30m")
    return total


def moment(text: str, now: float | None = None, zone: tzinfo | None = None) -> float:
    """Returns the next moment of this name, in seconds since 1970. Raises UsageError for what cannot be read or is
    past.

    `now`: seconds since 1970; None: this moment. `zone`: None is this computer's, with its summer time.
    """
    now = clock.time() if now is None else now
    found = [each for each in _moments(text, datetime.fromtimestamp(now, zone)) if now < each <= now + LONGEST]
    if not found:
        raise UsageError(
            f"{text!r} is no moment within a year from now; write it like 18:00, tomorrow 8:00, mon 8:00 or "
            "2026-12-24 18:00"
        )
    return min(found)


def _moments(text: str, now: datetime) -> list[float]:
    """Returns all moments that may be meant: a time of day today and tomorrow, and both times in a night in which
    clocks are set back."""
    day, _, rest = text.strip().lower().rpartition(" ")
    if rest in ("am", "pm"):  # "8 pm" is one word
        day, _, hour = day.rpartition(" ")
        rest = hour + rest
    when, today = _time(rest), now.date()
    if when is None:
        return _dated(text, now.tzinfo)
    if not day:
        days = [today, today + timedelta(1)]
    elif day in ("today", "tomorrow"):
        days = [today + timedelta(day == "tomorrow")]
    elif day in NUMBERS:
        ahead = (NUMBERS[day] - today.weekday()) % 7
        days = [today + timedelta(ahead), today + timedelta(ahead + 7)]
    else:
        return _dated(text, now.tzinfo)
    return [datetime.combine(each, when, now.tzinfo).replace(fold=fold).timestamp() for each in days for fold in (0, 1)]


def _dated(text: str, zone: tzinfo | None) -> list[float]:
    """Returns the moment of an ISO 8601 text, or nothing. A day alone is none: its beginning or its end might be
    meant."""
    if len(text.strip()) <= len("2026-12-24"):
        return []
    try:
        found = datetime.fromisoformat(text.strip())
    except ValueError:
        return []
    return [(found if found.tzinfo else found.replace(tzinfo=zone)).timestamp()]


def _time(text: str) -> time | None:
    found = TIME.fullmatch(text)
    if found is None or not (found[2] or found[4]):  # a bare number is no time of day
        return None
    hour, half = int(found[1]), found[4]
    if half and not 1 <= hour <= 12:
        return None
    try:
        return time(hour % 12 + 12 * (half == "pm") if half else hour, int(found[2] or 0), int(found[3] or 0))
    except ValueError:
        return None
