"""How format-6.sql and format-7.sql were made, each by the build that wrote that format last (41000e92^ and 26d1bc3):

    cd OLD_BUILD && python THIS_FILE > format-7.sql

A journal holds of each kind what a peer would have recorded.
"""

from __future__ import annotations

import sqlite3
import tempfile
from pathlib import Path

from swarmcli import events as happened
from swarmcli.journal import Journal, RunRecord

ALICE, BOB, CAROL = "a" * 52, "b" * 52, "c" * 52
START = 1_790_000_000.0
NOW = [START]


def main() -> None:
    with tempfile.TemporaryDirectory() as place:
        path = Path(place) / "journal.sqlite"
        journal = Journal(path, run=RunRecord("kept", "monitor", ALICE, "alice", "0.1.0"), clock=lambda: NOW[0])
        for number in (1, 2, 3):
            tell(journal, number)
            NOW[0] += 8.0
            journal.flush(10.0)
        journal.close()
        with sqlite3.connect(path) as db:
            (version,) = db.execute("PRAGMA user_version").fetchone()
            (application,) = db.execute("PRAGMA application_id").fetchone()
            print(f"PRAGMA application_id={application};\nPRAGMA user_version={version};")
            print("\n".join(db.iterdump()))


def tell(journal: Journal, number: int) -> None:
    failed = number == 3
    journal.record(happened.PeerSeen(BOB, "bob", "trainer", number, 30, 12.5, False, "left" if failed else ""))
    journal.record(happened.EpochAdvanced(number, "ab" * 32, 1000, 0, 2, None, 8.0, 0.25))
    journal.record(happened.EpochReported(BOB, number, 4.0 - number / 2, 400 * number, 12.5))
    if hasattr(happened, "EpochLoss"):
        journal.record(happened.EpochLoss(number, 4.0 - number / 2, 1))
    journal.record(
        happened.RoundFinished(
            "ef" * 32, "kept_grads", "failed" if failed else "committed", "bob was lost" if failed else "", number, BOB,
            (ALICE, BOB, CAROL), (BOB, CAROL), {CAROL: "no part arrived for 4.0 s"}, 1000, 900, {"averaging": 0.25},
        )
    )  # fmt: skip
    journal.record(happened.RunObserved(number, 3, 2, 125.0, 4.0 - number / 2))
    journal.record(happened.Evaluated(number, 3.5 - number / 2, 256))
    journal.record(happened.Noticed("warning", f"word {number}"))
    # Of bob's 300 samples in each epoch it has seen 200 itself; for the others it took another monitor's word.
    given = {"samples": 300, "own_samples": 200, "hours": 0.5, "rounds": 1, "reduced_bytes": 8, "uptime": 8.0}
    own = {"own_hours": 0.25, "own_rounds": 1, "own_reduced_bytes": 8, "own_uptime": 6.0}
    named = {"peer": BOB, "name": "Bob", "team": "reds", "first": NOW[0], "last": NOW[0]}
    journal.record(of_build(happened.Booked, run_id="kept", **named, **given, **own))
    head = {"epoch": number, "run_samples": 1000 * number, "vouched": 1, "since": 1}
    journal.record(of_build(happened.BookHead, run_id="kept", **head))


def of_build(kind: type, **values: object) -> object:
    """With the fields that the build knows."""
    return kind(**{name: value for name, value in values.items() if name in kind.__dataclass_fields__})


if __name__ == "__main__":
    main()
