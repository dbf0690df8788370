"""Ranks that learn by themselves, averaged by levels inside of a site: nothing that any of them learns is lost."""

from __future__ import annotations

import os
import signal
import threading
from typing import Any

import pytest
import torch
import torch.distributed as dist

from swarmcli.dht import DHT
from swarmcli.optim import Optimizer
from swarmcli.optim.modes.base import SiteHooks
from swarmcli.sharding import ZeroRedundancyOptimizer
from swarmcli.sites.commands import LeaderCommands
from swarmcli.sites.hierarchy import LeaderLevels, MemberLevels
from swarmcli.sites.site import Site
from tests.sharding.processes import World
from tests.sharding.threads import in_threads, ranks
from tests.sites.hierarchical import done_over, site_rank
from tests.sites.site_training import (
    OPTIMIZERS,
    TIGHT,
    in_thread,
    model,
    plain_peer,
    schedule,
    shut_down_afterwards,
    train,
    weights,
)
from tests.suites import soak


def train_alone(levels: dict[int, int], sizes: tuple[int, ...], kind: str) -> list[Any]:
    own, turns = dist.get_rank(), 5
    with site_rank(levels, target=turns * sum(sizes), kind=kind, delay_state_averaging=False) as rank:
        rank.train(sizes[own], epochs=3, turns=turns)
    return [rank.log, weights(rank.net)]


def test_alone_it_is_the_same_computation_in_one_process() -> None:
    sizes, levels = (3, 5, 1, 2), {1: 2, 3: 4}
    results = in_threads(4, train_alone, levels, sizes, "adamw")
    expected = done_over([log for log, _ in results], sizes, levels, "adamw")
    for (_, result), wanted in zip(results, expected, strict=True):
        torch.testing.assert_close(result, wanted, **TIGHT)
        assert torch.equal(result, results[0][1])  # an epoch has just ended
    assert not torch.equal(results[0][1], weights(model()))


# A loss that is linear in the weights has the same gradient everywhere, so what each rank learns is known beforehand.

PLAIN = 9  # who the plain peer is


def learn(steps: Any, net: torch.nn.Module, who: int, *, epochs: int, turns: int, size: int) -> None:
    while (epoch := steps.local_epoch) < epochs:
        for _ in range(turns):
            steps.zero_grad()
            sum((param * (who + 1.0)).sum() for param in net.parameters()).backward()  # type: ignore[union-attr]
            steps.step(batch_size=size)
        while steps.local_epoch == epoch:
            steps.step(batch_size=0)


def learned(who: float, epochs: int, turns: int) -> torch.Tensor:
    """By how much the weights of one process change."""
    net, (made, settings) = model(), OPTIMIZERS["momentum"]
    optimizer = made(net.parameters(), **settings)
    scheduler = schedule(optimizer)
    for _ in range(epochs):
        for _ in range(turns):
            for param in net.parameters():
                param.grad = torch.full_like(param, who + 1.0)
            optimizer.step()
        scheduler.step()
    return weights(net) - weights(model())


def learn_beside_a_plain_peer(levels: dict[int, int], epochs: int, turns: int) -> list[torch.Tensor]:
    """At rank 0: the site's weights and the plain peer's. Each of the two computes half of the samples of an epoch, so
    that states are averaged with equal weights."""
    ranks, size, own, stop = dist.get_world_size(), 2, dist.get_rank(), threading.Event()
    work = {"epochs": epochs, "turns": turns, "size": size}
    options: dict[str, Any] = {"target": 2 * turns * ranks * size, "wants_to_stop": stop}
    if own:
        with site_rank(levels, **options) as rank:
            learn(rank.steps, rank.net, own, **work)
            rank.steps.drain()
        return [weights(rank.net)]
    net = model()
    with plain_peer(net, options["target"], "momentum", grad_averager=None, delay_state_averaging=True) as (dht, peer):
        options |= {"contacts": dht.get_visible_addresses(), "delay_state_averaging": True}
        with site_rank(levels, **options) as rank:
            peer.load_state_from_peers()
            beside = in_thread(lambda: learn(peer, net, PLAIN, **{**work, "size": ranks * size}))
            learn(rank.steps, rank.net, own, **work)
            beside.join()
            stop.set()
            rank.steps.drain()
            for ended in [in_thread(each.state_dict) for each in (peer, rank.optimizer)]:
                ended.join()  # the last average has come in
    return [weights(rank.net), weights(net)]


@pytest.mark.parametrize(("size", "levels"), [(4, {2: 2, 3: 4}), *soak([(2, {100: 2})])], ids=["two levels", "seldom"])
def test_nothing_learned_is_lost(size: int, levels: dict[int, int]) -> None:
    epochs, turns = 3, 3
    (site, plain), *others = in_threads(size, learn_beside_a_plain_peer, levels, epochs, turns)
    assert all(torch.equal(each, site) for (each,) in others), "the average that came in last is in all ranks"
    of_site = sum(learned(rank, epochs, turns) for rank in range(size)) / size
    expected = weights(model()) + (of_site + learned(PLAIN, epochs, turns)) / 2
    torch.testing.assert_close((site + plain) / 2, expected, **TIGHT)


def state_of(optimizer: Any) -> dict[str, torch.Tensor]:
    """Its parameters' first moments by index."""
    return {str(index): values["exp_avg"] for index, values in optimizer.state_dict()["state"].items()}


def join_a_running_swarm() -> list[Any]:
    """What each rank holds when it begins, and at rank 0 what the peer has that was there before."""
    levels, options = {2: 2}, {"target": 8, "kind": "adamw"}
    if dist.get_rank():
        with site_rank(levels, **options) as rank:
            return [weights(rank.net), state_of(rank.optimizer), rank.optimizer.param_groups[0]["lr"]]
    net = model()
    with plain_peer(net, 8, "adamw", grad_averager=None) as (dht, peer):
        train(peer, net, PLAIN, 4, epochs=3, turns=2)
        with site_rank(levels, contacts=dht.get_visible_addresses(), **options) as rank:
            found = [weights(rank.net), state_of(rank.optimizer.opt), rank.optimizer.param_groups[0]["lr"]]
        return [*found, weights(net), state_of(peer.opt), peer.param_groups[0]["lr"]]


def test_all_ranks_of_a_newcomer_begin_where_the_swarm_is() -> None:
    results = in_threads(2, join_a_running_swarm)
    swarms, moments, rate = results[0][3:]
    for found, own, own_rate in [result[:3] for result in results]:
        assert torch.equal(found, swarms)
        assert own_rate == rate == OPTIMIZERS["adamw"][1]["lr"] / 4
        assert own.keys() == moments.keys() and all(torch.equal(own[index], moments[index]) for index in own)


def train_unequal(counts: list[int]) -> list[Any]:
    """Each rank has so many batches; those whose data has ended change nothing by themselves."""
    own = dist.get_rank()
    with site_rank({100: 2}, target=10**6, kind="adamw") as rank:
        for turn in range(counts[own]):
            rank.step((0, turn), 4)
        before = weights(rank.net)
        rank.batch = None
        rank.steps.drain()
    return [before, weights(rank.net), rank.log]


@pytest.mark.parametrize("counts", [[2, 5], [5, 2]])
def test_ranks_whose_data_ends_sooner_wait_unchanged_and_share_in_the_end(counts: list[int]) -> None:
    results = in_threads(2, train_unequal, counts)
    own = [before for before, _, _ in results]
    for _, last, log in results:
        torch.testing.assert_close(last, (own[0] + own[1]) / 2, **TIGHT)
        assert len(log) == max(counts) + 1
    expected = done_over([log[:-1] for _, _, log in results], (4, 4), {100: 2}, "adamw")
    for before, wanted in zip(own, expected, strict=True):
        torch.testing.assert_close(before, wanted, **TIGHT)


@ranks(2)
def test_what_does_not_fit() -> None:
    with Site.form(timeout=10.0) as site:
        net = model()
        shared_out = ZeroRedundancyOptimizer(net.parameters(), torch.optim.SGD, process_group=site.pace, lr=0.1)
        if dist.get_rank():
            with pytest.raises(ValueError, match="a ZeroRedundancyOptimizer shares its statistics out"):
                MemberLevels(site, shared_out, {2: 2})
            return
        levels = LeaderLevels(LeaderCommands(site), list(net.parameters()), {2: 2})
        with DHT(start=True, host="127.0.0.1") as dht:
            optimizer = Optimizer(
                dht=dht, run_id="site", target_batch_size=8, params=list(net.parameters()),
                optimizer=lambda params: torch.optim.SGD(params, lr=0.1), grad_averager=None, offload_optimizer=True,
                site=SiteHooks(companions=levels),
            )  # fmt: skip
            with shut_down_afterwards(optimizer), pytest.raises(ValueError, match="not copies"):
                levels.lead(optimizer)


def lose_a_rank(lost: int) -> None:
    """The site's patience is longer than the test's: who waits for a dead rank, or for one that does, fails it."""
    with site_rank({2: 2, 3: 4}, target=10**6, timeout=100.0) as rank:
        for turn in range(10):
            if turn == 3 and dist.get_rank() == lost:
                os.kill(os.getpid(), signal.SIGKILL)
            rank.step((0, turn), 2)


@pytest.mark.e2e
def test_a_rank_that_dies_ends_the_site_with_errors() -> None:
    world, lost = World(4), 3
    outcomes = world.outcomes(lose_a_rank, lost)
    world.close()
    assert "ended with -9" in str(outcomes[lost].error)
    for rank, outcome in enumerate(outcomes):
        assert rank == lost or "SiteError" in str(outcome.error)
