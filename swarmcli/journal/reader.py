"""Reads a journal while its owner writes it, and after its owner was killed.

Plain sqlite3 and not sqlite-utils: reading needs nothing of it, and importing it takes half a second where pandas is
installed, which `swarm log` would pay each time.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar
from urllib.parse import quote

from swarmcli.errors import JournalError
from swarmcli.events import EpochAdvanced, Event, PeerSeen, RoundFinished
from swarmcli.journal.describe import Line
from swarmcli.journal.tables import TABLES, RunRecord, Totals, check, from_row

BUSY_SECONDS = 2.0
R = TypeVar("R", bound=RunRecord | Event)


class JournalReader:
    """A read-only view of one journal file. May be used from any thread, by one at a time; a context manager.

    Everything but `runs` speaks of one run id, over all starts of this peer in it. Rows come oldest first; with a
    `limit`, the newest that many. Every method raises JournalError when the file cannot be read.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._connection = _connect(path)
        self._connection.row_factory = sqlite3.Row

    def runs(self) -> list[RunRecord]:
        """Every start of this peer that the file knows of."""
        return [self._row(RunRecord, row) for row in self._query("SELECT * FROM runs ORDER BY id")]

    def epochs(self, run_id: str, *, after: int = -1, limit: int | None = None) -> list[EpochAdvanced]:
        """Epochs above `after`, by number; one that was come to more than once as it was the last time that its step
        was taken here: a later download of the same state tells nothing about it."""
        best = "coalesce(max(CASE WHEN samples > 0 THEN id END), max(id))"
        latest = f"id IN (SELECT {best} FROM epochs WHERE run IN ({{runs}}) AND epoch > ? GROUP BY epoch)"
        return self._rows(EpochAdvanced, latest, (run_id, after), "epoch", limit)

    def chart(self, run_id: str, *, after: int = -1, limit: int | None = None) -> list[EpochAdvanced]:
        """The epochs above `after` up to the last that this peer has reached, by number; thinned out evenly to `limit`,
        the last one kept.

        `loss` is the mean of what peers reported, weighted by their rates, or else this peer's own. Epochs of which
        only reports tell have no samples. What a report claims of an epoch to come is left out: anybody can claim that.
        """
        rows = {row.epoch: row for row in self.epochs(run_id, after=after)}
        weight = "max(samples_per_second, 0.001)"
        reported = self._query(
            f"SELECT epoch, min(time), count(*), sum(loss * {weight}) / sum({weight}) FROM reports "
            f"WHERE run IN ({_RUNS}) AND epoch > ? AND epoch <= ? AND loss IS NOT NULL GROUP BY epoch",
            (run_id, after, max(rows, default=after)),
        )
        for epoch, time, peers, loss in reported:
            own = rows.get(epoch) or EpochAdvanced(epoch, "", 0, 0, peers, None, 0.0, 0.0, time=time)
            rows[epoch] = replace(own, loss=loss)
        found = [row for _, row in sorted(rows.items())]
        if limit is None or len(found) <= limit:
            return found
        return [found[len(found) - 1 - i * len(found) // limit] for i in reversed(range(limit))]

    def rounds(self, run_id: str, *, after: int = 0, limit: int | None = None) -> list[RoundFinished]:
        """Rounds whose row id is above `after`."""
        return self._rows(RoundFinished, "run IN ({runs}) AND id > ?", (run_id, after), "id", limit)

    def events(self, run_id: str, *, after: int = 0, limit: int | None = None, details: bool = True) -> list[Line]:
        """Lines whose row id is above `after`; without `details`, only those that people should read."""
        where = "run IN ({runs}) AND id > ?" + ("" if details else " AND level != 'detail'")
        return self._rows(Line, where, (run_id, after), "id", limit)

    def added(
        self, run_id: str, name: str, *, after: int, limit: int | None = None
    ) -> list[EpochAdvanced] | list[RoundFinished] | list[Line]:
        """Rows of the list `name` ("epochs", "rounds" or "events") whose row id is above `after`, by id."""
        kind = {"epochs": EpochAdvanced, "rounds": RoundFinished, "events": Line}[name]
        return self._rows(kind, "run IN ({runs}) AND id > ?", (run_id, after), "id", limit)

    def peers(self, run_id: str) -> list[PeerSeen]:
        """The last that was known of each peer, by when it was first seen; `time` is when last. Its epoch is the
        highest it was seen at: who starts anew or leaves reports 0, and that says nothing about how far it came."""
        latest: dict[str, PeerSeen] = {}
        for row in self._query(f"SELECT * FROM peers WHERE run IN ({_RUNS}) ORDER BY time", (run_id,)):
            peer = self._row(PeerSeen, row)
            earlier = latest.get(peer.peer, peer)
            latest[peer.peer] = replace(
                peer, first_seen=min(peer.first_seen, earlier.first_seen), epoch=max(peer.epoch, earlier.epoch)
            )
        return sorted(latest.values(), key=lambda peer: (peer.first_seen, peer.peer))

    def totals(self, run_id: str) -> Totals:
        """Sums over the whole run."""
        epochs = self._query(
            f"SELECT count(DISTINCT epoch), coalesce(sum(own_samples), 0) FROM epochs WHERE run IN ({_RUNS})", (run_id,)
        )[0]
        rounds = self._query(
            "SELECT count(*) FILTER (WHERE outcome = 'committed'), count(*) FILTER (WHERE outcome = 'failed'), "
            "count(*) FILTER (WHERE outcome = 'undecided'), coalesce(sum(bytes_sent), 0), "
            f"coalesce(sum(bytes_received), 0) FROM rounds WHERE run IN ({_RUNS})",
            (run_id,),
        )[0]
        return Totals(*epochs, *rounds)

    def _rows(self, kind: type[R], where: str, parameters: Sequence[Any], order: str, limit: int | None) -> list[R]:
        name = TABLES[kind].name
        backwards = ", ".join(f"{column.strip()} DESC" for column in order.split(","))
        selected = f"SELECT * FROM {name} WHERE {where.format(runs=_RUNS)} ORDER BY {backwards} LIMIT ?"
        rows = self._query(selected, (*parameters, -1 if limit is None else limit))
        return [self._row(kind, row) for row in reversed(rows)]

    def _row(self, kind: type[R], row: sqlite3.Row) -> R:
        try:
            return from_row(kind, row)
        except (ValueError, TypeError, RecursionError) as error:
            raise JournalError(f"{self.path} is damaged: {error}") from error

    def _query(self, sql: str, parameters: Sequence[Any] = ()) -> list[sqlite3.Row]:
        try:
            return self._connection.execute(sql, parameters).fetchall()
        except (sqlite3.Error, UnicodeDecodeError) as error:  # it quotes damaged text, or finds some
            raise JournalError(f"{self.path} cannot be read: {error}") from error

    def close(self) -> None:
        self._connection.close()

    def __enter__(self) -> JournalReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


_RUNS = "SELECT id FROM runs WHERE run_id = ?"


def _connect(path: Path) -> sqlite3.Connection:
    if not path.is_file():
        raise JournalError(f"{path} does not exist" if not path.exists() else f"{path} is no file")
    try:
        try:
            return _open(path, "mode=ro")
        except sqlite3.OperationalError as error:
            # Where no file can be made beside the journal (a read-only medium) its index for readers cannot be either.
            if error.sqlite_errorcode & 0xFF not in (sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_READONLY):
                raise
            return _open(path, "immutable=1")
    except (sqlite3.Error, UnicodeDecodeError) as error:
        raise JournalError(f"{path} cannot be read: {error}") from error


def _open(path: Path, mode: str) -> sqlite3.Connection:
    address = f"file:{quote(str(path.absolute()))}?{mode}"
    with ExitStack() as on_error:
        connection = sqlite3.connect(address, uri=True, timeout=BUSY_SECONDS, check_same_thread=False)
        on_error.callback(connection.close)
        if not check(connection, path):
            raise JournalError(f"{path} cannot be read: it is empty; its run has not written anything yet")
        on_error.pop_all()
    return connection
