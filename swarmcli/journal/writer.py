"""The thread that writes the journal, so that nobody who records something waits for a disk."""

from __future__ import annotations

import sqlite3
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace

from swarmcli.errors import JournalError
from swarmcli.journal.records import Record
from swarmcli.journal.store import Store

INTERVAL_SECONDS = 0.5  # from a record's arrival to its commit at most, while the disk works
SIGN_OF_LIFE_SECONDS = 5.0  # between commits that only say that the process lives
WARN_AGAIN_SECONDS = 600.0  # a disk that is full every other second is one piece of news
MAX_BATCH = 2000  # records in one transaction
MAX_BACKLOG = 50_000  # records kept in memory while nothing can be written; the oldest give way


@dataclass(frozen=True, slots=True)
class JournalStatistics:
    """`lost` counts the records that gave way in memory while nothing could be written."""

    written: int
    waiting: int
    lost: int
    failing: str  # why nothing can be written at the moment; "" when all is well


class Writer:
    """Takes records from any thread and commits them in batches on its own.

    While writing fails, records wait in memory, at most `capacity` of them. `notice(level, text)` is called once when
    writing begins to fail and once when it works again, from the writer's thread with no lock held.
    """

    def __init__(
        self,
        store: Store,
        clock: Callable[[], float],
        notice: Callable[[str, str], None],
        *,
        interval: float = INTERVAL_SECONDS,
        capacity: int = MAX_BACKLOG,
    ) -> None:
        self._store = store
        self._clock = clock
        self._notice = notice
        self._interval = interval
        self._waiting: deque[Record] = deque(maxlen=capacity)
        self._changed = threading.Condition()
        self._statistics = JournalStatistics(0, 0, 0, "")
        self._unreported = 0  # lost records that no notice has told of
        self._warned_at: float | None = None
        self._asked = 0  # flushes asked for
        self._answered = 0  # flushes after which an attempt was made
        self._outcome: str | None = None  # how the run ended, once it has
        self._thread = threading.Thread(target=self._run, name="swarm-journal", daemon=True)
        self._thread.start()

    def put(self, record: Record) -> None:
        """Queues a record. Never blocks on the disk, never fails."""
        with self._changed:
            if len(self._waiting) == self._waiting.maxlen:
                self._count_lost(1)
            self._waiting.append(record)

    def flush(self, timeout: float | None = None) -> bool:
        """Waits until what was put before is written; False if it could not be, or not in `timeout` seconds."""
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
        """Writes what is left and how the run ended, if that is possible within `timeout` seconds, and ends the
        thread. Idempotent; False if something stayed unwritten."""
        with self._changed:
            if self._outcome is None:
                self._outcome = outcome
            self._changed.notify_all()
        self._thread.join(timeout)
        return not self._thread.is_alive() and not self.statistics().failing

    def _run(self) -> None:
        attempt_at = float("-inf")
        outcome = None
        while outcome is None:
            with self._changed:
                self._changed.wait_for(
                    lambda: self._outcome is not None or self._asked > self._answered, self._interval
                )
                outcome, asked = self._outcome, self._asked
                work = bool(self._waiting) or asked > self._answered or outcome is not None
            if work or abs(self._clock() - attempt_at) >= SIGN_OF_LIFE_SECONDS:
                attempt_at = self._clock()
                self._write_all(outcome)
            with self._changed:
                self._answered = asked
                self._changed.notify_all()
        self._store.close()

    def _write_all(self, outcome: str | None) -> None:
        while True:
            batch = self._take()
            try:
                self._store.write(batch, self._clock(), outcome)
            except (sqlite3.Error, OSError, JournalError) as error:
                self._put_back(batch)
                self._store.close()  # whatever broke, the next attempt begins with the file as it is then
                self._failed(str(error))
                return
            self._succeeded(len(batch))
            if len(batch) < MAX_BATCH:
                return

    def _take(self) -> list[Record]:
        with self._changed:
            return [self._waiting.popleft() for _ in range(min(MAX_BATCH, len(self._waiting)))]

    def _put_back(self, batch: list[Record]) -> None:
        """Back to the front, as far as newer records left room there: the oldest give way."""
        with self._changed:
            room = (self._waiting.maxlen or 0) - len(self._waiting)
            lost = max(0, len(batch) - room)
            self._waiting.extendleft(reversed(batch[lost:]))
            self._count_lost(lost)

    def _count_lost(self, count: int) -> None:
        self._unreported += count
        self._statistics = replace(self._statistics, lost=self._statistics.lost + count)

    def _failed(self, why: str) -> None:
        now = self._clock()
        with self._changed:
            self._statistics = replace(self._statistics, failing=why)
            old_news = self._warned_at is not None and abs(now - self._warned_at) < WARN_AGAIN_SECONDS
            if not old_news:
                self._warned_at = now
        if not old_news:
            self._notice("warning", f"the journal cannot be written ({why}); training goes on, its rows wait in memory")

    def _succeeded(self, count: int) -> None:
        with self._changed:
            recovered, lost = bool(self._statistics.failing), self._unreported
            self._statistics = replace(self._statistics, written=self._statistics.written + count, failing="")
            self._unreported = 0
        if lost:
            self._notice("warning", f"the journal is written again; {lost} rows were lost")
        elif recovered:
            self._notice("info", "the journal is written again; no row was lost")
