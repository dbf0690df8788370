"""What a volunteer lends at most, and when: one type for the recipe, the user's file, the command line and the local
API.

Values are kept in base units: bytes, bytes per second, shares between 0 and 1, minutes, degrees. They are read from
what people write ("2 MB/s", "50%", "10 min") and shown by `as_text` in the same form. A field that is None has no
limit.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import tzinfo
from functools import lru_cache
from typing import Annotated, Any
from zoneinfo import ZoneInfo

from pydantic import BeforeValidator, Field, field_validator

from swarmcli.network.rates import LEAST_RATE
from swarmcli.recipe.hours import Hours, parse_hours
from swarmcli.recipe.section import Section, own
from swarmcli.words import amount

LEAST_SIZE = float(1 << 20)
LEAST_SHARE = 0.01
LONGEST_TEXT = 200  # characters of a value
NO_LIMIT = frozenset(("", "none", "null", "no", "off", "false", "unlimited", "no limit"))

_PREFIXES = {
    "": 1.0,
    "k": 1e3,
    "m": 1e6,
    "g": 1e9,
    "t": 1e12,
    "ki": 2.0**10,
    "mi": 2.0**20,
    "gi": 2.0**30,
    "ti": 2.0**40,
}
_QUANTITY = re.compile(r"([0-9]+(?:[.][0-9]+)?(?:e[-+]?[0-9]+)?)\s*([^0-9\s].*)?", re.IGNORECASE)


def _split(value: Any) -> tuple[float, str]:
    """A number, and the unit behind it. Raises ValueError for anything else."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return float(value), ""
    found = _QUANTITY.fullmatch(value.strip()[:LONGEST_TEXT]) if isinstance(value, str) else None
    if found is None:
        raise ValueError
    return float(found[1]), (found[2] or "").strip()


def _bytes(number: float, unit: str) -> float:
    """A size in bytes. `MB` is a million bytes, `MiB` 2²⁰; a small b means bits."""
    prefix, kind = (unit[:-1], unit[-1:]) if unit[-1:] in ("B", "b") else (unit, "B")
    return number * _PREFIXES[prefix.strip().lower()] / (1 if kind == "B" else 8)


def _read_rate(value: Any) -> float:
    try:
        number, unit = _split(value)
        unit = re.sub(r"(/s|ps| a second)$", "", unit.strip(), flags=re.IGNORECASE)
        unit = re.sub(r"bits?$", "b", unit, flags=re.IGNORECASE)
        rate = _bytes(number, unit)
    except (ValueError, KeyError, OverflowError):
        raise ValueError(
            f"{_shown(value)} is no rate; write for example 2 MB/s, 500 kB/s, 10 Mbit/s, or none"
        ) from None
    if not LEAST_RATE <= rate < 1e12:
        raise ValueError(
            f"{_shown(value)} is {'too fast to be meant' if rate >= 1e12 else 'too slow for a peer to stay in a run'}; "
            "write for example 2 MB/s, at least 5 kB/s, or none"
        )
    return rate


def _read_share(value: Any) -> float:
    try:
        number, unit = _split(value)
        if unit not in ("", "%"):
            raise ValueError
    except (ValueError, OverflowError):
        raise ValueError(f"{_shown(value)} is no share; write for example 50%, or none") from None
    share = number / 100 if unit else number
    if not LEAST_SHARE <= share <= 1:
        hint = f"{number:g}%" if 1 < number <= 100 and not unit else "50%"
        raise ValueError(
            f"{_shown(value)} is no share from 1% to 100%; write for example {hint} (`swarm pause` stops all)"
        )
    return share


def _read_amount(value: Any) -> float:
    """Bytes; or, at most 1, a share of what there is."""
    try:
        number, unit = _split(value)
        if unit == "%" or (not unit and number <= 1):
            return _read_share(value)
        size = _bytes(number, re.sub("bytes?$", "B", unit, flags=re.IGNORECASE))
        if unit.endswith("b") or not LEAST_SIZE <= size < 1e18:
            raise ValueError
    except (ValueError, KeyError, OverflowError):
        raise ValueError(f"{_shown(value)} is no size; write for example 8 GB, 500 MiB, 50%, or none") from None
    return size


_MINUTES = {
    "": 1.0,
    "min": 1.0,
    "minute": 1.0,
    "minutes": 1.0,
    "m": 1.0,
    "s": 1 / 60,
    "h": 60.0,
    "hour": 60.0,
    "hours": 60.0,
}


def _read_minutes(value: Any) -> float:
    if value is True or (isinstance(value, str) and value.strip().lower() in ("yes", "true", "on")):
        return 5.0  # minutes without keyboard and mouse
    try:
        number, unit = _split(value)
        minutes = number * _MINUTES[unit.lower()]
        if not 0 < minutes <= 24 * 60:
            raise ValueError
    except (ValueError, KeyError, OverflowError):
        raise ValueError(
            f"{_shown(value)} is no time without keyboard and mouse; write for example 10 min, or no"
        ) from None
    return minutes


def _read_degrees(value: Any) -> float:
    try:
        number, unit = _split(value)
        if unit.replace("°", "").strip().lower() not in ("", "c") or not 30 <= number <= 120:
            raise ValueError
    except (ValueError, OverflowError):
        raise ValueError(
            f"{_shown(value)} is no temperature from 30 to 120 °C; write for example 80, or none"
        ) from None
    return number


def _read_hours(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{_shown(value)} names no hours; write for example 22:00-08:00, or none")
    hours_of(value)
    return " ".join(value.split())


def _read_zone(value: Any) -> str:
    try:
        return ZoneInfo(str(value).strip()[:LONGEST_TEXT]).key
    except (ValueError, OSError, KeyError):  # KeyError: ZoneInfoNotFoundError
        raise ValueError(
            f"{_shown(value)} is no time zone; write for example Europe/Berlin, or none for this computer's"
        ) from None


def _shown(value: Any) -> str:
    return repr(value)[:60]


@lru_cache(maxsize=8)
def hours_of(text: str) -> Hours:
    """Raises ValueError."""
    return parse_hours(text[:1000])


Rate = Annotated[float, BeforeValidator(_read_rate)]
Share = Annotated[float, BeforeValidator(_read_share)]
Amount = Annotated[float, BeforeValidator(_read_amount)]
Minutes = Annotated[float, BeforeValidator(_read_minutes)]
Degrees = Annotated[float, BeforeValidator(_read_degrees)]
HoursText = Annotated[str, BeforeValidator(_read_hours)]
Zone = Annotated[str, BeforeValidator(_read_zone)]


class Limits(Section):
    """What the peers of this computer take together at most, and when they run. None: no limit.

    `model_fields_set` names what somebody has written: a limit that is written as `none` takes away a weaker one.
    """

    upload: Rate | None = own(None, "bytes per second that are sent at most, for example 2 MB/s or 10 Mbit/s")
    download: Rate | None = own(None, "bytes per second that are received at most")
    processor: Share | None = own(None, "share of the time in which the processors compute, for example 50%")
    threads: Annotated[int, Field(ge=1, le=4096)] | None = own(None, "processor threads that compute at most")
    gpu: Share | None = own(None, "share of the time in which the graphics card computes")
    gpu_memory: Amount | None = own(None, "of the graphics card's memory at most: 6 GB, or 50%")
    memory: Amount | None = own(None, "of this computer's memory at most: 8 GB, or 50%")
    disk: Amount | None = own(None, "that the files of a run take at most: 20 GB, or 10%")
    hours: HoursText | None = own(None, "when it runs: `22:00-08:00, sat-sun 00:00-24:00`")
    time_zone: Zone | None = own(None, "of these hours, for example Europe/Berlin; null: as this computer's clock")
    only_when_idle: Minutes | None = own(
        None, "runs only after so many minutes without keyboard and mouse, while other programs need little; yes: 5"
    )
    busy_above: Share = own(0.25, "share of the processors that other programs may use while it counts as idle")
    on_battery: bool | None = own(None, "no: pauses on battery")
    on_metered: bool | None = own(None, "no: pauses while the network is one that is paid by volume")
    temperature: Degrees | None = own(None, "pauses at this many °C, and goes on when it is 5 °C cooler")

    @field_validator("*", mode="before")
    @classmethod
    def _none_in_words(cls, value: Any, info: Any) -> Any:
        word = value.strip().lower() if isinstance(value, str) else "none" if value is None else value
        if info.field_name == "busy_above":
            return 0.25 if value is None else value
        if info.field_name in ("on_battery", "on_metered"):
            return None if word in ("none", "null", "") else value
        return None if value is False or (isinstance(word, str) and word in NO_LIMIT) else value

    @property
    def zone(self) -> tzinfo | None:
        return ZoneInfo(self.time_zone) if self.time_zone else None

    @property
    def when(self) -> Hours | None:
        """`hours`, understood."""
        return hours_of(self.hours) if self.hours else None

    @property
    def link(self) -> float | None:
        """The lower of the two limits of the link, in bytes per second: a round goes both ways."""
        return min((rate for rate in (self.upload, self.download) if rate is not None), default=None)

    @property
    def written(self) -> dict[str, Any]:
        """What somebody has written, in base units."""
        return {key: getattr(self, key) for key in type(self).model_fields if key in self.model_fields_set}


KEYS = tuple(Limits.model_fields)


def merged(*layers: Limits | Mapping[str, Any]) -> Limits:
    """Limits of several layers, the weakest first."""
    values: dict[str, Any] = {}
    for layer in layers:
        values |= layer.written if isinstance(layer, Limits) else layer
    return Limits.model_validate(values)


def amount_of(limit: float | None, whole: float) -> float | None:
    """In bytes, of a limit that is a size or a share of `whole`."""
    return None if limit is None else limit * whole if limit <= 1 else limit


# In words


def as_text(key: str, value: Any) -> str:
    """A limit as a person would write it; it is read again as the same value, to six digits."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if key in ("upload", "download"):
        return f"{amount(value, 6)}/s"
    if key in ("processor", "gpu", "busy_above") or (key in ("gpu_memory", "memory", "disk") and value <= 1):
        return f"{value * 100:.6g}%"
    if key in ("gpu_memory", "memory", "disk"):
        return amount(value, 6)
    unit = {"only_when_idle": " min", "temperature": " °C"}.get(key, "")
    return f"{value:g}{unit}" if isinstance(value, float) else f"{value}{unit}"


_WORDS = {
    "upload": "sends at most {}",
    "download": "receives at most {}",
    "processor": "the processors compute {} of the time",
    "threads": "at most {} processor threads",
    "gpu": "the graphics card computes {} of the time",
    "gpu_memory": "at most {} of the graphics card's memory",
    "memory": "at most {} of memory",
    "disk": "at most {} of disk",
    "hours": "runs {}",
    "only_when_idle": "runs after {} without keyboard and mouse",
    "temperature": "pauses at {}",
}


def in_words(limits: Limits) -> list[str]:
    """Those that are set, as phrases for people."""
    said = [words.format(as_text(key, getattr(limits, key))) for key, words in _WORDS.items() if getattr(limits, key)]
    said += ["pauses on battery"] if limits.on_battery is False else []
    return said + (["pauses on a metered network"] if limits.on_metered is False else [])
