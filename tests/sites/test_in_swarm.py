"""What happens to a peer of a swarm happens to a whole site: downloads, and gradients that are no numbers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist

from swarmcli.errors import SiteError
from swarmcli.optim import PowerSGDGradientAverager
from tests.sharding.threads import in_threads
from tests.sites.site_training import (
    TIGHT,
    Plan,
    in_thread,
    loss_of,
    model,
    plain_peer,
    rows,
    site_rank,
    train,
    weights,
)
from tests.suites import soak


def join_late() -> list[Any]:
    """A peer has trained three epochs when the site joins; then they train together. Each rank's weights at both times,
    and the plain peer's."""
    size, before, after = 4, 3, 6
    plan = Plan(kind="adamw", sizes=(size, size), zero=True, seeds=(1, 2), target=3 * size)
    own = dist.get_rank()
    if own:
        with site_rank(plan) as rank:
            seen = [rank.steps.local_epoch, weights(rank.net)]
            train(rank.steps, rank.net, 1, size, epochs=after, turns=1)
        return [*seen, rank.steps.local_epoch, weights(rank.net)]
    net = model()
    with plain_peer(net, plan.target_batch_size) as (dht, peer):
        train(peer, net, 2, plan.target_batch_size, epochs=before, turns=1)
        theirs = [before, weights(net)]
        with site_rank(plan, contacts=dht.get_visible_addresses()) as rank:
            seen = [rank.steps.local_epoch, weights(rank.net)]
            plain = in_thread(lambda: train(peer, net, 2, size, epochs=after, turns=1))
            train(rank.steps, rank.net, 0, size, epochs=after, turns=1)
            plain.join()
        return [*seen, rank.steps.local_epoch, weights(rank.net), *theirs, peer.local_epoch, weights(net)]


def test_a_site_that_joins_late_has_the_state_of_the_swarm_at_all_ranks() -> None:
    leader, member = in_threads(2, join_late)
    epoch, first, last_epoch, last = leader[4:]
    for seen in (leader[:4], member):
        assert (seen[0], seen[2]) == (epoch, last_epoch) == (3, 6)
        assert torch.equal(seen[1], first)
        torch.testing.assert_close(seen[3], last, **TIGHT)
    assert not torch.equal(first, last)


def train_with_broken_gradients(who: int) -> list[Any]:
    """In the second epoch a rank's gradients are no numbers. What each rank has before, after that, and at the end."""
    plan = Plan(turns=2, sizes=(3, 5), epochs=3)
    own = dist.get_rank()
    with site_rank(plan) as rank:
        train(rank.steps, rank.net, own, plan.sizes[own], epochs=1, turns=2)
        seen = [weights(rank.net)]
        for turn in range(2):
            rank.steps.zero_grad()
            loss_of(rank.net, rows(own, 77, turn, plan.sizes[own])).backward()
            if own == who and turn == 0:
                next(rank.net.parameters()).grad[0] = float("nan")  # type: ignore[index]
            rank.steps.step(batch_size=plan.sizes[own])
        seen += [weights(rank.net), rank.steps.local_epoch]
        train(rank.steps, rank.net, own, plan.sizes[own], epochs=2, turns=2)
    return [*seen, weights(rank.net), rank.steps.local_epoch]


@pytest.mark.parametrize("who", [0, 1])
def test_gradients_that_are_no_numbers_cost_the_site_what_it_had_accumulated(who: int) -> None:
    results = in_threads(2, train_with_broken_gradients, who)
    for before, broken, epoch, after, last_epoch in results:
        assert torch.equal(before, broken)
        assert (epoch, last_epoch) == (1, 2)
        assert bool(torch.isfinite(after).all())
        assert torch.equal(after, results[0][3])


RANK_ONE = PowerSGDGradientAverager.get_factory(averager_rank=1, min_compression_ratio=0.1)


def train_compressed() -> list[torch.Tensor]:
    """As a site, and at rank 0 also as one peer with the samples of all, which it is given in one batch."""
    plan = Plan(sizes=(4, 4), turns=1, epochs=5)
    own = dist.get_rank()
    with site_rank(plan, grad_averager=RANK_ONE) as rank:
        train(rank.steps, rank.net, own, 4, epochs=plan.epochs, turns=1)
    if own:
        return [weights(rank.net)]
    net = model()
    with plain_peer(net, 8, "momentum", grad_averager=RANK_ONE) as (_, peer):
        while peer.local_epoch < plan.epochs:
            epoch = peer.local_epoch
            peer.zero_grad()
            loss_of(net, torch.cat([rows(who, epoch, 0, 4) for who in range(2)])).backward()
            peer.step(batch_size=8)
    return [weights(rank.net), weights(net)]


def test_compressed_gradients_are_those_of_one_peer_with_the_samples_of_all() -> None:
    leader, member = in_threads(2, train_compressed)
    assert torch.equal(leader[0], member[0])
    torch.testing.assert_close(leader[0], leader[1], rtol=1e-8, atol=1e-10)


def train_with_delay(options: dict[str, Any]) -> list[Any]:
    """Epochs end while the next batches are computed. Returns whether all ranks had equal models after every step."""
    plan, own = Plan(kind="adamw", sizes=(2, 3), turns=2), dist.get_rank()
    with site_rank(plan, offload_optimizer=True, **options) as rank:
        turn, seen = 0, []
        while rank.steps.local_epoch < 5:
            rank.steps.zero_grad()
            loss_of(rank.net, rows(own, 0, turn, plan.sizes[own])).backward()
            rank.steps.step(batch_size=plan.sizes[own])
            seen.append([rank.steps.local_epoch, weights(rank.net)])
            turn += 1
    return seen


@pytest.mark.parametrize("delayed", ["delay_grad_averaging", *soak(["delay_optimizer_step"])])
def test_delayed_epochs_leave_all_ranks_with_the_same(delayed: str) -> None:
    leader, member = in_threads(2, train_with_delay, {delayed: True})
    assert [epoch for epoch, _ in leader] == [epoch for epoch, _ in member]
    assert all(torch.equal(one, other) for (_, one), (_, other) in zip(leader, member, strict=True))
    assert len({tuple(each.tolist()) for _, each in leader}) >= 4


def learn_locally() -> list[Any]:
    """A site and a plain peer, each of which steps by itself; their states are averaged after each epoch. What each
    rank had after every step, and at rank 0 what the plain peer ended with."""
    size, epochs, own = 4, 6, dist.get_rank()
    plan = Plan(sizes=(size, size), zero=True, seeds=(1, 2), target=3 * size, local_updates=True)
    seen: list[torch.Tensor] = []
    contacts: list[str] = []

    @contextmanager
    def watched() -> Iterator[Any]:
        """A rank of the site whose model is kept after each step."""
        with site_rank(plan, contacts=contacts) as rank:
            step = rank.steps.step
            rank.steps.step = lambda **what: (step(**what), seen.append(weights(rank.net)))
            yield rank

    if own:
        with watched() as rank:
            train(rank.steps, rank.net, own, size, epochs=epochs, turns=1)
        return [seen]
    net = model()
    with plain_peer(net, plan.target_batch_size, "momentum", grad_averager=None) as (dht, peer):
        contacts = dht.get_visible_addresses()
        with watched() as rank:
            peer.load_state_from_peers()
            plain = in_thread(lambda: train(peer, net, 2, size, epochs=epochs, turns=1))
            train(rank.steps, rank.net, 0, size, epochs=epochs, turns=1)
            plain.join()
        return [seen, weights(net)]


def test_averages_of_states_reach_all_ranks() -> None:
    leader, member = in_threads(2, learn_locally)
    assert all(torch.equal(one, other) for one, other in zip(leader[0], member[0], strict=True))
    first, last, theirs = leader[0][0], leader[0][-1], leader[1]
    assert (last - theirs).norm() < (last - first).norm()


def fail_while_a_state_is_wanted() -> str:
    """Rank 0's data cannot be read, while a thread of it waits for the others' next step to copy the state."""
    said: list[str] = []
    with pytest.raises((KeyError, SiteError)), site_rank(Plan("adamw", zero=True)) as rank:
        rank.steps.step(batch_size=0)
        if rank.optimizer is None:
            rank.steps.step(batch_size=0)

        def want() -> None:
            with pytest.raises(SiteError) as failed:
                rank.optimizer.call(lambda core: core.replica.capture())
            said.append(str(failed.value))

        wanting = in_thread(want)
        try:
            raise KeyError("no such file")
        finally:
            rank.steps.break_off()
            wanting.join()
    return "".join(said)


def test_whoever_waits_for_a_step_of_a_site_that_fails_waits_for_nothing() -> None:
    assert in_threads(2, fail_while_a_state_is_wanted) == ["rank 0 takes no further step", ""]
