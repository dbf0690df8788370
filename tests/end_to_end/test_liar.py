"""A process that lies about where the run is, beside honest ones."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.end_to_end.swarm import Swarm
from tests.end_to_end.test_run import ENDLESS

pytestmark = pytest.mark.e2e

MakeSwarm = Callable[..., Swarm]


def test_two_trainers_go_on_beside_one_that_claims_to_be_at_epoch_a_million(swarm: MakeSwarm) -> None:
    run = swarm(ENDLESS, target=512)
    honest = [run.start_contact("join", "trainer-1")]
    honest.append(run.start("join", "trainer-2"))
    false = run.start("join", "liar", launcher=[str(Path(__file__).with_name("liar.py"))])
    run.wait(lambda: "it lies from here on" in (run.directory / "liar.log").read_text(), "it lies", *honest, false)
    at = max(run.epoch(trainer.name) for trainer in honest)
    for trainer in honest:
        run.wait_for_epoch(trainer.name, at + 8, *honest, false)
    run.end_in_step(*honest)
    assert false.returncode is None
    false.kill()
    assert all(epoch.epoch < ENDLESS for trainer in honest for epoch in run.epochs(trainer.name))
