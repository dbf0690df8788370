"""What rank 0 commands is done by all; what goes wrong in it ends everyone's waiting, with an error that names it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from swarmcli.errors import SiteError
from swarmcli.sites.commands import Command, CommandFollower, LeaderCommands
from swarmcli.sites.links import receive_tensors
from swarmcli.sites.site import Site
from tests.sharding.threads import in_threads, ranks


class AddUp(Command, frozen=True):
    factor: int


class Fail(Command, frozen=True):
    """A handler that raises, in the middle of a transfer."""


class Dawdle(Command, frozen=True):
    """One that takes longer than anybody waits."""


class Unknown(Command, frozen=True):
    """Nobody knows it."""


def summed(site: Site, value: int) -> int:
    total = torch.tensor(value)
    dist.reduce(total, dst=0, group=site.commands)
    return int(total)


class Worker:
    """A rank other than 0 of these tests."""

    def __init__(self, site: Site) -> None:
        self.site = site
        self.done: list[int] = []
        self.free = threading.Event()
        handlers: dict[type[Command], Callable[[Any], None]] = {
            AddUp: self.add_up,
            Fail: self.fail,
            Dawdle: lambda command: self.free.wait() and None,
        }
        self.follower = CommandFollower(site, handlers)
        self.follower.start()

    def add_up(self, command: AddUp) -> None:
        summed(self.site, command.factor * self.site.rank)
        self.done.append(command.factor)

    def fail(self, command: Fail) -> None:
        raise RuntimeError("the disk is full")


@ranks(3)
def test_all_ranks_carry_out_orders_in_their_order() -> None:
    with Site.form(timeout=10) as site:
        if site.rank:
            worker = Worker(site)
            worker.follower.join()
            assert worker.done == [1, 2, 3]
            return
        commands = LeaderCommands(site)
        totals = [commands.run(AddUp(factor), lambda: summed(site, 0)) for factor in (1, 2, 3)]
        commands.close()
        with pytest.raises(SiteError, match="told to end"):
            commands.run(AddUp(1))
        assert totals == [3, 6, 9]


@ranks(2)
def test_orders_of_several_threads_do_not_mix() -> None:
    with Site.form(timeout=10) as site:
        if site.rank:
            worker = Worker(site)
            worker.follower.join()
            assert sorted(worker.done) == list(range(20))
            return
        commands, totals = LeaderCommands(site), list[int]()

        def run(factor: int) -> None:
            totals.append(commands.run(AddUp(factor), lambda: summed(site, 0)))

        threads = [threading.Thread(target=run, args=(factor,)) for factor in range(20)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        commands.close()
        assert sorted(totals) == list(range(20))


def fail_in(kind: str) -> list[str]:
    """What each rank's main thread, which waits in the pace group, and its commands end with."""
    with Site.form(timeout=0.2 if kind == "slow" else 1000) as site:
        worker = Worker(site) if site.rank else None
        commands = None if site.rank else LeaderCommands(site)
        said = []
        try:
            if commands is None:
                receive_tensors(site.pace, [torch.empty(1)], 0)
            elif kind == "handler":
                commands.run(Fail(), lambda: summed(site, 0))
            elif kind == "transfer":
                commands.run(AddUp(1), lambda: 1 // 0)
            elif kind == "unknown":
                commands.run(Unknown())
            elif kind == "slow":
                commands.run(Dawdle())
        except (SiteError, RuntimeError, ZeroDivisionError) as error:
            said.append(type(error).__name__)
        if worker is not None:
            worker.free.set()
            with pytest.raises(SiteError, match=f"rank {site.rank} can follow no more commands"):
                worker.follower.join()
        else:
            with pytest.raises(SiteError) as failed:
                commands.run(AddUp(1))
            with pytest.raises(SiteError, match="came to no end at rank 0"):
                commands.check()
            commands.close()
            said.append(str(failed.value))
        dist.barrier()  # nobody waits for another one to leave
        return said


@pytest.mark.parametrize(
    ("kind", "error", "words"),
    [
        ("handler", "RuntimeError", "Fail came to no end"),
        ("transfer", "ZeroDivisionError", "AddUp came to no end at rank 0: integer division"),
        ("unknown", "SiteError", "Unknown came to no end"),
        ("slow", "SiteError", "rank 1 is gone, or sent nothing within 0.2 s"),
    ],
)
def test_a_failure_anywhere_ends_all_waiting(kind: str, error: str, words: str) -> None:
    leader, *others = in_threads(3, fail_in, kind)
    assert leader[0] == error
    assert words in leader[1]
    assert others == [["SiteError"]] * 2


@ranks(2)
def test_who_orders_and_who_follows() -> None:
    with Site.form(timeout=10) as site:
        if site.rank:
            with pytest.raises(ValueError, match="only rank 0"):
                LeaderCommands(site)
        else:
            with pytest.raises(ValueError, match="rank 0"):
                CommandFollower(site, {})
