"""Keeps a journal below a size: the oldest rows of every list give way, a little of each at a time, until a tenth of
the size is free. What was added up (`sums`, `moments`), contributions and evaluations stay.

Of epochs long past every sixteenth keeps its place on the curve of the loss.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from swarmcli.journal.options import JOURNAL

if TYPE_CHECKING:
    from sqlite_utils import Database

LISTS = ("rounds", "events", "reports", "epochs")  # rows are numbered in the order in which they came
# Peers that left, and those that a start long ago last saw; a run's present peers are few, and known anyway.
GONE = "(gone != '' OR run < (SELECT max(id) FROM runs))"


class Retention:
    """Used by the thread that writes."""

    def __init__(self, limit: int = JOURNAL.size) -> None:
        """`limit`: bytes."""
        self.limit = max(limit, JOURNAL.least_size)
        self._trims = False  # until a tenth is free

    def trim(self, db: Database) -> bool:
        """Takes as many rows away as one call may, if the journal is too large, and gives free pages back to the
        system. Whether more has to go. Raises sqlite3.Error."""
        for _ in range(JOURNAL.trims_at_once):
            enough = self.limit * 0.9 if self._trims else self.limit
            self._trims = used_bytes(db) > enough and _step(db)
            if not self._trims:
                break
        db.executescript("PRAGMA incremental_vacuum(4096)")  # pages; `execute` frees one
        return self._trims


def _step(db: Database) -> bool:
    """One transaction, which takes the oldest rows of every list; false where nothing is left to give way."""
    went = False
    with db.atomic():
        for table in (*LISTS, "peers"):
            which = GONE if table == "peers" else "true"
            edges = (f"(SELECT {edge}(rowid) FROM {table} WHERE {which})" for edge in ("min", "max"))  # by the index
            first, last = db.execute(f"SELECT {', '.join(edges)}").fetchone()
            if first is not None and last > first:
                end = first + min(JOURNAL.rows_trimmed, (last - first) // 256)
                if table == "epochs":
                    _thin_curve(db, end)
                db.execute(f"DELETE FROM {table} WHERE rowid <= ? AND {which}", (end,))
                went = True
    return went


def used_bytes(db: Database) -> int:
    """Without pages that are free to be used again."""
    pages, free, size = (
        db.execute(f"PRAGMA {each}").fetchone()[0] for each in ("page_count", "freelist_count", "page_size")
    )
    return int((pages - free) * size)


def _thin_curve(db: Database, row: int) -> None:
    """Before the epochs up to this row go. What others claim of epochs to come, or of more old ones than anybody
    looks at, goes as well: it needs no row of this peer's own."""
    for run_id, reached in db.execute("SELECT run_id, reached FROM totals").fetchall():
        (gone,) = db.execute(
            "SELECT max(epoch) FROM epochs JOIN runs ON runs.id = epochs.run WHERE epochs.id <= ? AND run_id = ?",
            (row, run_id),
        ).fetchone()
        thinned = "DELETE FROM curve WHERE run_id = ? AND epoch <= ? AND epoch % 16 != 0"
        db.execute(thinned, (run_id, -1 if gone is None else gone))
        db.execute(f"{thinned} AND row IS NULL", (run_id, reached - 20_000))
        db.execute("DELETE FROM curve WHERE run_id = ? AND epoch > ?", (run_id, reached + 2))
