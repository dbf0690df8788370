"""How a run went over time, in little room: sums over spans of four lengths, of each the newest twenty thousand.

So the last day is known to 4 s, two weeks to a minute, most of a year to a quarter of an hour, and ten years to four
and a half hours, in less than 10 MB; and whatever span is asked for, few rows have to be read.
"""

from __future__ import annotations

import math
import sqlite3
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from swarmcli.events import RunObserved

SCALES = (4, 64, 1024, 16384)  # seconds
KEPT = 20_000  # slots of each scale
ROWS_PER_POINT = 16  # that are read at most for a point: the ratio of two scales

LAYOUT = """
CREATE TABLE IF NOT EXISTS moments (
    run_id TEXT, scale INTEGER, slot INTEGER, first REAL, last REAL, count INTEGER, alive INTEGER, trainers INTEGER,
    rate REAL, epoch INTEGER, loss REAL, losses INTEGER, PRIMARY KEY (run_id, scale, slot)
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS moments_by_epoch ON moments (run_id, scale, epoch);
"""

Axis = Literal["time", "epoch"]  # on which a span is given
Query = Callable[[str, Sequence[Any]], Sequence[Any]]


@dataclass(frozen=True, slots=True)
class Moment:
    """Means over `seconds` from `time` on; `epoch` is the last one in them."""

    time: float
    seconds: float
    epoch: int
    alive: float  # peers
    trainers: float
    samples_per_second: float
    loss: float | None  # the swarm's; None: unknown then


def add_moments(connection: sqlite3.Connection, run_id: str, observed: Sequence[RunObserved]) -> None:
    for each in observed:
        known = each.loss is not None and math.isfinite(each.loss)
        rate = each.samples_per_second if math.isfinite(each.samples_per_second) else 0.0
        sums = (each.alive, each.trainers, rate, each.epoch, each.loss if known else 0.0, int(known))
        for scale in SCALES:
            slot = int(each.time // scale)
            connection.execute(
                "INSERT INTO moments VALUES (?, ?, ?, ?, ?, 1, ?, ?, ?, ?, ?, ?) ON CONFLICT DO UPDATE SET "
                "first = min(first, excluded.first), last = max(last, excluded.last), count = count + 1, "
                "alive = alive + excluded.alive, trainers = trainers + excluded.trainers, "
                "rate = rate + excluded.rate, epoch = max(epoch, excluded.epoch), "
                "loss = loss + excluded.loss, losses = losses + excluded.losses",
                (run_id, scale, slot, each.time, each.time, *sums),
            )
            connection.execute(
                "DELETE FROM moments WHERE run_id = ? AND scale = ? AND slot < ?", (run_id, scale, slot - KEPT)
            )


def read_moments(
    query: Query, run_id: str, *, begin: float | None, end: float | None, by: Axis, points: int
) -> list[Moment]:
    """At most `points` moments between two times or two epochs (None: from the first, to the last), oldest first."""
    if by == "epoch":
        begin = None if begin is None else _time_at(query, run_id, begin, forwards=True)
        end = None if end is None else _time_at(query, run_id, end, forwards=False)
    edges = [_edge(query, run_id, SCALES[-1], order) for order in ("ASC", "DESC")]
    if edges[0] is None or edges[1] is None:
        return []
    first = max(edges[0]["first"], -math.inf if begin is None else begin)
    last = min(edges[1]["last"], math.inf if end is None else end)
    scale = _scale_for(query, run_id, first, (last - first) / points / ROWS_PER_POINT)
    low, high = int(first // scale), int(last // scale)
    width = max(1, math.ceil((high - low + 1) / points))  # slots in a point
    rows = query(
        "SELECT min(first), max(epoch), sum(alive) * 1.0 / sum(count), sum(trainers) * 1.0 / sum(count), "
        "sum(rate) / sum(count), CASE WHEN sum(losses) THEN sum(loss) / sum(losses) END FROM moments "
        "WHERE run_id = ? AND scale = ? AND slot BETWEEN ? AND ? GROUP BY (slot - ?) / ? ORDER BY 1",
        (run_id, scale, low, high, low, width),
    )
    return [Moment(time, float(width * scale), *rest) for time, *rest in rows]


def _edge(query: Query, run_id: str, scale: int, order: str) -> Any:
    """The first or the last slot of a scale; None: it has none."""
    found = query(
        f"SELECT * FROM moments WHERE run_id = ? AND scale = ? ORDER BY slot {order} LIMIT 1", (run_id, scale)
    )
    return found[0] if found else None


def _scale_for(query: Query, run_id: str, first: float, shortest: float) -> int:
    """The finest scale that is not much finer than wanted and still reaches back so far, or the coarsest."""
    for scale in SCALES:
        oldest = _edge(query, run_id, scale, "ASC")
        if scale >= shortest and oldest is not None and oldest["first"] <= first:
            return scale
    return SCALES[-1]


def _time_at(query: Query, run_id: str, epoch: float, *, forwards: bool) -> float:
    """When an epoch began, or (not `forwards`) was over, as exactly as that is still known."""
    comparison, order, column = (">=", "ASC", "first") if forwards else ("<=", "DESC", "last")
    for scale in SCALES:
        oldest = _edge(query, run_id, scale, "ASC")
        if oldest is not None and (oldest["epoch"] <= epoch or scale == SCALES[-1]):
            rows = query(
                f"SELECT {column} FROM moments WHERE run_id = ? AND scale = ? AND epoch {comparison} ? "
                f"ORDER BY epoch {order}, slot {order} LIMIT 1",
                (run_id, scale, epoch),
            )
            if rows:
                return float(rows[0][0])
    return math.inf if forwards else -math.inf
