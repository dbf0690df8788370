"""Whether a SQLite file is a journal, and one that this version can use."""

from __future__ import annotations

import sqlite3
from pathlib import Path

from swarmcli.errors import JournalError
from swarmcli.journal.schema import APPLICATION_ID, VERSION


def check(connection: sqlite3.Connection, path: Path) -> bool:
    """Whether the file holds a journal; False for an empty one. Raises JournalError for anything else."""
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
        return False
    if application != APPLICATION_ID:
        raise JournalError(f"{path} is a database of another program; name another file for the journal")
    if version > VERSION:
        raise JournalError(
            f"{path} was written by a newer swarm (format {version}, known here: {VERSION}); update swarm"
        )
    if version < VERSION:
        raise JournalError(
            f"{path} was written by an older swarm (format {version}, known here: {VERSION}); move it away and a new "
            "one is begun"
        )
    return True
