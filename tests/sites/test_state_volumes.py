"""A site whose ranks share the optimizer averages its state with the swarm's, statistics of all ranks included."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from swarmcli.averaging.state.distant import loaded
from swarmcli.errors import SiteError
from swarmcli.optim import optimizer as optimizer_module
from swarmcli.optim.modes import StateOptions
from swarmcli.optim.state.statistics import OwnStatistics
from swarmcli.sites.share import ShareOfStatistics
from tests.optim.state.volume_memory import VolumeMemory
from tests.sharding.processes import Worlds
from tests.sites.site_training import Plan, in_thread, site_rank, train, weights
from tests.sites.test_in_swarm import plain_peer

pytestmark = pytest.mark.e2e

NAMES = ("exp_avg", "exp_avg_sq")
WIDTH = 20_000
VOLUME = 256 << 10
WEIGHTS = 8 * (6 * WIDTH + 1)  # bytes of the parameters; means and squares of the gradients are as large


@dataclass(frozen=True)
class Wide(Plan):
    def net(self, rank: int) -> torch.nn.Module:
        torch.manual_seed(0)
        return torch.nn.Sequential(torch.nn.Linear(4, WIDTH), torch.nn.Tanh(), torch.nn.Linear(WIDTH, 1)).double()


@contextmanager
def small_volumes() -> Iterator[None]:
    with mock.patch.object(optimizer_module, "StateOptions", partial(StateOptions, volume_bytes=VOLUME)):
        yield


def unsettle(rank: Any) -> None:
    """What this rank keeps for the site differs from what everyone else has."""
    for statistics in rank.share.zero.local_state().values():
        statistics["exp_avg"].mul_(2.0)


def average(local: bool, delay: bool) -> dict[str, Any]:
    """The site trains beside a plain peer, and their states are averaged after every second epoch. What all have then,
    and what memory that took at rank 0, where the plain peer is as well."""
    size, own = 4, dist.get_rank()
    plan = Wide(kind="adamw", sizes=(size, size), zero=True, target=3 * size, local_updates=local)
    options = {"average_state_every": 2, "average_opt_statistics": NAMES, "delay_state_averaging": delay}
    if own:
        with site_rank(plan) as rank:
            train(rank.steps, rank.net, 1, size, epochs=1, turns=1)
            if not local:
                unsettle(rank)
            train(rank.steps, rank.net, 1, size, epochs=4, turns=1)
        return {"weights": weights(rank.net)}
    net = plan.net(0)
    modes = options | ({"grad_averager": None} if local else {})
    with (
        small_volumes(),
        VolumeMemory() as memory,
        plain_peer(net, plan.target_batch_size, **modes) as (dht, peer),
        site_rank(plan, contacts=dht.get_visible_addresses(), **options) as rank,
    ):
        plain = in_thread(lambda: train(peer, net, 2, size, epochs=4, turns=1))
        train(rank.steps, rank.net, 0, size, epochs=4, turns=1)
        plain.join()
        assert rank.optimizer is not None
        for optimizer in (peer, rank.optimizer):
            optimizer.state_dict()  # waits for an average under way
        captured, _ = rank.optimizer.opt.statistics.capture()
        ours = {place: loaded(tensor) for place, tensor in captured.items() if place.endswith(NAMES)}
        theirs = {place: loaded(tensor) for place, tensor in OwnStatistics(peer.opt).capture()[0].items()}
        return {
            "weights": weights(rank.net),
            "theirs": weights(net),
            "statistics": [[ours[place], theirs[place]] for place in sorted(ours)],
            "memory": memory.most / 2,
        }


def expect_one_state(leader: dict[str, Any]) -> None:
    assert torch.equal(leader["weights"], leader["theirs"])
    assert len(leader["statistics"]) == 4 * len(NAMES)
    for ours, theirs in leader["statistics"]:
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("local", [False, True])
def test_all_have_the_averaged_statistics_and_rank_0_needs_little_memory(worlds: Worlds, local: bool) -> None:
    leader, member = worlds(2).run(average, local, False)
    assert torch.equal(leader["weights"], member["weights"])
    expect_one_state(leader)
    gradients = 0 if local else WEIGHTS  # the last average of gradients, kept for the next one
    assert VOLUME < leader["memory"] - gradients < 2.5 * VOLUME < WEIGHTS


@pytest.mark.parametrize("local", [False, True])
def test_statistics_are_averaged_while_the_site_goes_on(worlds: Worlds, local: bool) -> None:
    """The last average comes when nobody trains any more, so all end with it."""
    leader, _ = worlds(2).run(average, local, True)
    expect_one_state(leader)


def die(share: ShareOfStatistics, command: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def lose_a_rank() -> list[Any]:
    """Rank 1 dies when the first averaged piece comes to it. The error at rank 0, and what became of the plain peer."""
    dist.init_process_group("gloo")  # that ends with these processes: nobody waits for rank 1 in the end
    size, own = 4, dist.get_rank()
    plan = Wide(kind="adamw", sizes=(size, size), zero=True, target=3 * size)
    options = {"average_state_every": 1, "average_opt_statistics": NAMES, "delay_state_averaging": False}
    if own:
        with mock.patch.object(ShareOfStatistics, "_write", die), site_rank(plan) as rank:
            train(rank.steps, rank.net, 1, size, epochs=1, turns=1)
    net = plan.net(0)
    with plain_peer(net, plan.target_batch_size, matchmaking_time=2.0, **options) as (dht, peer):
        with (
            pytest.raises(SiteError) as lost,
            site_rank(plan, contacts=dht.get_visible_addresses(), **options) as rank,
        ):
            plain = in_thread(lambda: train(peer, net, 2, size, epochs=1, turns=1))
            train(rank.steps, rank.net, 0, size, epochs=1, turns=1)
        plain.join()
        train(peer, net, 2, plan.target_batch_size, epochs=3, turns=1)
        return [str(lost.value), peer.local_epoch]


def test_a_rank_that_dies_meanwhile_ends_the_site_and_the_others_go_on(worlds: Worlds) -> None:
    leader, member = worlds(2, grouped=False).outcomes(lose_a_rank)
    assert leader.value is not None, leader.error
    assert "rank 1" in leader.value[0] and leader.value[1] == 3
    assert member.error == f"ended with -{signal.SIGKILL:d}\n"
