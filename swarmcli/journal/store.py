"""The SQLite file as the writer sees it: opened, checked to be a journal, written in transactions."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from swarmcli.journal.records import Record, RunRecord
from swarmcli.journal.schema import APPLICATION_ID, TABLES, VERSION, Table, to_row
from swarmcli.journal.validity import check

if TYPE_CHECKING:
    import sqlite_utils

BUSY_SECONDS = 2.0  # another writer is waited for this long before the batch is put off


class Store:
    """Used by one thread at a time, the writer's. Errors of SQLite come out as they are: the writer retries."""

    def __init__(self, path: Path, run: RunRecord) -> None:
        self._path = path
        self._database: sqlite_utils.Database | None = None
        self._file: tuple[int, int] = (0, 0)
        self.run = run  # its id is that of the row in the file that was written last

    def write(self, batch: Sequence[Record], now: float, outcome: str | None = None) -> None:
        """Adds all records in one transaction, or none of them. `now` becomes the run's last sign of life, and with
        an `outcome` its end."""
        database = self._open()
        with database.atomic():
            run = replace(self.run, last_seen=now)
            if outcome is not None:
                run = replace(run, finished=now, outcome=outcome)
            run_id = self._write_run(database, run)
            for record_type, records in groupby(batch, key=type):
                _write_rows(database, record_type, ({**to_row(record), "run": run_id} for record in records))
        self.run = replace(run, id=run_id)

    def _write_run(self, database: sqlite_utils.Database, run: RunRecord) -> int:
        values = to_row(run)
        del values["id"]
        if run.id:
            database["runs"].update(run.id, values)
            return run.id
        return int(database["runs"].insert(values).last_pk)

    def _open(self) -> sqlite_utils.Database:
        if self._database is not None and self._file != _identity(self._path):
            self.close()  # somebody took the file away under us; a new one begins with the run's own row
            self.run = replace(self.run, id=0)
        if self._database is None:
            self._database = open_for_writing(self._path)
            self._file = _identity(self._path)
        return self._database

    def close(self) -> None:
        if self._database is not None:
            self._database.close()
            self._database = None


def _identity(path: Path) -> tuple[int, int]:
    try:
        status = path.stat()
    except OSError:
        return (0, 0)
    return (status.st_dev, status.st_ino)


def open_for_writing(path: Path) -> sqlite_utils.Database:
    """Opens or makes a journal. Raises JournalError for a file that is something else, sqlite3.Error for a disk that
    is full, read-only or locked."""
    import sqlite_utils  # here, since reading a journal and `swarm --help` can do without the half second it takes

    with ExitStack() as on_error:
        connection = sqlite3.connect(path, timeout=BUSY_SECONDS, check_same_thread=False)
        on_error.callback(connection.close)
        if not check(connection, path):
            _lay_out(sqlite_utils.Database(connection, execute_plugins=False))
        connection.execute("PRAGMA synchronous=NORMAL")  # a killed process loses nothing by that, a power cut seconds
        on_error.pop_all()
    return sqlite_utils.Database(connection, execute_plugins=False)


def _lay_out(database: sqlite_utils.Database) -> None:
    database.enable_wal()
    with database.atomic():
        for table in TABLES.values():
            made = database[table.name].create(table.columns, pk=(table.key or "id"), if_not_exists=True)
            if table.index:
                made.create_index(table.index, if_not_exists=True)
        database.execute(f"PRAGMA application_id={APPLICATION_ID}")
        database.execute(f"PRAGMA user_version={VERSION}")


def _write_rows(database: sqlite_utils.Database, record_type: type[Record], rows: Iterable[dict[str, Any]]) -> None:
    table = TABLES[record_type]
    if table.key:
        database.conn.executemany(_upsert(table, list(table.columns)), rows)
    else:
        numbered = ({name: value for name, value in row.items() if name != "id"} for row in rows)
        database[table.name].insert_all(numbered)


def _upsert(table: Table, names: Sequence[str]) -> str:
    """sqlite-utils can replace a row but not keep some of its columns."""
    fixed = {*table.key, *table.keep}
    changed = ", ".join(
        f"{name}=max({table.name}.{name}, excluded.{name})" if name in table.highest else f"{name}=excluded.{name}"
        for name in names
        if name not in fixed
    )
    return (
        f"INSERT INTO {table.name} ({', '.join(names)}) VALUES ({', '.join(':' + name for name in names)}) "
        f"ON CONFLICT ({', '.join(table.key)}) DO UPDATE SET {changed}"
    )
