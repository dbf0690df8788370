"""The tables of a journal, one per type of value, and how a value becomes a row and comes back.

sqlite-utils makes and writes them, in the writer's thread alone, so verbs that only read start without it. `time` and
every other moment is wall-clock seconds since 1970 by this peer's clock.
"""

from __future__ import annotations

import json
import math
import sqlite3
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, get_args, get_type_hints

from swarmcli.errors import JournalError
from swarmcli.events import (
    Contribution,
    ContributionsCounted,
    EpochAdvanced,
    EpochReported,
    Evaluated,
    Event,
    PeerSeen,
    RoundFinished,
)
from swarmcli.journal.describe import Line
from swarmcli.journal.options import JOURNAL

if TYPE_CHECKING:
    from sqlite_utils import Database

APPLICATION_ID = 0x53574A4C  # "SWJL", in the header of the SQLite file
# The format of the tables; a journal of another format is refused by its number. A new column, for a field with a
# default, does not change the format: versions of swarm read each other's files, and one that knows the column adds it
# when it writes.
VERSION = 9
CONVERTED = (6, 7)  # read as they are, and converted to VERSION when they are written

MAX_INTEGER = 2**63 - 1  # what SQLite can hold


@dataclass(frozen=True, slots=True)
class RunRecord:
    """One start of one peer. Whoever opens a journal gives the first five fields, the journal fills in the others;
    `finished` stays None if the process died without closing it."""

    run_id: str
    role: str
    peer: str
    name: str = ""
    version: str = ""  # of swarm
    pid: int = 0
    started: float = 0.0
    last_seen: float = 0.0  # the journal's last sign of life
    finished: float | None = None
    outcome: str = ""  # how the process says it ended
    id: int = 0

    def goes_on(self, now: float) -> bool:
        """Whether a live process writes the journal: there is no end, and the last sign of life is younger than 15 s.
        If the clock was set meanwhile, the next sign, a moment later, is right again."""
        return self.finished is None and abs(now - self.last_seen) < 15


@dataclass(frozen=True, slots=True)
class Totals:
    """Sums over everything that the journal knows of one run."""

    epochs: int = 0
    own_samples: int = 0
    rounds_committed: int = 0
    rounds_failed: int = 0
    rounds_undecided: int = 0
    bytes_sent: int = 0
    bytes_received: int = 0


R = TypeVar("R", bound=RunRecord | Event)


class Row(Protocol):
    def __getitem__(self, name: str, /) -> Any: ...
    def keys(self) -> Iterable[str]: ...


@dataclass(frozen=True, slots=True)
class Table:
    """How rows are written. A row replaces one with the same key. But columns in `keep` stay, those in `highest` never
    fall, those in `added` are summed up, and an empty text leaves one in `filled` as it is. Rows whose key is `id` are
    numbered by it and, except for those of `runs`, are only ever added."""

    name: str
    hints: Mapping[str, Any]  # field → its type; a field is a column
    key: tuple[str, ...] = ("id",)
    keep: tuple[str, ...] = ()
    highest: tuple[str, ...] = ()
    added: tuple[str, ...] = ()
    filled: tuple[str, ...] = ()
    index: tuple[str, ...] = ()
    least: tuple[str, ...] = ()  # beyond JOURNAL.most_rows, rows with the least of these are removed; (): no such bound

    @property
    def columns(self) -> dict[str, type]:
        """The columns, each with the type that SQLite stores. Lists and mappings are stored as JSON."""
        columns = {name: _stored_as(hint) for name, hint in self.hints.items()}
        return columns if self.name == "runs" else {"run": int, **columns}

    def make(self, db: Database) -> None:
        """Makes the table; adds missing columns to one that an older swarm made."""
        table = db.table(self.name)
        table.create(self.columns, pk=self.key[0] if len(self.key) == 1 else self.key, if_not_exists=True)
        there = table.columns_dict
        for name, kind in self.columns.items():
            if name not in there:
                table.add_column(name, kind)
        if self.index:
            table.create_index(self.index, if_not_exists=True)

    def put(self, db: Database, rows: Iterable[dict[str, Any]]) -> None:
        """Adds rows, or merges them with those of the same key."""
        if self.key == ("id",):
            db.table(self.name).insert_all(({**row, "id": None} for row in rows), pk="id")  # SQLite numbers the rows
        elif not self.keep:  # a table without `keep` has no `highest` and no `added` either
            db.table(self.name).upsert_all(rows, pk=self.key)
        else:
            for row in rows:
                db.execute(self._merge, row)
        if self.least:
            db.execute(self._bound, [JOURNAL.most_rows])

    @property
    def _merge(self) -> str:
        """The statement that adds a row, or merges it with the one of its key."""
        names = list(self.columns)
        changed = ", ".join(self._changed(name) for name in names if name not in (*self.key, *self.keep))
        return (
            f"INSERT INTO {self.name} ({', '.join(names)}) VALUES ({', '.join(':' + name for name in names)}) "
            f"ON CONFLICT ({', '.join(self.key)}) DO UPDATE SET {changed}"
        )

    def _changed(self, name: str) -> str:
        old, new = f"{self.name}.{name}", f"excluded.{name}"
        if name in self.highest:
            return f"{name}=max({old}, {new})"
        if name in self.added:
            return f"{name}=coalesce({old}, 0) + coalesce({new}, 0)"
        return f"{name}=coalesce(nullif({new}, ''), {old})" if name in self.filled else f"{name}={new}"

    @property
    def _bound(self) -> str:
        """The statement that deletes rows beyond JOURNAL.most_rows."""
        beyond = f"max(0, (SELECT count(*) FROM {self.name}) - ?)"  # SQLite takes a negative limit for none
        return (
            f"DELETE FROM {self.name} WHERE rowid IN "
            f"(SELECT rowid FROM {self.name} ORDER BY {', '.join(self.least)} LIMIT {beyond})"
        )


def _table(name: str, kind: type[Any], **layout: tuple[str, ...]) -> Table:
    hints = get_type_hints(kind)
    # A row with a key of its own needs no id.
    return Table(name, {f.name: hints[f.name] for f in fields(kind) if f.name != "id" or "key" not in layout}, **layout)


def _stored_as(hint: Any) -> type:
    choices = [choice for choice in get_args(hint) if choice is not type(None)] or [hint]
    if choices[0] in (int, bool):
        return int
    return float if choices[0] is float else str


TABLES: Mapping[type[Any], Table] = {
    RunRecord: _table("runs", RunRecord, index=("run_id",)),
    EpochAdvanced: _table("epochs", EpochAdvanced, index=("run", "epoch")),
    Evaluated: _table("evaluations", Evaluated, index=("run", "epoch")),
    RoundFinished: _table("rounds", RoundFinished, index=("run", "epoch")),
    PeerSeen: _table("peers", PeerSeen, key=("run", "peer"), keep=("first_seen",), highest=("epoch",)),
    Line: _table("events", Line, index=("run", "time")),
    Contribution: _table(
        "contributions",
        Contribution,
        key=("run_id", "peer"),
        keep=("first",),
        highest=("last",),
        added=("samples", "hours", "rounds", "reduced_bytes", "uptime"),
        filled=("name", "team"),
        least=("samples", "reduced_bytes", "uptime"),
    ),
    ContributionsCounted: _table("books", ContributionsCounted, key=("run_id",)),
    EpochReported: _table("reports", EpochReported, key=("run", "peer", "epoch"), index=("run", "epoch")),
}


def to_row(value: RunRecord | Event) -> dict[str, Any]:
    """Returns the fields as values that SQLite takes, whatever a peer has put into them."""
    return {name: _clean(getattr(value, name)) for name in TABLES[type(value)].hints}


def _clean(value: Any) -> Any:
    match value:
        case str():
            return value[: JOURNAL.max_text].encode("utf-8", "replace").decode()
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


def from_row(kind: type[R], row: Row) -> R:
    """The inverse of `to_row`; a number that was not finite comes back as 0.0 where None is not allowed. Fields that an
    older swarm did not know have their defaults."""
    known = row.keys()
    return kind(**{name: _restore(hint, row[name]) for name, hint in TABLES[kind].hints.items() if name in known})


def _restore(hint: Any, stored: Any) -> Any:
    kind = getattr(hint, "__origin__", hint)
    if kind is bool:
        return bool(stored)
    if kind in (tuple, Mapping):
        value = json.loads(stored) if stored else []
        return tuple(value) if kind is tuple else dict(value)
    return _stored_as(hint)() if stored is None and type(None) not in get_args(hint) else stored


def version_of(connection: sqlite3.Connection, path: Path) -> int:
    """Returns VERSION or one of CONVERTED; 0 for an empty file. Raises JournalError for a file that is no journal, or
    has another format."""
    try:
        (application,) = connection.execute("PRAGMA application_id").fetchone()
        (version,) = connection.execute("PRAGMA user_version").fetchone()
        (tables,) = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
    except sqlite3.DatabaseError as error:
        if isinstance(error, sqlite3.OperationalError):
            raise
        raise JournalError(
            f"{path} is not a journal or is damaged ({error}); move it away and a new one is begun"
        ) from error
    if application == 0 and tables == 0:
        return 0
    if application != APPLICATION_ID:
        raise JournalError(f"{path} is a database of another program; name another file for the journal")
    if version not in (VERSION, *CONVERTED):
        age, fix = (
            ("a newer", "update swarm") if version > VERSION else ("an older", "move it away and a new one is begun")
        )
        raise JournalError(f"{path} was written by {age} swarm (format {version}, known here: {VERSION}); {fix}")
    return int(version)
