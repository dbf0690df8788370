"""Sums made as rows come in, so that nobody has to read a million of them again: sums of a run, the loss of the
swarm by epoch, and why rounds failed.

SQLite's triggers add up, in the transaction of the row itself: what is in the file agrees whatever died meanwhile. Rows
that retention deletes are not subtracted.
"""

from __future__ import annotations

import math
import re
import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from swarmcli.events import EpochLoss, RoundFinished
from swarmcli.journal.options import JOURNAL

OTHER = "another reason"

_RUN_ID = "(SELECT run_id FROM runs WHERE id = new.run)"

LAYOUT = f"""
CREATE TABLE IF NOT EXISTS totals (
    run_id TEXT PRIMARY KEY, epochs INTEGER NOT NULL DEFAULT 0, own_samples INTEGER NOT NULL DEFAULT 0,
    rounds_committed INTEGER NOT NULL DEFAULT 0, rounds_failed INTEGER NOT NULL DEFAULT 0,
    rounds_undecided INTEGER NOT NULL DEFAULT 0, bytes_sent INTEGER NOT NULL DEFAULT 0,
    bytes_received INTEGER NOT NULL DEFAULT 0, reached INTEGER NOT NULL DEFAULT -1
) WITHOUT ROWID;

-- one row per epoch: which row of `epochs` tells of it best; the swarm's loss, how many told theirs, and since when
CREATE TABLE IF NOT EXISTS curve (
    run_id TEXT, epoch INTEGER, row INTEGER, stepped INTEGER NOT NULL DEFAULT 0,
    loss REAL, peers INTEGER NOT NULL DEFAULT 0, told REAL, PRIMARY KEY (run_id, epoch)
) WITHOUT ROWID;

CREATE TABLE IF NOT EXISTS failures (
    run_id TEXT, what TEXT, reason TEXT, count INTEGER, first REAL, last REAL, example TEXT,
    PRIMARY KEY (run_id, what, reason)
) WITHOUT ROWID;

CREATE TRIGGER IF NOT EXISTS begin_run AFTER INSERT ON runs BEGIN
    INSERT INTO totals (run_id) VALUES (new.run_id) ON CONFLICT DO NOTHING;
END;

CREATE TRIGGER IF NOT EXISTS add_epoch AFTER INSERT ON epochs BEGIN
    INSERT INTO curve (run_id, epoch) VALUES ({_RUN_ID}, new.epoch) ON CONFLICT DO NOTHING;
    UPDATE totals SET
        epochs = epochs + (SELECT row IS NULL FROM curve WHERE run_id = totals.run_id AND epoch = new.epoch),
        own_samples = own_samples + coalesce(new.own_samples, 0), reached = max(reached, new.epoch)
        WHERE run_id = {_RUN_ID};
    -- a state that was downloaded later tells nothing about an epoch that was stepped here
    UPDATE curve SET row = new.id, stepped = new.samples > 0
        WHERE run_id = {_RUN_ID} AND epoch = new.epoch AND (new.samples > 0 OR NOT stepped);
END;

CREATE TRIGGER IF NOT EXISTS add_round AFTER INSERT ON rounds BEGIN
    UPDATE totals SET
        rounds_committed = rounds_committed + (new.outcome = 'committed'),
        rounds_failed = rounds_failed + (new.outcome = 'failed'),
        rounds_undecided = rounds_undecided + (new.outcome = 'undecided'),
        bytes_sent = bytes_sent + coalesce(new.bytes_sent, 0),
        bytes_received = bytes_received + coalesce(new.bytes_received, 0)
        WHERE run_id = {_RUN_ID};
END;

-- lists show the newest rows that people should read, and who left lately
CREATE INDEX IF NOT EXISTS events_told ON events (id) WHERE level != 'detail';
CREATE INDEX IF NOT EXISTS peers_gone ON peers (time) WHERE gone != '';
"""
# In format 6 triggers added up what peers reported, weighted by the rates that they claimed.
READ_FORMAT_6 = "CREATE TEMP VIEW curve AS SELECT *, loss_sum / nullif(weight, 0) AS loss FROM main.curve"
CONVERT_FORMAT_6 = """
DROP TRIGGER IF EXISTS add_report;
DROP TRIGGER IF EXISTS change_report;
ALTER TABLE curve ADD COLUMN loss REAL;
UPDATE curve SET loss = loss_sum / nullif(weight, 0);
"""


@dataclass(frozen=True, slots=True)
class Failure:
    """Rounds that failed, or went on without somebody, for one reason; numbers and peers in it are left out."""

    reason: str
    what: Literal["round", "left out"]
    count: int
    first: float
    last: float
    example: str  # as it was said the last time


def put_losses(connection: sqlite3.Connection, run_id: str, losses: Sequence[EpochLoss]) -> None:
    """Writes losses, and leaves out what is no number: a curve shows this peer's own there."""
    rows = [(run_id, each.epoch, each.loss, each.peers, each.time) for each in losses if math.isfinite(each.loss)]
    connection.executemany(
        "INSERT INTO curve (run_id, epoch, loss, peers, told) VALUES (?, ?, ?, ?, ?) ON CONFLICT DO UPDATE SET "
        "loss = excluded.loss, peers = excluded.peers, told = coalesce(told, excluded.told)",
        rows,
    )


def add_failures(connection: sqlite3.Connection, run_id: str, rounds: Sequence[RoundFinished]) -> None:
    for each in rounds:
        _add_causes(connection, run_id, each.time, _causes(each))


def _causes(ended: RoundFinished) -> Iterator[tuple[str, str, str]]:
    """Rounds that failed for one reason: the reason in general, and an example in its words."""
    if ended.outcome != "committed":
        unknown = "no reason was given" if ended.outcome == "failed" else "its outcome could not be learned"
        text = ended.reason or unknown
        yield "round", cause_of(text, ended.members), text
    for peer, why in ended.left_out.items():
        yield "left out", cause_of(why, (*ended.members, peer)), why


def cause_of(reason: str, peers: Iterable[str]) -> str:
    """A reason without what differs from time to time: peers, addresses and numbers."""
    for peer in peers:
        if peer:
            reason = reason.replace(peer, "…").replace(peer[:10], "…")
    reason = re.sub(r"\b\w+://\S+", "…", reason)
    reason = re.sub(r"\b[a-z2-7]{52}\b", "…", reason)
    return re.sub(r"\d+([.,:]\d+)*", "…", reason)[: JOURNAL.max_cause] or OTHER


def _add_causes(
    connection: sqlite3.Connection, run_id: str, time: float, causes: Iterable[tuple[str, str, str]]
) -> None:
    for what, cause, example in causes:
        known = "SELECT 1 FROM failures WHERE run_id = ? AND what = ? AND reason = ?"
        count = "SELECT count(*) FROM failures WHERE run_id = ?"
        if not connection.execute(known, (run_id, what, cause)).fetchone():
            (causes_known,) = connection.execute(count, (run_id,)).fetchone()
            cause = cause if causes_known < JOURNAL.max_causes else OTHER
        connection.execute(
            "INSERT INTO failures VALUES (?, ?, ?, 1, ?, ?, ?) ON CONFLICT DO UPDATE SET "
            "count = count + 1, last = excluded.last, example = excluded.example",
            (run_id, what, cause, time, time, example[: JOURNAL.max_cause].encode("utf-8", "replace").decode()),
        )
