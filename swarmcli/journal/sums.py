"""Sums that are made as rows come in, so that nobody has to read a million rows again: sums of a run, and the swarm's
loss by epoch.

They are added up in the transaction of the rows themselves, so the file agrees with itself whatever dies meanwhile.
Rows that retention deletes are not subtracted.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from swarmcli.events import EpochLoss

if TYPE_CHECKING:
    from sqlite_utils import Database

# a condition on rounds: they failed, or went on without somebody
TROUBLED = "outcome != 'committed' OR left_out != '{}'"

# In format 6 triggers added up what peers reported, weighted by the rates that they claimed.
LOSS_OF_FORMAT_6 = "loss_sum / nullif(weight, 0)"
READ_FORMAT_6 = f"CREATE TEMP VIEW curve AS SELECT *, {LOSS_OF_FORMAT_6} AS loss FROM main.curve"


def make(db: Database) -> None:
    """Makes the tables of sums, and the indices of lists, if they are missing."""
    rounds = ("rounds_committed", "rounds_failed", "rounds_undecided", "bytes_sent", "bytes_received")
    sums = dict.fromkeys(("epochs", "own_samples", *rounds), 0) | {"reached": -1}
    totals = {"run_id": str, **dict.fromkeys(sums, int)}
    db.table("totals").create(totals, pk="run_id", not_null=sums, defaults=sums, if_not_exists=True)
    # One row per epoch: the row of `epochs` that tells most of it; the swarm's loss, how many peers told theirs, and
    # since when.
    counts = {"stepped": 0, "peers": 0}
    curve = {"run_id": str, "epoch": int, "row": int, "stepped": int, "loss": float, "peers": int, "told": float}
    db.table("curve").create(curve, pk=("run_id", "epoch"), not_null=counts, defaults=counts, if_not_exists=True)
    # For lists of the newest rows that people should read, of what went wrong, and of peers that left lately.
    db.execute("CREATE INDEX IF NOT EXISTS events_told ON events (id) WHERE level != 'detail'")
    db.execute(f"CREATE INDEX IF NOT EXISTS rounds_troubled ON rounds (id) WHERE {TROUBLED}")
    db.execute("CREATE INDEX IF NOT EXISTS peers_gone ON peers (time) WHERE gone != ''")


def begin(db: Database, run_id: str) -> None:
    """For the row of a start: the sums of its run begin at 0, if this is the run's first start."""
    db.table("totals").insert({"run_id": run_id}, pk="run_id", ignore=True)


def add_epochs(db: Database, run_id: str, count: int) -> None:
    """Adds up the newest `count` rows of `epochs`."""
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


def add_rounds(db: Database, run_id: str, count: int) -> None:
    """Adds up the newest `count` rows of `rounds`."""
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
        [count, run_id],
    )


def put_losses(db: Database, run_id: str, losses: Sequence[EpochLoss]) -> None:
    """Writes losses, but none that is not finite: there a curve shows this peer's own."""
    for each in losses:
        if math.isfinite(each.loss):
            db.execute(
                "INSERT INTO curve (run_id, epoch, loss, peers, told) VALUES (?, ?, ?, ?, ?) ON CONFLICT DO UPDATE SET "
                "loss = excluded.loss, peers = excluded.peers, told = coalesce(told, excluded.told)",
                [run_id, each.epoch, each.loss, each.peers, each.time],
            )
