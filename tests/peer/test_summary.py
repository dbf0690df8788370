from __future__ import annotations

from swarmcli.events import DriftMeasured, RoundsReplayed
from swarmcli.peer.peer import Summary


def test_rounds_that_were_made_up_for_and_the_last_drift_are_told() -> None:
    summary = Summary("run", "trainer", "Ada", "a" * 52)
    assert (summary.replays, summary.drift) == (0, None)
    summary.note(RoundsReplayed(5, "cd" * 32, 2, "it was late"))
    summary.note(RoundsReplayed(8, "ef" * 32, 1, "it was late"))
    summary.note(DriftMeasured(8, 2e-7, {}, (), False))
    assert (summary.replays, summary.drift, summary.epoch, summary.lineage) == (3, 2e-7, 8, "ef" * 32)
