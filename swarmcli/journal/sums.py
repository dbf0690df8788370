"""Sums made as rows come in, so that nobody has to read a million of them again: sums of a run, the loss of the
swarm by epoch, and why rounds failed.

They are added up in the transaction of the rows themselves: what is in the file agrees whatever died meanwhile. Rows
that retention deletes are not subtracted.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from swarmcli.events import EpochLoss, RoundFinished
from swarmcli.journal.options import JOURNAL

if TYPE_CHECKING:
    from sqlite_utils import Database

OTHER = "another reason"

# In format 6 triggers added up what peers reported, weighted by the rates that they claimed.
LOSS_OF_FORMAT_6 = "loss_sum / nullif(weight, 0)"
READ_FORMAT_6 = f"CREATE TEMP VIEW curve AS SELECT *, {LOSS_OF_FORMAT_6} AS loss FROM main.curve"


def make(db: Database) -> None:
    """Makes the tables of sums, and the indices of lists, where they are missing."""
    rounds = ("rounds_committed", "rounds_failed", "rounds_undecided", "bytes_sent", "bytes_received")
    sums = dict.fromkeys(("epochs", "own_samples", *rounds), 0) | {"reached": -1}
    totals = {"run_id": str, **dict.fromkeys(sums, int)}
    db.table("totals").create(totals, pk="run_id", not_null=sums, defaults=sums, if_not_exists=True)
    # One row per epoch: which row of `epochs` tells of it best; the swarm's loss, how many told theirs, and since when.
    counts = {"stepped": 0, "peers": 0}
    curve = {"run_id": str, "epoch": int, "row": int, "stepped": int, "loss": float, "peers": int, "told": float}
    db.table("curve").create(curve, pk=("run_id", "epoch"), not_null=counts, defaults=counts, if_not_exists=True)
    key = ("run_id", "what", "reason")
    failures = {**dict.fromkeys(key, str), "count": int, "first": float, "last": float, "example": str}
    db.table("failures").create(failures, pk=key, if_not_exists=True)
    # Lists show the newest rows that people should read, and who left lately.
    db.execute("CREATE INDEX IF NOT EXISTS events_told ON events (id) WHERE level != 'detail'")
    db.execute("CREATE INDEX IF NOT EXISTS peers_gone ON peers (time) WHERE gone != ''")


@dataclass(frozen=True, slots=True)
class Failure:
    """Rounds that failed, or went on without somebody, for one reason; numbers and peers in it are left out."""

    reason: str
    what: Literal["round", "left out"]
    count: int
    first: float
    last: float
    example: str  # as it was said the last time


def begin(db: Database, run_id: str) -> None:
    """For the row of a start: its run's sums begin at nothing, if it is the first one."""
    db.table("totals").insert({"run_id": run_id}, pk="run_id", ignore=True)


def add_epochs(db: Database, run_id: str, count: int) -> None:
    """Adds up the newest so many rows of `epochs`."""
    newest = "SELECT id, epoch, samples > 0 AS stepped, coalesce(own_samples, 0) AS own FROM epochs"
    for row in reversed(list(db.query(f"{newest} ORDER BY id DESC LIMIT ?", [count]))):
        new = {**row, "run_id": run_id}
        db.execute("INSERT INTO curve (run_id, epoch) VALUES (:run_id, :epoch) ON CONFLICT DO NOTHING", new)
        db.execute(
            "UPDATE totals SET own_samples = own_samples + :own, reached = max(reached, :epoch), epochs = epochs + "
            "(SELECT row IS NULL FROM curve WHERE run_id = :run_id AND epoch = :epoch) WHERE run_id = :run_id",
            new,
        )
        # A state that was downloaded later tells nothing about an epoch that was stepped here.
        db.execute(
            "UPDATE curve SET row = :id, stepped = :stepped "
            "WHERE run_id = :run_id AND epoch = :epoch AND (:stepped OR NOT stepped)",
            new,
        )


def add_rounds(db: Database, run_id: str, rounds: Sequence[RoundFinished]) -> None:
    """Adds up rounds that were just added to their table."""
    db.execute(
        """
        UPDATE totals SET
            rounds_committed = rounds_committed + committed, rounds_failed = rounds_failed + failed,
            rounds_undecided = rounds_undecided + undecided,
            bytes_sent = totals.bytes_sent + sent, bytes_received = totals.bytes_received + received
        FROM (
            SELECT sum(outcome = 'committed') AS committed, sum(outcome = 'failed') AS failed,
                sum(outcome = 'undecided') AS undecided, sum(coalesce(bytes_sent, 0)) AS sent,
                sum(coalesce(bytes_received, 0)) AS received
            FROM (SELECT * FROM rounds ORDER BY id DESC LIMIT ?)
        ) WHERE run_id = ?
        """,
        [len(rounds), run_id],
    )
    for each in rounds:
        _add_causes(db, run_id, each.time, _causes(each))


def put_losses(db: Database, run_id: str, losses: Sequence[EpochLoss]) -> None:
    """Writes losses, and leaves out what is no number: a curve shows this peer's own there."""
    for each in losses:
        if math.isfinite(each.loss):
            db.execute(
                "INSERT INTO curve (run_id, epoch, loss, peers, told) VALUES (?, ?, ?, ?, ?) ON CONFLICT DO UPDATE SET "
                "loss = excluded.loss, peers = excluded.peers, told = coalesce(told, excluded.told)",
                [run_id, each.epoch, each.loss, each.peers, each.time],
            )


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


def _add_causes(db: Database, run_id: str, time: float, causes: Iterable[tuple[str, str, str]]) -> None:
    failures = db.table("failures")
    for what, cause, example in causes:
        if not failures.count_where("run_id = ? AND what = ? AND reason = ?", [run_id, what, cause]):
            cause = cause if failures.count_where("run_id = ?", [run_id]) < JOURNAL.max_causes else OTHER
        db.execute(
            "INSERT INTO failures VALUES (?, ?, ?, 1, ?, ?, ?) ON CONFLICT DO UPDATE SET "
            "count = count + 1, last = excluded.last, example = excluded.example",
            [run_id, what, cause, time, time, example[: JOURNAL.max_cause].encode("utf-8", "replace").decode()],
        )
