"""Processes that are stopped, killed and started late: they are in step again, and the others go on meanwhile."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

import pytest

from tests.end_to_end.swarm import Swarm
from tests.end_to_end.test_run import ENDLESS

pytestmark = pytest.mark.e2e

MakeSwarm = Callable[..., Swarm]
TARGET = 1024  # samples in an epoch: some tenths of a second for two trainers


def contributions_after(run: Swarm, name: str, epoch: int) -> list[int]:
    return [each.epoch for each in run.epochs(name) if each.own_samples and each.epoch > epoch]


def test_a_trainer_that_is_stopped_for_three_epochs_is_in_step_again(swarm: MakeSwarm) -> None:
    run = swarm(ENDLESS, target=TARGET)
    monitor = run.start_monitor()
    trainers = [run.start("join", f"trainer-{number}") for number in range(3)]
    stopped, other = trainers[0], trainers[1]
    for trainer in trainers:
        run.wait(lambda name=trainer.name: len(contributions_after(run, name, 0)) >= 2, "all contribute", *trainers)
    os.kill(stopped.pid, signal.SIGSTOP)
    try:
        at = run.epoch(other.name)
        run.wait_for_epoch(other.name, at + 3, *trainers[1:], monitor)
    finally:
        os.kill(stopped.pid, signal.SIGCONT)
    thawed = run.epoch(other.name)
    run.wait(lambda: contributions_after(run, stopped.name, thawed) != [], "it contributes again", *trainers)
    run.end_in_step(*trainers)


def test_the_one_that_is_left_goes_on_alone_and_is_joined_again(swarm: MakeSwarm) -> None:
    run = swarm(ENDLESS, target=TARGET)
    run.start_monitor()
    left, killed = (run.start("join", name) for name in ("left", "killed"))
    for trainer in (left, killed):
        run.wait(lambda name=trainer.name: contributions_after(run, name, 0) != [], "both contribute", left, killed)
    killed.kill()
    run.wait(lambda: run.epochs(left.name)[-1].peers == 1, "it goes on alone", left)
    at = run.epoch(left.name)
    newcomer = run.start("join", "newcomer")
    run.wait(lambda: contributions_after(run, newcomer.name, at) != [], "the newcomer contributes", left, newcomer)
    run.end_in_step(left, newcomer)
