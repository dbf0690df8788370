"""Processes find each other at a store where others have met before."""

from __future__ import annotations

import os
import threading

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


def test_what_an_earlier_life_has_left_is_not_taken_for_an_answer() -> None:
    store, names = dist.HashStore(), dict[int, str]()
    for key, word in (("old/hello/1", "of yesterday"), ("old/welcome/1", "of yesterday"), (CURRENT, "old")):
        store.set(key, word)

    def come(rank: int) -> None:
        names[rank] = agree_on_name(store, rank, 2, 20)

    threads = [threading.Thread(target=come, args=(rank,)) for rank in (1, 0)]
    threads[0].start()
    while store.get("old/hello/1") == b"of yesterday":  # rank 1 comes first, and answers the life before
        pass
    threads[1].start()
    for thread in threads:
        thread.join()
    assert names[0] == names[1] != "old"


@pytest.mark.parametrize(
    ("rank", "told"), [(0, r"rank 1, 2 did not come"), (1, r"rank 0 did not come .* among them rank 1")]
)
def test_who_has_not_come_is_named(rank: int, told: str) -> None:
    with pytest.raises(SiteError, match=told):
        agree_on_name(dist.HashStore(), rank, 3, 0)
