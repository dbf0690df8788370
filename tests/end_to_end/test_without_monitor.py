"""Trainers of a run whose monitor is gone, as real processes: they find each other again, and write its checkpoints."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from tests.end_to_end.forked import command
from tests.end_to_end.swarm import Swarm

pytestmark = pytest.mark.e2e

ENDLESS = 100_000  # epochs


def test_a_trainer_that_is_started_again_while_the_monitor_is_gone_finds_the_others_or_waits(
    swarm: Callable[..., Swarm],
) -> None:
    """All are killed, so nobody writes anything at its end."""
    run = swarm(ENDLESS)
    here = {"SWARM_RUNTIME_DIR": str(run.directory / "runtime")}
    monitor = run.start_monitor()
    trainers = {name: run.start("join", name, environment=here) for name in ("ann", "bob")}
    for name, trainer in trainers.items():
        run.wait_for_epoch(name, 3, monitor, trainer)
    monitor.kill()
    epoch = run.epoch("bob")
    run.wait(lambda: run.epoch("bob") > epoch + 1, "the trainers go on without the monitor", *trainers.values())
    trainers["ann"].kill()
    epoch = run.epoch("bob")
    ann = run.start("join", "ann", environment=here)
    run.wait(lambda: run.epoch("ann") > epoch + 3, "ann trains along again", ann, trainers["bob"])
    assert any(len(each.members) > 1 for each in run.rounds("ann")[-3:])

    for each in (ann, trainers["bob"]):
        each.kill()
    epoch = run.epoch("ann")
    ann = run.start("join", "ann", environment=here)

    def waits() -> str:
        shown: list[dict[str, Any]] = json.loads(command(["status", "--json"], here).stdout or "[]")
        return " ".join(str(each["state"]["run"]["waits"]) for each in shown if "state" in each)

    run.wait(lambda: "nobody has answered since" in waits(), "its status says that it waits", ann)
    place = run.contact.split("/")[2]
    assert place in ann.last_words(40) and "Ctrl-C" in ann.last_words(40)
    port = place.rpartition(":")[2]
    # Nobody holds a state any more, and each home tells that there was one: somebody has to say that it is lost.
    back = run.start("monitor", "monitor", "--port", port, "--web", "0", "--begin-anew")
    run.wait(lambda: run.epoch("ann") > epoch + 3, "ann goes on with the monitor", ann, back)
