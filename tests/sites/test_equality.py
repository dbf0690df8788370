"""A site of N ranks trains as one process with the samples of all, alone and beside a plain peer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.sharding.threads import in_threads
from tests.sites.site_training import (
    TIGHT,
    Plan,
    in_thread,
    model,
    plain_peer,
    reference,
    site_rank,
    train,
)
from tests.sites.site_training import weights as weights_of
from tests.suites import soak

UNEQUAL = {2: (3, 5), 4: (3, 5, 1, 2)}


def train_alone(options: dict[str, Any]) -> torch.Tensor:
    plan = Plan(**{**options, "sizes": tuple(options["sizes"]), "seeds": tuple(options.get("seeds", (0,)))})
    with site_rank(plan) as rank:
        own = dist.get_rank()
        train(rank.steps, rank.net, own, plan.sizes[own], epochs=plan.epochs, turns=plan.turns)
        assert rank.steps.local_epoch == plan.epochs
    return weights_of(rank.net)


@pytest.mark.parametrize(
    ("size", "kind", "zero"),
    [(2, "adamw", False), (4, "momentum", True)],
)
def test_alone_with_unequal_batches(size: int, kind: str, zero: bool) -> None:
    """The others' first weights are unlike rank 0's, which everyone gets."""
    plan = {"kind": kind, "sizes": UNEQUAL[size], "zero": zero, "seeds": [0, 7]}
    results = in_threads(size, train_alone, plan)
    expected = reference(kind, UNEQUAL[size], epochs=4, turns=2)
    for result in results:
        torch.testing.assert_close(result, expected, **TIGHT)
        assert torch.equal(result, results[0])


@pytest.mark.parametrize("zero", [True, *soak([False])], ids=["sharded", "whole"])
def test_local_updates_step_with_the_mean_over_all_ranks(zero: bool) -> None:
    plan = {"kind": "momentum", "sizes": (3, 5), "zero": zero, "seeds": [0, 7], "local_updates": True}
    results = in_threads(2, train_alone, plan)
    expected = reference("momentum", (3, 5), epochs=4, turns=2, each_turn=True)
    for result in results:
        torch.testing.assert_close(result, expected, **TIGHT)
        assert torch.equal(result, results[0])


def train_beside_a_plain_peer(zero: bool, kind: str) -> list[torch.Tensor]:
    """At rank 0: the site's weights and the plain peer's. In each epoch every one of the three computes its part."""
    size, epochs = 4, 5
    plan = Plan(kind=kind, sizes=(size, size), zero=zero, turns=2, target=3 * 2 * size)
    net = model()
    if dist.get_rank():
        with site_rank(plan) as rank:
            train(rank.steps, rank.net, 1, size, epochs=epochs, turns=2)
        return [weights_of(rank.net)]
    with (
        plain_peer(net, plan.target_batch_size, kind) as (dht, peer),
        site_rank(plan, contacts=dht.get_visible_addresses()) as rank,
    ):
        peer.load_state_from_peers()
        plain = in_thread(lambda: train(peer, net, 2, size, epochs=epochs, turns=2))
        train(rank.steps, rank.net, 0, size, epochs=epochs, turns=2)
        plain.join()
    return [weights_of(rank.net), weights_of(net)]


def test_in_a_swarm_with_a_plain_peer() -> None:
    results = in_threads(2, train_beside_a_plain_peer, True, "adamw")
    expected = reference("adamw", (4, 4, 4), epochs=5, turns=2)
    for result in (*results[0], *results[1]):
        torch.testing.assert_close(result, expected, **TIGHT)
        assert torch.equal(result, results[0][0])
