"""A site of N ranks trains as one process with the samples of all, alone and beside a plain peer."""

from __future__ import annotations

from dataclasses import replace

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


def train_alone(plan: Plan) -> torch.Tensor:
    with site_rank(plan) as rank:
        own = dist.get_rank()
        train(rank.steps, rank.net, own, plan.sizes[own], epochs=plan.epochs, turns=plan.turns)
        assert rank.steps.local_epoch == plan.epochs
    return weights_of(rank.net)


@pytest.mark.parametrize(
    ("plan", "each_turn"),
    [
        (Plan("adamw"), False),
        (Plan(sizes=(3, 5, 1, 2), zero=True), False),
        (Plan(zero=True, local_updates=True), True),  # which step with the mean over all ranks
        *soak([(Plan(local_updates=True), True)]),
    ],
    ids=["adamw", "sharded", "local updates", "local updates, whole"],
)
def test_alone_with_unequal_batches(plan: Plan, each_turn: bool) -> None:
    """The others' first weights are unlike rank 0's, which everyone gets."""
    results = in_threads(len(plan.sizes), train_alone, replace(plan, seeds=(0, 7)))
    expected = reference(plan.kind, plan.sizes, epochs=4, turns=2, each_turn=each_turn)
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
