"""The local log of one peer: what happened to it, in one SQLite file that others may read meanwhile."""

from __future__ import annotations

import logging
import os
import sqlite3
import threading
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path

from swarmcli.errors import JournalError
from swarmcli.events import Event, Events, Noticed
from swarmcli.journal.describe import Recorder
from swarmcli.journal.options import JOURNAL
from swarmcli.journal.reader import JournalReader
from swarmcli.journal.tables import RunRecord, version_of
from swarmcli.journal.writer import JournalStatistics, Store, Writer, is_broken, set_aside

logger = logging.getLogger(__name__)

JOURNAL_NAME = "journal.sqlite"


class Journal:
    """Keeps what it hears in `path`. Recording never blocks and never fails: a thread of its own writes within a
    second. While it cannot write (disk full, read-only, locked), the newest rows wait in memory, one warning is
    emitted, and it tries again. A process that is killed leaves a readable file without its last second."""

    def __init__(
        self,
        path: Path,
        *,
        run: RunRecord,
        clock: Callable[[], float],
        size: int = JOURNAL.size,
    ) -> None:
        """Begins a new run in the journal at `path`; makes the file and its directory if need be.

        `clock` gives wall-clock seconds. The file stays below `size` bytes: the oldest rows are removed.

        Raises JournalError where no journal can ever be: the file is another program's, damaged, or from a newer
        version; the path is a directory or leads through a file. A disk that is full, read-only or locked is no error
        here: the same may happen later, and may pass.
        """
        _make_sure_of(path)
        now = clock()
        self.path = path
        self.run = replace(run, pid=os.getpid(), started=now, last_seen=now)
        self.clock = clock
        self._recorder = Recorder()
        self._recording = threading.Lock()  # guards the recorder: several threads emit
        self._buses: list[Events] = []
        self._unsubscribe: list[Callable[[], None]] = []
        self._writer = Writer(Store(path, self.run, size), clock, self._notice)

    def listen(self, events: Events) -> None:
        """Records all events that are emitted there from now on, until `close`."""
        self._buses.append(events)
        self._unsubscribe.append(events.subscribe(self.record))

    def record(self, event: Event) -> None:
        """Records one event. Any thread may call it."""
        with self._recording:
            kept = list(self._recorder.kept(event, self.clock()))
        for each in kept:
            self._writer.put(each)

    def read(self) -> JournalReader:
        """Returns a view of the file as it is; close it soon. Raises JournalError when the file cannot be read."""
        self._writer.begun.wait(JOURNAL.busy)
        return JournalReader(self.path)

    def flush(self, timeout: float | None = None) -> bool:
        """Waits until all that was recorded is in the file; returns False if it cannot be written, or not in `timeout`
        seconds."""
        return self._writer.flush(timeout)

    def statistics(self) -> JournalStatistics:
        return self._writer.statistics()

    def close(self, outcome: str = "done", timeout: float = 10.0) -> None:
        """Stops listening, writes what is left and how the run ended, and ends the thread. Idempotent. Gives up after
        `timeout` seconds if the disk takes no more."""
        while self._unsubscribe:
            self._unsubscribe.pop()()
        with self._recording:
            for line in self._recorder.losses():
                self._writer.put(line)
        if not self._writer.close(outcome, timeout):
            left = self._writer.statistics()
            logger.warning(
                "%s lacks the last %d rows: %s", self.path, left.waiting, left.failing or "the disk is too slow"
            )

    def _notice(self, level: str, text: str) -> None:
        if not self._buses:
            logger.warning(text)
        for events in self._buses:
            events.emit(Noticed("warning" if level == "warning" else "info", text))

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close("done" if kind is None else f"ended by {kind.__name__}")


def _make_sure_of(path: Path) -> None:
    """Raises JournalError if trying again later cannot help."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_dir():
            raise JournalError(f"{path} is a directory; name a file in it, for example {path / JOURNAL_NAME}")
        with closing(sqlite3.connect(path)) as connection:  # the writer makes the tables
            version_of(connection, path)
    except JournalError as error:
        # Under another name it may be somebody else's file.
        told = set_aside(path) if path.name == JOURNAL_NAME and is_broken(error) else ""
        if not told:
            raise
        logger.warning(told)
    except (NotADirectoryError, FileExistsError) as error:
        raise JournalError(f"{path.parent} is no directory; name another place for the journal") from error
    except (sqlite3.Error, OSError) as error:
        logger.debug("%s cannot be opened yet: %s", path, error)
