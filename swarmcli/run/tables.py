"""Writes lists as CSV or JSON, piece by piece, so that a million rows need no memory."""

from __future__ import annotations

import csv
import io
import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import fields
from typing import Any

from swarmcli.events import Contribution, EpochAdvanced, Evaluated, PeerSeen, RoundFinished
from swarmcli.journal import JournalReader, Line
from swarmcli.run.contributions import whole

EXPORTS: Mapping[str, type[Any]] = {  # list → the type of its rows
    "epochs": EpochAdvanced,
    "evaluations": Evaluated,
    "rounds": RoundFinished,
    "peers": PeerSeen,
    "contributions": Contribution,
    "events": Line,
}
# Where a formula begins: at the start of a text, and after what some spreadsheets take for the end of a cell. Those of
# countries that write 0,5 for a half split a line at semicolons, even within quotes.
_FORMULA = re.compile(r"(?:^|(?<=[;,|\t\r\n]))(?=[ ]*[=+\-@\t\r\n\uff1d\uff0b\uff0d\uff20])")


def rows_of(reader: JournalReader, run_id: str, name: str) -> Iterable[Any]:
    """Returns the rows of one of EXPORTS; long lists are read while they are taken."""
    match name:
        case "evaluations":
            return reader.evaluations(run_id)
        case "peers":
            return reader.peers(run_id)
        case "contributions":  # of a peer that keeps count; others have none
            return map(whole, reader.contributions(run_id))
        case _:
            return reader.every(run_id, name)


def csv_of(kind: type[Any], rows: Iterable[Any]) -> Iterator[bytes]:
    """Yields a header of `kind`'s fields, then the values of each row; lists and mappings as JSON, nothing for what is
    unknown. A text that a spreadsheet would take for a formula gets an apostrophe: peers choose their names."""
    names = [each.name for each in fields(kind)]
    buffer = io.StringIO()
    write: Callable[[Iterable[Any]], Any] = csv.writer(buffer).writerow
    write(names)
    for number, row in enumerate(rows, 1):
        write(_cell(getattr(row, name)) for name in names)
        if number % 500 == 0:
            yield _taken(buffer)
    yield _taken(buffer)


def json_of(kind: type[Any], rows: Iterable[Any]) -> Iterator[bytes]:
    """Yields the same as a JSON list of objects, in ASCII alone, which every terminal and pipe can take."""
    names = [each.name for each in fields(kind)]
    between = "["
    for row in rows:
        values = {name: _finite(getattr(row, name)) for name in names}
        yield f"{between}\n{json.dumps(values, default=_plain)}".encode()
        between = ","
    yield b"[]\n" if between == "[" else b"\n]\n"


def _plain(value: Any) -> Any:
    return dict(value) if isinstance(value, Mapping) else list(value)


def _finite(value: Any) -> Any:
    """JSON has no infinite numbers."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _taken(buffer: io.StringIO) -> bytes:
    text = buffer.getvalue()
    buffer.seek(0)
    buffer.truncate()
    return text.encode()


def _cell(value: Any) -> Any:
    match value:
        case None:
            return ""
        case tuple() | list():
            return json.dumps(value)
        case Mapping():
            return json.dumps(dict(value))
        case str():
            return _FORMULA.sub("'", value)
        case _:
            return value
