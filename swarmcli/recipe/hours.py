"""Hours of the week: `22:00-08:00, sat-sun 00:00-24:00`.

Hours are those of a clock on the wall. When clocks are turned back, 02:30 comes twice and counts twice; when they are
turned forward, it does not come at all. So neither night needs a rule of its own.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import datetime, tzinfo
from functools import lru_cache

DAY = 24 * 60  # minutes
WEEK = 7 * DAY
DAYS = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")
_NAMED = {"daily": (0, 6), "weekdays": (0, 4), "weekends": (5, 6), "weekend": (5, 6)}
_ENTRY = re.compile(r"(?P<days>[a-z]+(-[a-z]+)?)?(^|\s+|$)((?P<begin>[0-9:]+)-(?P<end>[0-9:]+))?")
_TIME = re.compile(r"([0-9]{1,2})(:([0-5][0-9]))?")
MOST_ENTRIES = 64
EXAMPLE = "write for example 22:00-08:00, or 22:00-08:00, sat-sun 00:00-24:00"


@dataclass(frozen=True)
class Hours:
    """Which minutes of a week count: one byte for each, from Monday 00:00 on."""

    week: bytes

    def hold(self, moment: float, zone: tzinfo | None = None) -> bool:
        """Whether that moment (seconds since 1970) is within the hours, where clocks show `zone`; None: this
        computer's."""
        local = datetime.fromtimestamp(moment, zone)
        return bool(self.week[local.weekday() * DAY + local.hour * 60 + local.minute])

    def next_change(self, moment: float, zone: tzinfo | None = None) -> float | None:
        """Returns the moment at which the hours begin or end next; None: never."""
        return self._next_change(int(moment // 60), zone)  # a peer asks each second

    @lru_cache(maxsize=8)  # noqa: B019  # as few hours are kept
    def _next_change(self, last: int, zone: tzinfo | None) -> float | None:
        if len(set(self.week)) == 1:
            return None
        now, minute = self.hold(last * 60, zone), (last + 1) * 60
        # Looking at each minute is right also in nights in which clocks are turned, since those changes come at full
        # minutes. It looks a day further than a week, since such a night may swallow the hour that it looks for.
        return next(
            (float(at) for at in range(minute, minute + (WEEK + DAY) * 60, 60) if self.hold(at, zone) != now), None
        )


def parse_hours(text: str) -> Hours:
    """Reads hours. Raises ValueError with what to write instead."""
    week = bytearray(WEEK)
    entries = re.split(r"[,;]", text.lower().replace("–", "-"))
    if len(entries) > MOST_ENTRIES:
        raise ValueError(f"has more than {MOST_ENTRIES} entries; {EXAMPLE}")
    for entry in entries:
        first, last, begin, end = _entry(re.sub(r"\s*-\s*", "-", entry.strip()))
        for day in range(first, last + 1):
            for minute in range(begin, end):  # hours over midnight end on the next day; those of Sunday, on Monday
                week[(day * DAY + minute) % WEEK] = 1
    return Hours(bytes(week))


def _entry(text: str) -> tuple[int, int, int, int]:
    """Returns the first and last day, and minutes of a day: the begin, and the end, which may lie on the next day
    (above DAY)."""
    found = _ENTRY.fullmatch(text) if text else None
    if found is None:
        raise ValueError(f"{text!r} names no hours; {EXAMPLE}")
    first, last = _days(found["days"])
    if not found["begin"]:
        return first, last, 0, DAY
    begin, end = _minute(found["begin"]), _minute(found["end"])
    if begin == end:
        raise ValueError(f"{text!r} ends when it begins; write 00:00-24:00 for a whole day")
    return first, last, begin, end if end > begin else end + DAY


def _days(text: str | None) -> tuple[int, int]:
    """Returns the first and last day. The last one may be counted beyond Sunday: `sat-mon` is three days."""
    if not text or text in _NAMED:
        return _NAMED[text or "daily"]
    names = [name[:3] if name in (*DAYS, *_LONG) else name for name in text.split("-")]
    if not set(names) <= set(DAYS):
        raise ValueError(f"{text!r} names no days; write mon, tue, wed, thu, fri, sat, sun, or a range like mon-fri")
    first, last = DAYS.index(names[0]), DAYS.index(names[-1])
    return first, last if last >= first else last + 7


_LONG = ("monday", "tuesday", "wednesday", "thursday", "friday", "saturday", "sunday")


def _minute(text: str) -> int:
    found = _TIME.fullmatch(text)
    minute = int(found[1]) * 60 + int(found[3] or 0) if found else DAY + 1
    if minute > DAY:
        raise ValueError(f"{text!r} is no time of a day; write for example 08:00, at most 24:00")
    return minute
