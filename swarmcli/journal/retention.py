"""Keeps a journal below a size: the oldest rows give way, a sixteenth of each list at a time, until a tenth of the size
is free. What was added up (`sums`, `moments`), contributions and evaluations stay.

Of epochs long past every sixteenth keeps its place on the curve of the loss.
"""

from __future__ import annotations

import sqlite3
from dataclasses import dataclass

DEFAULT_BYTES = 500_000_000
LEAST_BYTES = 10_000_000
ROWS_AT_ONCE = 5000  # in one transaction, so that nobody waits for long
STEPS_AT_ONCE = 40  # transactions before records that wait are written again
WAL_BYTES = 16_000_000  # that the file beside the journal keeps

LISTS = ("rounds", "events", "reports", "epochs")  # rows are numbered in the order in which they came
# Who left, and what a start long ago last saw; a run's present peers are few, and known anyway.
GONE = "(gone != '' OR run < (SELECT max(id) FROM runs))"


@dataclass(slots=True)
class _Cut:
    """Rows of a table up to a number, in the order in which they go."""

    table: str
    next: int
    last: int


class Retention:
    """Used by the thread that writes. A cut that is under way goes on at the next call."""

    def __init__(self, limit: int = DEFAULT_BYTES) -> None:
        """`limit`: bytes."""
        self.limit = max(limit, LEAST_BYTES)
        self._cuts: list[_Cut] = []

    def trim(self, connection: sqlite3.Connection) -> bool:
        """Takes as many rows away as one call may, if the journal is too large, and gives free pages back to the
        system. Whether more has to go. Raises sqlite3.Error."""
        if not self._cuts and used_bytes(connection) > self.limit:
            self._cuts = _cuts(connection)
        for _ in range(STEPS_AT_ONCE):
            if not self._cuts:
                break
            self._step(connection)
            if not self._cuts and used_bytes(connection) > self.limit * 0.9:
                self._cuts = _cuts(connection)
        connection.executescript("PRAGMA incremental_vacuum(4096)")  # pages; `execute` frees one
        return bool(self._cuts)

    def _step(self, connection: sqlite3.Connection) -> None:
        """One transaction."""
        cut = self._cuts[0]
        end = min(cut.last, cut.next + ROWS_AT_ONCE - 1)
        which = f" AND {GONE}" if cut.table == "peers" else ""
        with connection:
            if cut.table == "epochs":
                _thin_curve(connection, end)
            connection.execute(f"DELETE FROM {cut.table} WHERE rowid <= ?{which}", (end,))
        cut.next = end + 1
        if cut.next > cut.last:
            self._cuts.pop(0)


def used_bytes(connection: sqlite3.Connection) -> int:
    """Without pages that are free to be used again."""
    pages, free, size = (
        connection.execute(f"PRAGMA {each}").fetchone()[0] for each in ("page_count", "freelist_count", "page_size")
    )
    return int((pages - free) * size)


def _cuts(connection: sqlite3.Connection) -> list[_Cut]:
    """The oldest part of every list; empty where nothing is left to give way."""
    cuts = []
    for table in (*LISTS, "peers"):
        where = f"WHERE {GONE}" if table == "peers" else ""
        first, last = connection.execute(f"SELECT min(rowid), max(rowid) FROM {table} {where}").fetchone()
        if first is not None and last > first:
            cuts.append(_Cut(table, first, first + (last - first) // 16))
    return cuts


def _thin_curve(connection: sqlite3.Connection, row: int) -> None:
    """Before the epochs up to this row go. What others claim of epochs to come, or of more old ones than anybody
    looks at, goes as well: it needs no row of this peer's own."""
    for run_id, reached in connection.execute("SELECT run_id, reached FROM totals").fetchall():
        (gone,) = connection.execute(
            "SELECT max(epoch) FROM epochs JOIN runs ON runs.id = epochs.run WHERE epochs.id <= ? AND run_id = ?",
            (row, run_id),
        ).fetchone()
        thinned = "DELETE FROM curve WHERE run_id = ? AND epoch <= ? AND epoch % 16 != 0"
        connection.execute(thinned, (run_id, -1 if gone is None else gone))
        connection.execute(f"{thinned} AND row IS NULL", (run_id, reached - 20_000))
        connection.execute("DELETE FROM curve WHERE run_id = ? AND epoch > ?", (run_id, reached + 2))
