"""Checks a container's health: its peer writes a sign of life into its journal every five seconds."""

import sqlite3
import sys
import time

JOURNAL = "/runs/journal.sqlite"
SILENT_SECONDS = 60.0


def main(journal: str = JOURNAL) -> str | None:
    """Returns what is wrong; None if nothing is."""
    try:
        with sqlite3.connect(f"file:{journal}?mode=ro", uri=True, timeout=5.0) as database:
            row = database.execute("SELECT last_seen, finished FROM runs ORDER BY id DESC LIMIT 1").fetchone()
    except sqlite3.Error as error:
        return f"{journal}: {error}"
    if row is None or row[1] is not None:
        return "no run is under way"
    silent = time.time() - row[0]
    return f"no sign of life for {silent:.0f} s" if silent > SILENT_SECONDS else None


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
