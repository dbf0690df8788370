"""The tables of a journal, derived from the record classes, and how a record becomes a row and comes back."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Protocol, TypeVar, get_args, get_type_hints

from swarmcli.journal.records import (
    EpochRecord,
    EventRecord,
    PeerRecord,
    Record,
    ReportRecord,
    RoundRecord,
    RunRecord,
)

APPLICATION_ID = 0x53574A4C  # "SWJL", in the header of the SQLite file
VERSION = 3  # of the tables; a journal of another one is refused by name

MAX_TEXT = 2000  # characters kept of any text, for peers choose some of it
MAX_INTEGER = 2**63 - 1  # what SQLite can hold


class Row(Protocol):
    def __getitem__(self, name: str, /) -> Any: ...


R = TypeVar("R", bound=Record)


@dataclass(frozen=True, slots=True)
class Table:
    """`key` empty: rows are numbered and only ever added. Otherwise a row with the same key is replaced, except for
    the columns in `keep` and for those in `highest`, which never fall."""

    name: str
    columns: Mapping[str, type]  # as SQLite stores them: int, float or str, in the order of the record's fields
    unlike: Mapping[str, type]  # columns that the record holds otherwise: bool, and tuple or Mapping (kept as JSON)
    optional: frozenset[str]  # columns that may be None
    key: tuple[str, ...] = ()
    keep: tuple[str, ...] = ()
    highest: tuple[str, ...] = ()
    index: tuple[str, ...] = ()


def _table(name: str, record_type: type[Any], **layout: tuple[str, ...]) -> Table:
    hints = get_type_hints(record_type)
    origins = {column: getattr(hint, "__origin__", hint) for column, hint in hints.items()}
    return Table(
        name,
        columns={field.name: _stored_as(hints[field.name]) for field in fields(record_type)},
        unlike={column: origin for column, origin in origins.items() if origin in (bool, tuple, Mapping)},
        optional=frozenset(column for column, hint in hints.items() if type(None) in get_args(hint)),
        **layout,
    )


def _stored_as(hint: Any) -> type:
    choices = [choice for choice in get_args(hint) if choice is not type(None)] or [hint]
    if choices[0] in (int, bool):
        return int
    return float if choices[0] is float else str


TABLES: Mapping[type[Any], Table] = {
    RunRecord: _table("runs", RunRecord, index=("run_id",)),
    EpochRecord: _table("epochs", EpochRecord, index=("run", "epoch")),
    RoundRecord: _table("rounds", RoundRecord, index=("run", "epoch")),
    PeerRecord: _table("peers", PeerRecord, key=("run", "peer"), keep=("first_seen",), highest=("epoch",)),
    EventRecord: _table("events", EventRecord, index=("run", "time")),
    ReportRecord: _table("reports", ReportRecord, key=("run", "peer", "epoch"), index=("run", "epoch")),
}


def to_row(record: Record) -> dict[str, Any]:
    """The record as values that SQLite takes whatever a peer put into them."""
    return {name: _clean(getattr(record, name)) for name in TABLES[type(record)].columns}


def _clean(value: Any) -> Any:
    match value:
        case str():
            return value[:MAX_TEXT].encode("utf-8", "replace").decode()
        case bool() | int():
            return max(-MAX_INTEGER, min(MAX_INTEGER, int(value)))
        case float():
            return value if math.isfinite(value) else None
        case tuple():
            return json.dumps(value)
        case Mapping():
            return json.dumps({str(key): _clean(each) for key, each in value.items()})
        case _:
            return value


def from_row(record_type: type[R], row: Row) -> R:
    """The inverse of `to_row`; a number that was not finite comes back as 0.0 where None is not allowed."""
    table = TABLES[record_type]
    values = {name: row[name] for name in table.columns}
    for name, kind in table.unlike.items():
        values[name] = _restore(kind, values[name])
    for name, kind in table.columns.items():
        if values[name] is None and name not in table.optional:
            values[name] = kind()
    return record_type(**values)


def _restore(kind: type, stored: Any) -> Any:
    if kind is bool:
        return bool(stored)
    value = json.loads(stored) if stored else []
    return tuple(value) if kind is tuple else dict(value)
