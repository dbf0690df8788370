"""Ranks that learn by themselves, averaged by levels inside of a site: nothing that any of them learns is lost."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist

from swarmcli.dht import DHT
from swarmcli.optim import Optimizer
from tests.sharding.processes import Worlds
from tests.sites.hierarchical import done_over, site_rank
from tests.sites.site_training import OPTIMIZERS, TIGHT, in_thread, model, schedule, weights

pytestmark = pytest.mark.processes

UNEQUAL = {2: (3, 5), 4: (3, 5, 1, 2)}


def train_alone(levels: list[list[int]], sizes: list[int], kind: str, zero: bool = False) -> list[Any]:
    own, turns = dist.get_rank(), 5
    with site_rank(dict(levels), target=turns * sum(sizes), kind=kind, zero=zero) as rank:
        rank.train(sizes[own], epochs=3, turns=turns)
    return [rank.log, weights(rank.net)]


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize(
    ("size", "levels"), [(2, [[2, 2]]), (2, [[100, 2]]), (4, [[2, 2], [4, 4]]), (4, [[1, 2], [3, 4]]), (4, [[3, 4]])]
)
def test_alone_it_is_the_same_computation_in_one_process(
    worlds: Worlds, size: int, levels: list[list[int]], kind: str
) -> None:
    sizes = UNEQUAL[size]
    results = worlds(size).run(train_alone, levels, list(sizes), kind)
    expected = done_over([log for log, _ in results], sizes, dict(levels), kind)
    for (_, result), wanted in zip(results, expected, strict=True):
        torch.testing.assert_close(result, wanted, **TIGHT)
        assert torch.equal(result, results[0][1])  # an epoch has just ended
    assert not torch.equal(results[0][1], weights(model()))


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize(("size", "levels"), [(2, [[2, 2]]), (4, [[2, 2], [3, 4]]), (4, [[1, 4]])])
def test_crews_step_as_one(worlds: Worlds, size: int, levels: list[list[int]], kind: str) -> None:
    sizes = UNEQUAL[size]
    results = worlds(size).run(train_alone, levels, list(sizes), kind, True)
    expected = done_over([log for log, _ in results], sizes, dict(levels), kind, crew=levels[0][1])
    for (_, result), wanted in zip(results, expected, strict=True):
        torch.testing.assert_close(result, wanted, **TIGHT)
        assert torch.equal(result, results[0][1])


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


def learn_beside_a_plain_peer(levels: list[list[int]], delay: bool, epochs: int, turns: int) -> list[torch.Tensor]:
    """At rank 0: the site's weights and the plain peer's. Each of the two computes half of the samples of an epoch, so
    that states are averaged with equal weights."""
    ranks, size, own, stop = dist.get_world_size(), 2, dist.get_rank(), threading.Event()
    work = {"epochs": epochs, "turns": turns, "size": size}
    options: dict[str, Any] = {"target": 2 * turns * ranks * size, "wants_to_stop": stop}
    if own:
        with site_rank(dict(levels), **options) as rank:
            learn(rank.steps, rank.net, own, **work)
            rank.steps.drain()
        return [weights(rank.net)]
    net, (made, settings) = model(), OPTIMIZERS["momentum"]
    with DHT(start=True, host="127.0.0.1") as dht:
        peer = Optimizer(
            dht=dht,
            run_id="site",
            target_batch_size=options["target"],
            optimizer=made(net.parameters(), **settings),
            scheduler=schedule,
            grad_averager=None,
            delay_state_averaging=delay,
        )
        options |= {"contacts": dht.get_visible_addresses(), "delay_state_averaging": delay}
        with shut_down_afterwards(peer), site_rank(dict(levels), **options) as rank:
            peer.load_state_from_peers()
            beside = in_thread(lambda: learn(peer, net, PLAIN, **{**work, "size": ranks * size}))
            learn(rank.steps, rank.net, own, **work)
            beside.join()
            stop.set()
            rank.steps.drain()
            for ended in [in_thread(each.state_dict) for each in (peer, rank.optimizer)]:
                ended.join()  # the last average has come in
    return [weights(rank.net), weights(net)]


@contextmanager
def shut_down_afterwards(optimizer: Optimizer) -> Iterator[None]:
    try:
        yield
    finally:
        optimizer.shutdown()


@pytest.mark.parametrize("delay", [False, True], ids=["at once", "delayed"])
@pytest.mark.parametrize(("size", "levels"), [(2, [[100, 2]]), (2, [[1, 2]]), (4, [[2, 2], [3, 4]])])
def test_nothing_learned_is_lost(worlds: Worlds, size: int, levels: list[list[int]], delay: bool) -> None:
    epochs, turns = 4, 3
    results = worlds(size).run(learn_beside_a_plain_peer, levels, delay, epochs, turns)
    site, plain = results[0]
    of_site = sum(learned(rank, epochs, turns) for rank in range(size)) / size
    expected = weights(model()) + (of_site + learned(PLAIN, epochs, turns)) / 2
    torch.testing.assert_close((site + plain) / 2, expected, **TIGHT)
    if not delay:
        torch.testing.assert_close(site, plain, **TIGHT)
