"""All ranks run rank 0's commands in their steps; an error in one ends all waits, and is named."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from swarmcli.errors import SiteError
from swarmcli.sites.commands import Command, LeaderCommands, StepVerdict, follow
from swarmcli.sites.site import Site
from swarmcli.sites.step_sync import announce
from tests.sharding.threads import in_threads, ranks


class AddUp(Command, frozen=True):
    factor: int


class Fail(Command, frozen=True):
    """A handler that raises, in the middle of a transfer."""


class Unknown(Command, frozen=True):
    """Nobody knows it."""


def summed(site: Site, value: int) -> int:
    total = torch.tensor(value)
    dist.reduce(total, dst=0, group=site.group)
    return int(total)


class Worker:
    """A rank other than 0 of these tests."""

    def __init__(self, site: Site) -> None:
        self.site = site
        self.done: list[int] = []
        self.handlers: dict[type[Command], Callable[[Any], None]] = {
            AddUp: self.add_up,
            Fail: self.fail,
        }

    def add_up(self, command: AddUp) -> None:
        summed(self.site, command.factor * self.site.rank)
        self.done.append(command.factor)

    def fail(self, command: Fail) -> None:
        raise RuntimeError("the disk is full")


@ranks(3)
def test_commands_of_several_threads_wait_for_a_step_and_do_not_mix() -> None:
    with Site.form(timeout=10) as site:
        if site.rank:
            worker = Worker(site)
            while not follow(site, worker.handlers).stop:
                pass
            assert sorted(worker.done) == [*range(20), 100]
            return
        commands, totals = LeaderCommands(site), list[int]()

        def run(factor: int) -> None:
            totals.append(commands.run(AddUp(factor), lambda: summed(site, 0)))

        threads = [threading.Thread(target=run, args=(factor,)) for factor in range(20)]
        for thread in threads[:10]:
            thread.start()
        assert not totals  # nobody is in a step
        commands.open()
        for thread in threads[10:]:
            thread.start()
        commands.shut()
        assert len(totals) >= 10, "whoever waited has had its turn before the step ends"
        announce(site, StepVerdict(1))
        commands.open()
        run(100)
        for thread in threads:
            thread.join()
        commands.shut()
        announce(site, StepVerdict(2, stop=True))
        assert sorted(totals) == [*(3 * factor for factor in range(20)), 300]


@ranks(2)
def test_whoever_waits_for_a_step_learns_that_none_comes() -> None:
    with Site.form(timeout=10) as site:
        if site.rank:
            with pytest.raises(SiteError, match="rank 0 is gone"):
                follow(site, {})
            return
        commands, said = LeaderCommands(site), list[str]()

        def run() -> None:
            with pytest.raises(SiteError) as failed:
                commands.run(AddUp(1), lambda: summed(site, 0))
            said.append(str(failed.value))

        thread = threading.Thread(target=run)
        thread.start()
        commands.fail("its training has failed")
        thread.join()
        run()
        assert said == ["its training has failed"] * 2


def fail_in(kind: str) -> list[str]:
    """What each rank ends with."""
    with Site.form(timeout=1000) as site:
        said = []
        if site.rank:
            with pytest.raises((SiteError, RuntimeError)):
                try:
                    follow(site, Worker(site).handlers)
                finally:
                    site.break_off()  # as its SiteMember does
        else:
            commands = LeaderCommands(site)
            commands.open()
            command = {"handler": Fail(), "transfer": AddUp(1), "unknown": Unknown()}[kind]
            with pytest.raises((RuntimeError, ZeroDivisionError)) as first:
                commands.run(command, lambda: 1 // 0 if kind == "transfer" else summed(site, 0))
            with pytest.raises(SiteError, match="came to no end at rank 0") as failed:
                commands.run(AddUp(1), lambda: summed(site, 0))
            said = [type(first.value).__name__, str(failed.value)]
        dist.barrier()  # of the world, which no site breaks
        return said


@pytest.mark.parametrize(
    ("kind", "error", "words"),
    [
        ("handler", "RuntimeError", "Fail came to no end"),
        ("transfer", "ZeroDivisionError", "AddUp came to no end at rank 0: integer division"),
        ("unknown", "RuntimeError", "Unknown came to no end"),
    ],
)
def test_a_failure_anywhere_ends_all_waiting(kind: str, error: str, words: str) -> None:
    leader, *_ = in_threads(3, fail_in, kind)
    assert leader[0] == error
    assert words in leader[1]
