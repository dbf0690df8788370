"""How a run went over time, for charts, in one table. A row spans 4 s at first, and twice as much each time that its
age has doubled.

So the last two hours are known to 4 s, a day to a minute, a month to half an hour, a year to five hours and ten years
to 36 hours, in 17,000 rows: few enough to be read as a whole for any chart.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from swarmcli.events import RunObserved
from swarmcli.journal.options import JOURNAL

if TYPE_CHECKING:
    from sqlite_utils import Database

SCALES = tuple(4 << power for power in range(16))  # seconds that a row may span

# Format 6 had a row for the same moment in each of four scales: the finest one counts.
_FINER = """
WITH oldest AS MATERIALIZED (SELECT run_id, scale, min(first) AS first FROM main.moments GROUP BY run_id, scale)
"""
_DOUBLED = """
EXISTS (SELECT 1 FROM oldest WHERE oldest.run_id = moments.run_id AND oldest.scale < moments.scale
    AND oldest.first <= moments.last)
"""
CONVERT_FORMAT_6 = f"{_FINER} DELETE FROM moments WHERE {_DOUBLED}"
READ_FORMAT_6 = f"CREATE TEMP VIEW moments AS {_FINER} SELECT * FROM main.moments AS moments WHERE NOT {_DOUBLED}"

_ADD = """
INSERT INTO moments {} ON CONFLICT DO UPDATE SET
    first = min(first, excluded.first), last = max(last, excluded.last), count = count + excluded.count,
    alive = alive + excluded.alive, trainers = trainers + excluded.trainers, rate = rate + excluded.rate,
    epoch = max(epoch, excluded.epoch), loss = loss + excluded.loss, losses = losses + excluded.losses
"""
_OBSERVED = _ADD.format("VALUES (?, ?, ?, ?, ?, 1, ?, ?, ?, ?, ?, ?)")
_OLD = "FROM moments WHERE run_id = ? AND scale = ? AND slot < ?"
_MERGED = _ADD.format(
    "SELECT run_id, scale * 2, slot / 2, min(first), max(last), sum(count), sum(alive), sum(trainers), sum(rate), "
    f"max(epoch), sum(loss), sum(losses) {_OLD} GROUP BY slot / 2"
)

Axis = Literal["time", "epoch"]  # on which a span begins
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


def make(db: Database) -> None:
    """Makes the table, if it is missing."""
    key = {"run_id": str, "scale": int, "slot": int}
    sums = {"count": int, "alive": int, "trainers": int, "rate": float, "epoch": int, "loss": float, "losses": int}
    db.table("moments").create({**key, "first": float, "last": float, **sums}, pk=tuple(key), if_not_exists=True)


def add_moments(db: Database, run_id: str, observed: Sequence[RunObserved]) -> None:
    for each in observed:
        known = each.loss is not None and math.isfinite(each.loss)
        rate = each.samples_per_second if math.isfinite(each.samples_per_second) else 0.0
        sums = (each.alive, each.trainers, rate, each.epoch, each.loss if known else 0.0, int(known))
        slot = int(each.time // SCALES[0])
        db.execute(_OBSERVED, (run_id, SCALES[0], slot, each.time, each.time, *sums))
        for scale in SCALES[:-1]:
            # whole pairs of rows that are too old for this scale
            slots = 2 * (int(each.time // scale - JOURNAL.moments) // 2)
            if db.execute(_MERGED, (run_id, scale, slots)).rowcount:
                db.execute(f"DELETE {_OLD}", (run_id, scale, slots))


def read_moments(query: Query, run_id: str, *, begin: float | None, by: Axis, points: int) -> list[Moment]:
    """Returns at most `points` moments from a time or an epoch on (None: from the first), oldest first."""
    if by == "epoch" and begin is not None:
        # From the beginning of that epoch, as exactly as it is still known.
        ((begin,),) = query("SELECT min(first) FROM moments WHERE run_id = ? AND epoch >= ?", (run_id, begin))
        if begin is None:
            return []
    ((first, last),) = query("SELECT min(first), max(last) FROM moments WHERE run_id = ?", (run_id,))
    if first is None:
        return []
    first = first if begin is None else max(first, begin)
    low = int(first // SCALES[0])
    slots = max(1, math.ceil((int(last // SCALES[0]) - low + 1) / points))  # slots of the finest scale in one point
    rows = query(
        "SELECT min(first), max(scale), max(epoch), sum(alive) * 1.0 / sum(count), sum(trainers) * 1.0 / sum(count), "
        "sum(rate) / sum(count), CASE WHEN sum(losses) THEN sum(loss) / sum(losses) END FROM moments "
        "WHERE run_id = ? AND last >= ? GROUP BY max(0, slot * scale / ? - ?) / ? ORDER BY 1",
        (run_id, first, SCALES[0], low, slots),
    )
    return [Moment(time, float(max(scale, slots * SCALES[0])), *rest) for time, scale, *rest in rows]
