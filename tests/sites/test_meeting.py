"""Processes find each other at a store where others have met before."""

from __future__ import annotations

import os
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from swarmcli.errors import SiteError
from swarmcli.sites.meeting import CURRENT, agree_on_name
from swarmcli.sites.site import Site
from tests.sharding.processes import Worlds


def live_twice() -> list[bool]:
    """As at a restart of torchrun on two machines: a process has died on one of them."""
    restarted = []
    for life in range(2):
        os.environ["TORCHELASTIC_RESTART_COUNT"] = str(life if os.environ["RANK"] == "1" else 0)
        with Site.form(timeout=10) as site:
            site.meet()
            restarted.append(site.any(os.environ["TORCHELASTIC_RESTART_COUNT"] != "0"))
            total = torch.ones(1)
            dist.all_reduce(total, group=site.group)
            assert float(total) == site.size
    return restarted


@pytest.mark.e2e
def test_a_site_meets_again_at_the_store_of_its_life_before(worlds: Worlds) -> None:
    assert worlds(3, grouped=False).run(live_twice) == [[False, True]] * 3


def store_of_the_test() -> dist.TCPStore:
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    return dist.TCPStore(address, port, is_master=False, timeout=timedelta(seconds=10))


def come_where_an_earlier_life_has_left_its_words() -> str:
    store, rank = store_of_the_test(), int(os.environ["RANK"])
    if rank == 1:
        store.set("old/hello/1", "of yesterday")
        store.set("old/welcome/1", "of yesterday")
        store.set(CURRENT, "old")
    else:
        # Rank 1 comes first, and has answered the life before when this one begins.
        store.wait(["old/welcome/1"])
        while store.get("old/hello/1") == b"of yesterday":
            pass
    return agree_on_name(store, rank, 2, 20)


@pytest.mark.e2e
def test_what_an_earlier_life_has_left_is_not_taken_for_an_answer(worlds: Worlds) -> None:
    first, second = worlds(2, grouped=False).run(come_where_an_earlier_life_has_left_its_words)
    assert first == second != "old"


@pytest.mark.parametrize(
    ("rank", "told"), [(0, r"rank 1, 2 did not come"), (1, r"rank 0 did not come .* among them rank 1")]
)
def test_who_has_not_come_is_named(rank: int, told: str) -> None:
    with pytest.raises(SiteError, match=told):
        agree_on_name(dist.HashStore(), rank, 3, 0)
