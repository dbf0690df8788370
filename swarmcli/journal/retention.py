"""Keeps a journal below a size: the oldest rows of every list are removed, a few of each at a time, until a tenth of
the size is free. Sums (`sums`, `moments`), contributions and evaluations stay.

Of epochs long past, every sixteenth keeps its place on the curve of the loss.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from swarmcli.journal.options import JOURNAL

if TYPE_CHECKING:
    from sqlite_utils import Database

LISTS = ("rounds", "events", "reports", "epochs")  # rows are numbered in the order in which they came
# Peers that left, and those seen only in an earlier start; a run's present peers are few, and known anyway.
GONE = "(gone != '' OR run < (SELECT max(id) FROM runs))"


class Retention:
    """Used by the thread that writes."""

    def __init__(self, limit: int = JOURNAL.size) -> None:
        """`limit`: bytes."""
        self.limit = max(limit, JOURNAL.least_size)
        self._trims = False  # whether it removes rows until a tenth is free

    def trim(self, db: Database) -> bool:
        """Removes as many rows as one call may, if the journal is too large, and gives free pages back to the system.
        Returns whether more have to go. Raises sqlite3.Error."""
        for _ in range(JOURNAL.trims_at_once):
            enough = self.limit * 0.9 if self._trims else self.limit
            self._trims = used_bytes(db) > enough and _step(db)
            if not self._trims:
                break
        db.executescript("PRAGMA incremental_vacuum(4096)")  # frees so many pages; `execute` would free one
        return self._trims


def _step(db: Database) -> bool:
    """Removes the oldest rows of every list, in one transaction; returns False if there is nothing left to remove."""
    went = False
    with db.atomic():
        for table in (*LISTS, "peers"):
            which = GONE if table == "peers" else "true"
            # min and max by the index
            edges = (f"(SELECT {edge}(rowid) FROM {table} WHERE {which})" for edge in ("min", "max"))
            first, last = db.execute(f"SELECT {', '.join(edges)}").fetchone()
            if first is not None and last > first:
                end = first + min(JOURNAL.rows_trimmed, (last - first) // 256)
                if table == "epochs":
                    _thin_curve(db, end)
                db.execute(f"DELETE FROM {table} WHERE rowid <= ? AND {which}", (end,))
                went = True
    return went


def used_bytes(db: Database) -> int:
    """Returns the bytes of the file without pages that are free to be used again."""
    pages, free, size = (
        db.execute(f"PRAGMA {each}").fetchone()[0] for each in ("page_count", "freelist_count", "page_size")
    )
    return int((pages - free) * size)


def _thin_curve(db: Database, row: int) -> None:
    """Thins the curve before the epochs up to this row are removed. Also removes what others claim about epochs to
    come, or about more old ones than anybody looks at: such a claim has no row of this peer's own."""
    for run_id, reached in db.execute("SELECT run_id, reached FROM totals").fetchall():
        (gone,) = db.execute(
            "SELECT max(epoch) FROM epochs JOIN runs ON runs.id = epochs.run WHERE epochs.id <= ? AND run_id = ?",
            (row, run_id),
        ).fetchone()
        thinned = "DELETE FROM curve WHERE run_id = ? AND epoch <= ? AND epoch % 16 != 0"
        db.execute(thinned, (run_id, -1 if gone is None else gone))
        db.execute(f"{thinned} AND row IS NULL", (run_id, reached - 20_000))
        db.execute("DELETE FROM curve WHERE run_id = ? AND epoch > ?", (run_id, reached + 2))
