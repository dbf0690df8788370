"""The thread that writes the journal, so that nobody who records something waits for a disk; and the file as this
thread sees it: opened, laid out or converted, written in transactions. All of that goes through sqlite-utils, which
only this thread imports."""

from __future__ import annotations

import logging
import sqlite3
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from swarmcli.errors import JournalError
from swarmcli.events import EpochAdvanced, EpochLoss, Event, RoundFinished, RunObserved
from swarmcli.journal import moments, sums
from swarmcli.journal.options import JOURNAL
from swarmcli.journal.retention import Retention
from swarmcli.journal.tables import APPLICATION_ID, TABLES, VERSION, RunRecord, to_row, version_of
from swarmcli.words import printable

if TYPE_CHECKING:
    from sqlite_utils import Database

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class JournalStatistics:
    waiting: int
    failing: str  # why nothing can be written at the moment; "": all is well


class Writer:
    """Takes records from any thread and commits them in batches in its own.

    While writing fails, records wait in memory, at most `capacity` of them. `notice(level, text)` is called once when
    writing begins to fail and once when it works again, from the writer's thread with no lock held.
    """

    def __init__(
        self,
        store: Store,
        clock: Callable[[], float],
        notice: Callable[[str, str], None],
        *,
        interval: float = JOURNAL.interval,
        capacity: int = 50_000,
    ) -> None:
        """`interval`: seconds from a record's arrival to its commit at most, while the disk works. `capacity`: records
        kept in memory while nothing can be written; beyond it the oldest are lost."""
        self._store = store
        self._clock = clock
        self._notice = notice
        self._interval = interval
        self._waiting: deque[Event] = deque(maxlen=capacity)
        self._changed = threading.Condition()
        self._statistics = JournalStatistics(0, "")
        self._lost = 0  # records lost from memory that no notice has told of yet
        self._warned_at: float | None = None
        self._asked = 0  # flushes asked for
        self._answered = 0  # flushes after which an attempt was made
        self._outcome: str | None = None  # how the run ended, once it has
        self.begun = threading.Event()  # after the first attempt: if the disk works, the file has its tables
        self._thread = threading.Thread(target=self._run, name="swarm-journal", daemon=True)
        self._thread.start()

    def put(self, record: Event) -> None:
        """Queues a record. Never blocks on the disk, never fails."""
        with self._changed:
            if len(self._waiting) == self._waiting.maxlen:
                self._lost += 1
            self._waiting.append(record)

    def flush(self, timeout: float | None = None) -> bool:
        """Waits until what was put before is written; returns False if it cannot be written, or not in `timeout`
        seconds."""
        with self._changed:
            self._asked += 1
            mine = self._asked
            self._changed.notify_all()
            answered = self._changed.wait_for(lambda: self._answered >= mine or not self._thread.is_alive(), timeout)
            return answered and not self._statistics.failing

    def statistics(self) -> JournalStatistics:
        with self._changed:
            return replace(self._statistics, waiting=len(self._waiting))

    def close(self, outcome: str, timeout: float = 10.0) -> bool:
        """Writes what is left and how the run ended, if that is possible within `timeout` seconds, and ends the thread.
        Idempotent; returns False if something stayed unwritten."""
        with self._changed:
            if self._outcome is None:
                self._outcome = outcome
            self._changed.notify_all()
        self._thread.join(timeout)
        return not self._thread.is_alive() and not self.statistics().failing

    def _run(self) -> None:
        attempt_at = tidied_at = float("-inf")
        outcome = None
        while outcome is None:
            with self._changed:
                if self.begun.is_set():
                    self._changed.wait_for(
                        lambda: self._outcome is not None or self._asked > self._answered, self._interval
                    )
                outcome, asked = self._outcome, self._asked
                work = bool(self._waiting) or asked > self._answered or outcome is not None
            if work or abs(self._clock() - attempt_at) >= 5.0:  # even without work: a sign of life
                attempt_at = self._clock()
                self._write_all(outcome)
                if outcome is None and not self._statistics.failing and abs(attempt_at - tidied_at) >= 30.0:
                    # While more rows have to go, new rows are written in between.
                    tidied_at = attempt_at if self._store.tidy() else float("-inf")
            self.begun.set()
            with self._changed:
                self._answered = asked
                self._changed.notify_all()
        self._store.close()

    def _write_all(self, outcome: str | None) -> None:
        while True:
            with self._changed:
                batch = [self._waiting.popleft() for _ in range(min(JOURNAL.max_batch, len(self._waiting)))]
            try:
                self._store.write(batch, self._clock(), outcome)
            except (sqlite3.Error, OSError, JournalError) as error:
                self._put_back(batch)
                self._store.close()  # whatever broke, the next attempt opens the file again
                told = set_aside(self._store.path) if is_broken(error) else ""
                if told:
                    self._notice("warning", told)
                else:
                    self._failed(str(error))
                return
            self._succeeded()
            if len(batch) < JOURNAL.max_batch:
                return

    def _put_back(self, batch: list[Event]) -> None:
        """Puts a batch back to the front. If newer records left no room, the oldest are lost."""
        with self._changed:
            room = (self._waiting.maxlen or 0) - len(self._waiting)
            lost = max(0, len(batch) - room)
            self._waiting.extendleft(reversed(batch[lost:]))
            self._lost += lost

    def _failed(self, why: str) -> None:
        now = self._clock()
        with self._changed:
            self._statistics = replace(self._statistics, failing=printable(why))
            old_news = self._warned_at is not None and abs(now - self._warned_at) < JOURNAL.warn_again
            if not old_news:
                self._warned_at = now
        if not old_news:
            self._notice("warning", f"the journal cannot be written ({why}); training goes on, its rows wait in memory")

    def _succeeded(self) -> None:
        with self._changed:
            recovered, lost = bool(self._statistics.failing), self._lost
            self._statistics = replace(self._statistics, failing="")
            self._lost = 0
        if lost:
            self._notice("warning", f"the journal is written again; {lost} rows were lost")
        elif recovered:
            self._notice("info", "the journal is written again; no row was lost")


class Store:
    """Used by one thread at a time, the writer's. Errors of SQLite pass through: the writer retries."""

    def __init__(self, path: Path, run: RunRecord, size: int = JOURNAL.size) -> None:
        """`size`: bytes that the journal may take, see `retention`."""
        self.path = path
        self._retention = Retention(size)
        self._db: Database | None = None
        self._file: tuple[int, int] = (0, 0)
        self.run = run  # `id`: the number of its row in the file, 0 before it has one

    def write(self, batch: Sequence[Event], now: float, outcome: str | None = None) -> None:
        """Adds all records in one transaction, or none. `now` becomes the run's last sign of life and, with an
        `outcome`, its end."""
        db = self._open()
        run = replace(self.run, last_seen=now)
        if outcome is not None:
            run = replace(run, finished=now, outcome=outcome)
        db.execute("BEGIN IMMEDIATE")  # no other writer can come in between
        with db.conn:
            run = _put_run(db, run)
            # Rows of one kind are added together, which is ten times as fast; their order in each table stays.
            for kind, alike in groupby(sorted(batch, key=lambda record: type(record).__name__), key=type):
                _put(db, kind, list(alike), run)
        self.run = run

    def tidy(self) -> bool:
        """Removes old rows if the journal is too large; returns False if more have to go. An error loses nothing: the
        next call tries again."""
        try:
            return not self._retention.trim(self._open())
        except (sqlite3.Error, OSError, JournalError) as error:
            logger.debug("%s was not trimmed: %s", self.path, error)
            self.close()
            return True

    def _open(self) -> Database:
        if self._db is not None and self._file != _identity(self.path):
            self.close()  # somebody removed the file; a new one begins with the run's own row
            self.run = replace(self.run, id=0)
        if self._db is None:
            self._db = open_for_writing(self.path)
            self._file = _identity(self.path)
        return self._db

    def close(self) -> None:
        if self._db is not None:
            self._db.close()
            self._db = None


def is_broken(error: BaseException | None) -> bool:
    """Whether a journal's file is damaged, as after a power cut: trying again cannot help, and nothing reads it."""
    if isinstance(error, JournalError):
        error = error.__cause__
    code = getattr(error, "sqlite_errorcode", 0) & 0xFF  # the primary code, without the extended one
    return code in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)


def set_aside(path: Path) -> str:
    """Moves a damaged journal out of the way, since a run needs none. Returns what people should hear; "": it could not
    be moved."""
    aside = path.with_name(f"{path.name}.damaged")
    for end in ("-wal", "-shm", ""):
        with suppress(OSError):
            Path(f"{path}{end}").replace(f"{aside}{end}")
    if path.exists():
        return ""
    return f"the journal {path} was damaged, as after a power cut: it is {aside.name} now, and a new one is begun"


def _identity(path: Path) -> tuple[int, int]:
    try:
        status = path.stat()
    except OSError:
        return (0, 0)
    return (status.st_dev, status.st_ino)


def open_for_writing(path: Path) -> Database:
    """Opens or makes a journal. Raises JournalError for a file that is something else, sqlite3.Error for a disk that is
    full, read-only or locked."""
    from sqlite_utils import Database  # imported here: it loads pandas if that is installed

    with ExitStack() as on_error:
        connection = sqlite3.connect(path, timeout=JOURNAL.busy, check_same_thread=False)
        on_error.callback(connection.close)
        version = version_of(connection, path)
        # plugins of sqlite-utils are not part of a run
        db = Database(connection, recursive_triggers=False, execute_plugins=False)
        if version == 0:
            db.executescript("PRAGMA auto_vacuum=INCREMENTAL; PRAGMA journal_mode=WAL")
        db.execute("BEGIN IMMEDIATE")  # a process that is killed meanwhile, or an error, leaves the file as it was
        with connection:
            if 0 < version < VERSION:
                _convert(db, version)
            _lay_out(db)
        db.execute("PRAGMA synchronous=NORMAL")  # a killed process loses nothing; a power cut may lose seconds
        db.execute(f"PRAGMA journal_size_limit={JOURNAL.wal_bytes}")
        on_error.pop_all()
    return db


def _lay_out(db: Database) -> None:
    """Makes what is missing. If two processes open a new file at once, both come here, so what is there stays."""
    for table in TABLES.values():
        table.make(db)
    sums.make(db)
    moments.make(db)
    db.execute(f"PRAGMA application_id={APPLICATION_ID}")
    db.execute(f"PRAGMA user_version={VERSION}")


def _convert(db: Database, version: int) -> None:
    """Converts formats 6 and 7. Their table of contributions also held what others had told its writer: that is
    removed. Their triggers added up the sums, in tables WITHOUT ROWID, which sqlite-utils cannot insert into or
    transform: these are made anew."""
    given = db.table("contributions")
    seen = [name for name in given.columns_dict if name.startswith("own_")] if given.exists() else []
    if seen:
        taken = ", ".join(f"{name.removeprefix('own_')} = coalesce({name}, 0)" for name in seen)
        db.execute(f"UPDATE contributions SET {taken}")
    for trigger in db.triggers:
        db.execute(f"DROP TRIGGER {trigger.name}")
    computed = {}
    if version == 6:
        db.execute(moments.CONVERT_FORMAT_6)
        db.execute("DROP INDEX IF EXISTS moments_by_epoch")
        computed = {("curve", "loss"): sums.LOSS_OF_FORMAT_6}
    db.execute("DROP TABLE IF EXISTS failures")  # failures are counted when they are read
    names = ("totals", "curve", "moments")
    for name in names:
        db.rename_table(name, f"former_{name}")
    _lay_out(db)
    for name in names:
        columns = list(db.table(name).columns_dict)
        taken = ", ".join(computed.get((name, column), column) for column in columns)
        db.execute(f"INSERT INTO {name} ({', '.join(columns)}) SELECT {taken} FROM former_{name}")
        db.table(f"former_{name}").drop()


def _put_run(db: Database, run: RunRecord) -> RunRecord:
    """Writes the row of this start, and numbers it the first time."""
    row = to_row(run)
    if run.id:
        db.table("runs").upsert(row, pk="id")
        return run
    sums.begin(db, run.run_id)
    del row["id"]
    return replace(run, id=db.table("runs").insert(row).last_rowid or 0)


def _put(db: Database, kind: type[Event], values: Sequence[Any], run: RunRecord) -> None:
    if kind is RunObserved:
        moments.add_moments(db, run.run_id, values)
        return
    if kind is EpochLoss:
        sums.put_losses(db, run.run_id, values)
        return
    TABLES[kind].put(db, ({"run": run.id, **to_row(value)} for value in values))
    if kind is EpochAdvanced:
        sums.add_epochs(db, run.run_id, len(values))
    if kind is RoundFinished:
        sums.add_rounds(db, run.run_id, len(values))
