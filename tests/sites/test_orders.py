"""What rank 0 orders is done by all; whatever goes wrong in it ends everyone's waiting, with an error that names it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from swarmcli.errors import SiteError
from swarmcli.sites.links import receive_numbers
from swarmcli.sites.orders import Follower, Order, OrderDesk
from swarmcli.sites.site import Site
from tests.sharding.processes import Worlds

pytestmark = pytest.mark.e2e


class AddUp(Order, frozen=True):
    factor: int


class Fail(Order, frozen=True):
    """A handler that raises, in the middle of a transfer."""


class Dawdle(Order, frozen=True):
    """One that takes longer than anybody waits."""


class Unknown(Order, frozen=True):
    """Nobody knows it."""


def summed(site: Site, value: int) -> int:
    total = torch.tensor(value)
    dist.reduce(total, dst=0, group=site.orders)
    return int(total)


class Worker:
    """A rank other than 0 of these tests."""

    def __init__(self, site: Site) -> None:
        self.site = site
        self.done: list[int] = []
        self.free = threading.Event()
        handlers: dict[type[Order], Callable[[Any], None]] = {
            AddUp: self.add_up,
            Fail: self.fail,
            Dawdle: lambda order: self.free.wait() and None,
        }
        self.follower = Follower(site, handlers)
        self.follower.start()

    def add_up(self, order: AddUp) -> None:
        summed(self.site, order.factor * self.site.rank)
        self.done.append(order.factor)

    def fail(self, order: Fail) -> None:
        raise RuntimeError("the disk is full")


def give_orders() -> list[int]:
    with Site.form(timeout=10) as site:
        if site.rank:
            worker = Worker(site)
            worker.follower.join()
            return worker.done
        desk = OrderDesk(site)
        totals = [desk.order(AddUp(factor), lambda: summed(site, 0)) for factor in (1, 2, 3)]
        desk.close()
        desk.close()
        with pytest.raises(SiteError, match="told to end"):
            desk.order(AddUp(1))
        return totals


def test_all_ranks_carry_out_orders_in_their_order(worlds: Worlds) -> None:
    assert worlds(3).run(give_orders) == [[3, 6, 9], [1, 2, 3], [1, 2, 3]]


def order_from_threads() -> list[int]:
    with Site.form(timeout=10) as site:
        if site.rank:
            worker = Worker(site)
            worker.follower.join()
            return sorted(worker.done)
        desk, totals = OrderDesk(site), list[int]()

        def order(factor: int) -> None:
            totals.append(desk.order(AddUp(factor), lambda: summed(site, 0)))

        threads = [threading.Thread(target=order, args=(factor,)) for factor in range(20)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        desk.close()
        return sorted(totals)


def test_orders_of_several_threads_do_not_mix(worlds: Worlds) -> None:
    assert worlds(2).run(order_from_threads) == [list(range(20))] * 2


def fail_in(kind: str) -> list[str]:
    """What each rank's main thread, which waits in the pace group, and its orders end with."""
    with Site.form(timeout=1000) as site:
        worker = Worker(site) if site.rank else None
        desk = None if site.rank else OrderDesk(site)
        said = []
        try:
            if desk is None:
                receive_numbers(site.pace, [torch.empty(1)], 0)
            elif kind == "handler":
                desk.order(Fail(), lambda: summed(site, 0))
            elif kind == "transfer":
                desk.order(AddUp(1), lambda: 1 // 0)
            elif kind == "unknown":
                desk.order(Unknown())
            elif kind == "slow":
                desk.order(Dawdle(), patience=0.2)
        except (SiteError, RuntimeError, ZeroDivisionError) as error:
            said.append(type(error).__name__)
        if worker is not None:
            worker.free.set()
            with pytest.raises(SiteError, match=f"rank {site.rank} can follow no more orders"):
                worker.follower.join()
        else:
            with pytest.raises(SiteError) as failed:
                desk.order(AddUp(1))
            with pytest.raises(SiteError, match="came to no end at rank 0"):
                desk.check()
            desk.close()
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
def test_a_failure_anywhere_ends_all_waiting(worlds: Worlds, kind: str, error: str, words: str) -> None:
    leader, *others = worlds(3).run(fail_in, kind)
    assert leader[0] == error
    assert words in leader[1]
    assert others == [["SiteError"]] * 2


def misuse() -> None:
    with Site.form(timeout=10) as site:
        if site.rank:
            with pytest.raises(ValueError, match="only rank 0"):
                OrderDesk(site)
        else:
            with pytest.raises(ValueError, match="rank 0"):
                Follower(site, {})


def test_who_orders_and_who_follows(worlds: Worlds) -> None:
    worlds(2).run(misuse)
