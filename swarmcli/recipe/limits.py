"""The most that a volunteer lends, and when: one type for the recipe, the user's file, the command line and the local
API.

Values are kept in base units: bytes, bytes per second, shares between 0 and 1, minutes, degrees. They are read from
what people write ("2 MB/s", "50%", "10 min") and shown by `as_text` in the same form. A field that is None has no
limit.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import lru_cache
from typing import Annotated, Any

from pydantic import BeforeValidator, ByteSize, field_validator

from swarmcli.network.rates import LEAST_RATE
from swarmcli.recipe.hours import Hours, parse_hours
from swarmcli.recipe.section import Section, own

LONGEST_TEXT = 200  # characters of a value
NO_LIMIT = frozenset(("", "none", "null", "no", "off", "false", "unlimited", "no limit"))
_QUANTITY = re.compile(r"([0-9]+(?:[.][0-9]+)?(?:e[-+]?[0-9]+)?)\s*([^0-9\s].*)?", re.IGNORECASE)
_IN_BITS = re.compile(r"(?i:bits?)$|b$")  # MB are bytes, Mb and Mbit bits


def _reader(
    factor: Callable[[str], float], least: float, most: float, what: str, example: str, below: str = "", above: str = ""
) -> Callable[[Any], float]:
    """Returns a function that reads a number and its unit; `factor` says how many base units the unit is, or raises
    KeyError. `below`, `above`: what a number under `least` or over `most` base units is; "": it is no `what`."""

    def read(value: Any) -> float:
        found = _QUANTITY.fullmatch(str(value).strip()[:LONGEST_TEXT])
        try:
            number = float(found[1]) * factor((found[2] or "").strip()) if found else math.nan
        except KeyError:
            number = math.nan
        if least <= number <= most:
            return number
        wrong = (below if number < least else above if number > most else "") or f"no {what}"
        raise ValueError(f"{_shown(value)} is {wrong}; write for example {example}")

    return read


def _bytes(unit: str) -> float:
    unit = re.sub(r"bytes?$", "b", unit.lower())
    return ByteSize.byte_sizes[unit if unit in ByteSize.byte_sizes else f"{unit}b"]


def _bytes_in_size(unit: str) -> float:
    if _IN_BITS.search(unit):
        raise KeyError(unit)
    return _bytes(unit)


def _bytes_per_second(unit: str) -> float:
    return _bytes(_IN_BITS.sub("bit", re.sub(r"(?i)\s*(/s|ps| a second)$", "", unit)))


_SHARES = {"%": 0.01, "": 1.0}
_MINUTES = {"s": 1 / 60} | dict.fromkeys(("h", "hour", "hours"), 60.0)
_MINUTES |= dict.fromkeys(("", "m", "min", "minute", "minutes"), 1.0)
_DEGREES = {"": 1.0, "c": 1.0, "°": 1.0, "°c": 1.0, "° c": 1.0}
_read_rate = _reader(
    _bytes_per_second,
    LEAST_RATE,
    1e12,
    "rate",
    "2 MB/s, 500 kB/s, 10 Mbit/s, at least 5 kB/s, or none",
    "too slow for a peer to stay in a run",
    "too fast to be meant",
)
_read_share = _reader(_SHARES.__getitem__, 0.01, 1.0, "share from 1% to 100%", "50%, or none (`swarm pause` stops all)")
_read_size = _reader(_bytes_in_size, 1 << 20, 1e18, "size", "8 GB, 500 MiB, 50%, or none")
read_journal_size = _reader(
    _bytes_in_size, 10_000_000, 1e18, "size", "500 MB", "less than a journal takes, which is 10 MB"
)
_read_minutes = _reader(
    lambda unit: _MINUTES[unit.lower()], 1 / 60, 24 * 60, "time without keyboard and mouse", "10 min, or no"
)
_read_degrees = _reader(lambda unit: _DEGREES[unit.lower()], 30, 120, "temperature from 30 to 120 °C", "80, or none")


def _read_amount(value: Any) -> float:
    """Returns bytes or, if at most 1, a share of what there is."""
    with suppress(ValueError):
        return _read_share(value)
    return _read_size(value)


def _read_idle(value: Any) -> float:
    return _read_minutes(5.0 if str(value).strip().lower() in ("yes", "true", "on") else value)


def _read_hours(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{_shown(value)} names no hours; write for example 22:00-08:00, or none")
    hours_of(value)
    return " ".join(value.split())


def _shown(value: Any) -> str:
    return repr(value)[:60]


@lru_cache(maxsize=8)
def hours_of(text: str) -> Hours:
    """Returns the hours that a text names. Raises ValueError."""
    return parse_hours(text[:1000])


def limit(default: Any, unit: str, phrase: str, meaning: str) -> Any:
    """Makes a field. `unit`: in which `as_text` shows it; `phrase`: the words of `in_words` for a limit that is set,
    where `{}` stands for the value. `in_words` leaves out a limit that is True."""
    field = own(default, meaning)
    field.json_schema_extra |= {"unit": unit, "phrase": phrase}
    return field


Rate = Annotated[float, BeforeValidator(_read_rate)]
Share = Annotated[float, BeforeValidator(_read_share)]
Amount = Annotated[float, BeforeValidator(_read_amount)]


class Limits(Section):
    """The most that the peers of this computer take together, and when they run. None: no limit.

    A field that says yes or no (`bool | None`) limits where it is False, for example `on_battery: no`; of any other one
    `no` takes the limit away.

    `model_fields_set` names what somebody has written: a limit that is written as `none` takes away a weaker one.
    """

    upload: Rate | None = limit(
        None, "B/s", "sends at most {}", "bytes per second that are sent at most, for example 2 MB/s or 10 Mbit/s"
    )
    download: Rate | None = limit(None, "B/s", "receives at most {}", "bytes per second that are received at most")
    processor: Share | None = limit(
        None,
        "%",
        "the processors compute {} of the time",
        "share of the time in which the processors compute, for example 50%",
    )
    gpu: Share | None = limit(
        None, "%", "the graphics card computes {} of the time", "share of the time in which the graphics card computes"
    )
    memory: Amount | None = limit(None, "B", "at most {} of memory", "of this computer's memory at most: 8 GB, or 50%")
    disk: Amount | None = limit(None, "B", "at most {} of disk", "that the files of a run take at most: 20 GB, or 10%")
    hours: Annotated[str, BeforeValidator(_read_hours)] | None = limit(
        None, "", "runs {}", "when it runs: `22:00-08:00, sat-sun 00:00-24:00`"
    )
    only_when_idle: Annotated[float, BeforeValidator(_read_idle)] | None = limit(
        None,
        " min",
        "runs after {} without keyboard and mouse",
        "runs only after so many minutes without keyboard and mouse, while other programs need little; yes: 5",
    )
    on_battery: bool | None = limit(None, "", "pauses on battery", "no: pauses on battery")
    on_metered: bool | None = limit(
        None, "", "pauses on a metered network", "no: pauses while the network is one that is paid by volume"
    )
    temperature: Annotated[float, BeforeValidator(_read_degrees)] | None = limit(
        None,
        " °C",
        "pauses at {}",
        "pauses when the processor or a graphics card has this many °C, and goes on when it is 5 °C cooler",
    )

    @field_validator("*", mode="before")
    @classmethod
    def _none_in_words(cls, value: Any, info: Any) -> Any:
        word = value.strip().lower() if isinstance(value, str) else "none" if value is None else value
        if cls.model_fields[info.field_name].annotation == bool | None:  # `no` is the limit
            return None if word in ("none", "null", "") else value
        lifted = value is False or (isinstance(word, str) and word in NO_LIMIT)
        return None if lifted else value

    @property
    def when(self) -> Hours | None:
        """`hours`, parsed."""
        return hours_of(self.hours) if self.hours else None

    @property
    def link(self) -> float | None:
        """The lower of the line's two limits, in bytes per second: a round goes both ways."""
        return min((rate for rate in (self.upload, self.download) if rate is not None), default=None)

    @property
    def written(self) -> dict[str, Any]:
        """What somebody has written, in base units."""
        return {key: getattr(self, key) for key in type(self).model_fields if key in self.model_fields_set}


KEYS = tuple(Limits.model_fields)
FORMER = {  # limits of former versions: what to do instead
    "threads": "`--set local.threads=4` is that of one peer, and `swarm limits set processor=50%` of all",
    "gpu_memory": "`swarm limits set gpu=50%` lends half of the card's time",
    "time_zone": "hours are those of this computer's clock",
    "busy_above": "with only_when_idle other programs may use a quarter of the processors",
}


def merged(*layers: Limits | Mapping[str, Any]) -> Limits:
    """Merges limits of several layers, the weakest first."""
    values: dict[str, Any] = {}
    for layer in layers:
        values |= layer.written if isinstance(layer, Limits) else layer
    return Limits.model_validate(values)


def amount_of(limit: float | None, whole: float) -> float | None:
    """Returns the bytes of a limit that is a size or a share of `whole`."""
    return None if limit is None else limit * whole if limit <= 1 else limit


# In words

_SCALES = ((1e9, "G"), (1e6, "M"), (1e3, "k"))


def as_text(key: str, value: Any) -> str:
    """Returns a limit as a person would write it; it is read again as the same value, to six digits."""
    unit = _shown_as(key, "unit")
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if unit == "%" or (unit == "B" and value <= 1):
        return f"{value * 100:.6g}%"
    if unit in ("B", "B/s"):
        scale, prefix = next((each for each in _SCALES if value >= each[0]), (1.0, ""))
        return f"{value / scale:.6g} {prefix}B{unit[1:]}"
    return f"{value:g}{unit}" if isinstance(value, float) else f"{value}{unit}"


def in_words(limits: Limits) -> list[str]:
    """Returns the limits that are set, as phrases for people."""
    return [
        phrase.format(as_text(key, value))
        for key, value in limits
        if (phrase := _shown_as(key, "phrase")) and value is not None and value is not True
    ]


def _shown_as(key: str, what: str) -> str:
    extra = Limits.model_fields[key].json_schema_extra
    return str(extra[what]) if isinstance(extra, dict) else ""
