"""Reads a journal while its owner writes it, and after its owner was killed."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import fields, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote

from swarmcli.errors import JournalError
from swarmcli.events import (
    Contribution,
    ContributionsCounted,
    EpochAdvanced,
    EpochReported,
    Evaluated,
    Event,
    PeerSeen,
    RoundFinished,
)
from swarmcli.journal import sums
from swarmcli.journal.describe import Line
from swarmcli.journal.failures import Failure, count_failures
from swarmcli.journal.moments import READ_FORMAT_6, Axis, Moment, read_moments
from swarmcli.journal.options import JOURNAL
from swarmcli.journal.tables import TABLES, VERSION, RunRecord, Totals, from_row, version_of

R = TypeVar("R", bound=RunRecord | Event)


class JournalReader:
    """A read-only view of one journal file. Any thread may use it, one at a time; a context manager.

    Everything but `runs` is about one run id, over all starts of this peer in it. Rows come oldest first; with a
    `limit`, only so many of the newest. Every method raises JournalError when the file cannot be read.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._connection = _connect(path)
        self._connection.row_factory = sqlite3.Row

    def runs(self) -> list[RunRecord]:
        """Returns every start of this peer that the file knows of."""
        return [self._row(RunRecord, row) for row in self._query("SELECT * FROM runs ORDER BY id")]

    def epochs(self, run_id: str, *, after: int = -1, limit: int | None = None) -> list[EpochAdvanced]:
        """Returns epochs above `after`, by number. An epoch that was reached more than once is as it was when it was
        last stepped here: a later download of the same state tells nothing about it."""
        rows = self._query(
            "SELECT epochs.* FROM curve CROSS JOIN epochs ON epochs.id = curve.row "
            "WHERE curve.run_id = ? AND curve.epoch > ? ORDER BY curve.epoch DESC LIMIT ?",
            (run_id, after, -1 if limit is None else limit),
        )
        return [self._row(EpochAdvanced, row) for row in reversed(rows)]

    def chart(self, run_id: str, *, after: int = -1, limit: int | None = None) -> list[EpochAdvanced]:
        """Returns the epochs above `after`, up to the last that this peer has reached, by number; thinned out evenly to
        at most `limit`, the last one kept.

        `loss` is the swarm's as `EpochLoss` told it, or else this peer's own. Epochs known only from reports have no
        samples. What a report claims about an epoch to come is left out: anybody can claim that.
        """
        within = f"FROM curve WHERE run_id = ? AND epoch > ? AND epoch <= {_REACHED}"
        edges = [
            row[0]
            for order in ("ASC", "DESC")
            for row in self._query(f"SELECT epoch {within} ORDER BY epoch {order} LIMIT 1", (run_id, after, run_id))
        ]
        if not edges:
            return []
        first, last = edges
        count = last - first + 1
        if limit is None or count <= limit:
            return self._charted(run_id, first - 1, last, -1)
        # The index finds the last epoch of every piece: a million others are not read.
        ends = [first - 1, *(last - i * count // limit for i in reversed(range(limit)))]
        return [row for low, high in pairwise(ends) for row in self._charted(run_id, low, high, 1)]

    def _charted(self, run_id: str, above: int, last: int, limit: int) -> list[EpochAdvanced]:
        """Returns the last `limit` epochs above `above` and up to `last`."""
        rows = self._query(
            f"{_CURVE} WHERE run_id = ? AND curve.epoch > ? AND curve.epoch <= ? ORDER BY curve.epoch DESC LIMIT ?",
            (run_id, above, last, limit),
        )
        return [self._of_swarm(row) for row in reversed(rows)]

    def _of_swarm(self, row: sqlite3.Row) -> EpochAdvanced:
        if row["id"] is None:
            peers, told = row["tellers"], row["told"] or 0.0
            own = EpochAdvanced(row["number"], "", 0, 0, peers, None, 0.0, 0.0, time=told)
        else:
            own = self._row(EpochAdvanced, row)
        return own if row["told_loss"] is None else replace(own, loss=row["told_loss"])

    def evaluations(self, run_id: str, *, after: int = -1, limit: int | None = None) -> list[Evaluated]:
        """Returns the evaluations of epochs above `after`, by number; for an epoch that was evaluated more than once,
        the last."""
        latest = "id IN (SELECT max(id) FROM evaluations WHERE run IN ({runs}) AND epoch > ? GROUP BY epoch)"
        return self._rows(Evaluated, latest, (run_id, after), "epoch", limit)

    def contributions(self, run_id: str) -> list[Contribution]:
        """Returns what each peer has given, if this peer keeps count; most samples first, among equals the one that has
        reduced or stayed more."""
        order = "samples, reduced_bytes, uptime, peer"
        return self._rows(Contribution, "run_id = ?", (run_id,), order, None)[::-1]

    def counted(self, run_id: str) -> ContributionsCounted | None:
        """Returns up to which epoch contributions were counted; None: none was counted."""
        return next(iter(self._rows(ContributionsCounted, "run_id = ?", (run_id,), "run_id", 1)), None)

    def rounds(self, run_id: str, *, after: int = 0, limit: int | None = None) -> list[RoundFinished]:
        """Returns rounds whose row id is above `after`."""
        return self._rows(RoundFinished, "run IN ({runs}) AND id > ?", (run_id, after), "id", limit)

    def events(
        self, run_id: str, *, after: int = 0, limit: int | None = None, details: bool = True, without: str = ""
    ) -> list[Line]:
        """Returns lines whose row id is above `after`; without `details`, only those that people should read.
        `without`: a kind that is left out."""
        where = "run IN ({runs}) AND id > ? AND kind != ?" + ("" if details else " AND level != 'detail'")
        index = "" if details else "INDEXED BY events_told"
        return self._rows(Line, where, (run_id, after, without), "id", limit, index)

    def added(
        self, run_id: str, name: str, *, after: int, limit: int | None = None
    ) -> list[EpochAdvanced] | list[RoundFinished] | list[Line]:
        """Returns rows of the list `name` ("epochs", "rounds" or "events") whose row id is above `after`, by id."""
        return self._rows(_LISTED[name], "run IN ({runs}) AND id > ?", (run_id, after), "id", limit)

    def peers(self, run_id: str, peer: str | None = None) -> list[PeerSeen]:
        """Returns what was last known of each peer, or of one, by when it was first seen; `time` is when it was last
        seen. Its epoch is the highest at which it was seen: a peer that starts anew or leaves reports 0, which does not
        say how far it came."""
        latest: dict[str, PeerSeen] = {}
        which = "" if peer is None else "AND peer = ?"
        sought = (run_id,) if peer is None else (run_id, peer)
        for row in self._query(f"SELECT * FROM peers WHERE run IN ({_RUNS}) {which} ORDER BY time", sought):
            seen = self._row(PeerSeen, row)
            earlier = latest.get(seen.peer, seen)
            latest[seen.peer] = replace(
                seen, first_seen=min(seen.first_seen, earlier.first_seen), epoch=max(seen.epoch, earlier.epoch)
            )
        return sorted(latest.values(), key=lambda seen: (seen.first_seen, seen.peer))

    def departed(self, run_id: str, since: float) -> list[PeerSeen]:
        """Returns peers that left, or were lost, since a moment; the latest first."""
        rows = self._query(
            "SELECT * FROM peers INDEXED BY peers_gone WHERE gone != '' AND time >= ? "
            f"AND run IN ({_RUNS}) ORDER BY time DESC LIMIT 200",
            (since, run_id),
        )
        return [self._row(PeerSeen, row) for row in rows]

    def reports_of(self, run_id: str, peer: str) -> list[EpochReported]:
        """Returns one peer's reports of its last epochs, the oldest first."""
        rows = self._query(
            f"SELECT *, max(time) FROM reports WHERE run IN ({_RUNS}) AND peer = ? GROUP BY epoch "
            "ORDER BY epoch DESC LIMIT 300",
            (run_id, peer),
        )
        return [self._row(EpochReported, row) for row in reversed(rows)]

    def rounds_of(self, run_id: str, peer: str) -> list[RoundFinished]:
        """Returns a peer's last rounds, among the last 2000 of all; the newest first."""
        rows = self._query(
            f"SELECT * FROM (SELECT * FROM rounds NOT INDEXED WHERE run IN ({_RUNS}) ORDER BY id DESC LIMIT 2000) "
            "WHERE instr(members, ?) OR instr(left_out, ?) LIMIT 50",
            (run_id, f'"{peer}"', f'"{peer}"'),
        )
        return [self._row(RoundFinished, row) for row in rows]

    def failures(self, run_id: str) -> list[Failure]:
        """Returns why rounds failed or went on without somebody, for the latest such rounds; the most frequent reason
        first."""
        # The plus keeps SQLite from using the index by runs, with which it would sort all rounds.
        where = f"+run IN ({{runs}}) AND ({sums.TROUBLED.replace('{}', '{{}}')})"
        return count_failures(self._rows(RoundFinished, where, (run_id,), "id", JOURNAL.rounds_counted, ""))

    def moments(
        self,
        run_id: str,
        *,
        begin: float | None = None,
        by: Axis = "time",
        points: int = 300,
    ) -> list[Moment]:
        """Returns how the run went from a time or an epoch on, see `moments.read_moments`."""
        return read_moments(self._query, run_id, begin=begin, by=by, points=points)

    def totals(self, run_id: str) -> Totals:
        """Returns sums over the whole run, also over rows that were removed for want of room."""
        names = ", ".join(each.name for each in fields(Totals))
        rows = self._query(f"SELECT {names} FROM totals WHERE run_id = ?", (run_id,))
        return Totals(*rows[0]) if rows else Totals()

    def every(self, run_id: str, name: str) -> Iterator[EpochAdvanced] | Iterator[RoundFinished] | Iterator[Line]:
        """Yields all rows of the list `name` ("epochs" as in `chart`, "rounds" or "events"), read while they are taken;
        the reader has to stay open meanwhile."""
        after = -1 if name == "epochs" else 0
        while True:
            found = self._next(run_id, name, after)
            yield from found
            if not found:
                return
            after = found[-1].epoch if isinstance(found[-1], EpochAdvanced) else found[-1].id

    def _next(self, run_id: str, name: str, after: int) -> list[EpochAdvanced] | list[RoundFinished] | list[Line]:
        if name == "epochs":
            rows = self._query(
                f"{_CURVE} WHERE run_id = ? AND curve.epoch > ? AND curve.epoch <= {_REACHED} "
                "ORDER BY curve.epoch LIMIT ?",
                (run_id, after, run_id, JOURNAL.rows_read),
            )
            return [self._of_swarm(row) for row in rows]
        rows = self._query(
            f"SELECT * FROM {name} NOT INDEXED WHERE run IN ({_RUNS}) AND id > ? ORDER BY id LIMIT ?",
            (run_id, after, JOURNAL.rows_read),
        )
        return [self._row(_LISTED[name], row) for row in rows]

    def _rows(
        self,
        kind: type[R],
        where: str,
        parameters: Sequence[Any],
        order: str,
        limit: int | None,
        index: str = "NOT INDEXED",
    ) -> list[R]:
        """The newest rows are at the end of the table, and found from there, unless another index is named."""
        name = f"{TABLES[kind].name} {index}"
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
        except (sqlite3.Error, UnicodeDecodeError) as error:  # UnicodeDecodeError: a text in the file is damaged
            raise JournalError(f"{self.path} cannot be read: {error}") from error

    def close(self) -> None:
        self._connection.close()

    def __enter__(self) -> JournalReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


_RUNS = "SELECT id FROM runs WHERE run_id = ?"
_LISTED: Mapping[str, type[Any]] = {"epochs": EpochAdvanced, "rounds": RoundFinished, "events": Line}
_REACHED = "(SELECT reached FROM totals WHERE run_id = ?)"  # beyond it there are only claims
_CURVE = (
    "SELECT epochs.*, curve.epoch AS number, curve.peers AS tellers, curve.told, curve.loss AS told_loss FROM curve "
    "LEFT JOIN epochs ON epochs.id = curve.row"
)


def _connect(path: Path) -> sqlite3.Connection:
    if not path.is_file():
        raise JournalError(f"{path} does not exist" if not path.exists() else f"{path} is no file")
    try:
        try:
            return _open(path, "mode=ro")
        except sqlite3.OperationalError as error:
            # If no file can be made beside the journal (a read-only medium), its index for readers cannot be made
            # either.
            if error.sqlite_errorcode & 0xFF not in (sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_READONLY):
                raise
            return _open(path, "immutable=1")
    except (sqlite3.Error, UnicodeDecodeError) as error:
        raise JournalError(f"{path} cannot be read: {error}") from error


def _open(path: Path, mode: str) -> sqlite3.Connection:
    address = f"file:{quote(str(path.absolute()))}?{mode}"
    with ExitStack() as on_error:
        connection = sqlite3.connect(address, uri=True, timeout=JOURNAL.busy, check_same_thread=False)
        on_error.callback(connection.close)
        version = version_of(connection, path)
        if version == 0:
            raise JournalError(f"{path} cannot be read: it is empty; its run has not written anything yet")
        if version == 6:
            connection.executescript(f"{READ_FORMAT_6}; {sums.READ_FORMAT_6};")
        # Until it is written again, a former format also holds what others told its writer: see the writer.
        names = [row[1] for row in connection.execute("PRAGMA table_info(contributions)")] if version < VERSION else []
        if names:
            seen = [f"coalesce(own_{each}, 0) AS {each}" if f"own_{each}" in names else each for each in names]
            connection.execute(f"CREATE TEMP VIEW contributions AS SELECT {', '.join(seen)} FROM main.contributions")
        on_error.pop_all()
    return connection
