"""Runs of real processes over TCP: what stays true when roles come, go and die."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from swarmcli.cli.processes import Child
from tests.end_to_end.swarm import Swarm

pytestmark = pytest.mark.e2e

MakeSwarm = Callable[..., Swarm]
ENDLESS = 100_000  # epochs: the test ends the run when it has seen enough


def finish(swarm: Swarm, last: int, *trainers: Child) -> None:
    for trainer in trainers:
        swarm.wait_for_end(trainer)
    summaries = [swarm.summary(trainer.name) for trainer in trainers]
    assert {summary["epoch"] for summary in summaries} == {last}
    assert len({summary["digest"] for summary in summaries}) == 1


@pytest.mark.smoke
def test_a_trainer_goes_on_from_the_monitors_checkpoint(swarm: MakeSwarm) -> None:
    run = swarm(8)
    monitor = run.start_monitor("--set", "checkpoint.every_epochs=2", "--leave-when-done")
    finish(run, 8, run.start("join", "first"))
    run.wait_for_end(monitor)
    latest = run.home("monitor") / "checkpoints" / "latest"
    assert latest.resolve().name == "epoch-000008"
    assert monitor.last_words(1) == f"saved epoch 8 at {latest.resolve()}"
    card = (latest / "README.md").read_text()
    assert "epoch 8" in card and (latest / "tokenizer.json").is_file()
    run.contact = ""
    resumed = run.start("join", "resumed", "--resume", str(latest), "--set", "max_epochs=10")
    finish(run, 10, resumed)
    assert [epoch.epoch for epoch in run.epochs("resumed") if epoch.own_samples] == [9, 10]


def test_a_lone_trainer_needs_nobody_and_goes_on_from_what_it_saved(swarm: MakeSwarm) -> None:
    run = swarm(1000)
    alone = run.start("join", "alone")
    run.wait_for_epoch("alone", 4, alone)
    alone.ask_to_stop()
    run.wait_for_end(alone)
    left = run.summary("alone")["epoch"]
    place = run.home("alone") / "checkpoints" / f"epoch-{left:06d}"
    assert alone.last_words(1) == f"saved epoch {left} at {place}"
    assert run.summary("alone")["samples"] >= 4 * 256
    again = run.start("join", "alone")
    run.wait_for_epoch("alone", left + 2, again)
    again.ask_to_stop()
    run.wait_for_end(again)
    trained = [epoch.epoch for epoch in run.epochs("alone") if epoch.own_samples]
    assert trained[: left + 2] == [*range(1, left + 3)]
