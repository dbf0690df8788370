"""Peers whose link turns slow: a lone trainer, for whom the run has to wait, and helpers, for whom it has not."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from swarmcli.optim.config import Role
from swarmcli.optim.core import OptimizerCore
from swarmcli.testing import virtual_time
from tests.optim.optim_swarm import Swarm, until
from tests.optim.unlike import Unlike, now

Story = Callable[[Swarm, list[Unlike]], Awaitable[None]]


def tell(story: Story, roles: list[tuple[Role, float]], *, elements: int, bandwidth: float | None = None) -> None:
    """Peers of these roles and paces take part until the story has ended; an epoch has 200 samples."""

    async def main() -> None:
        async with Swarm(1, latency=0.02, bandwidth=bandwidth) as swarm:
            peers = [Unlike(await swarm.node(), role, 200, pace, elements) for role, pace in roles]
            for peer in peers:
                await peer.core.start()
            tasks = [asyncio.create_task(peer.run()) for peer in peers]
            try:
                await story(swarm, peers)
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.wait(tasks)
                for peer in peers:
                    await peer.core.shutdown()

    virtual_time.run(main(), timeout=5000)


async def epochs_of(peers: list[Unlike], count: int) -> list[float]:
    """Seconds of so many epochs from now on, each until all have ended it."""
    took, epoch = [], max(peer.epoch for peer in peers)
    for end in range(epoch + 1, epoch + 1 + count):
        began = now()
        await until(lambda end=end: min(peer.epoch for peer in peers) >= end)
        took.append(now() - began)
    return took


UNKNOWN = pytest.mark.xfail(
    reason="of a lone trainer and a monitor no round may commit for a quarter of an hour where nothing tells how slow "
    "the trainer's link is: of twelve drawn runs four to seven stand so long"
)


@pytest.mark.parametrize("known", [True, pytest.param(False, marks=UNKNOWN)])
def test_a_run_goes_at_the_pace_of_its_lone_trainer_however_long_that_sends(known: bool) -> None:
    """1.2 MB at 10 kB/s take two minutes, and a round is wished to take one at most. Where no limit tells how slow the
    link is, a round that fails does."""

    async def story(swarm: Swarm, peers: list[Unlike]) -> None:
        await epochs_of(peers, 2)
        if known:
            peers[0].limit(10e3, None)
        else:
            swarm.network.set_bandwidths(peers[0].node.peer_id, uplink=10e3, downlink=10e6)
        took = await epochs_of(peers, 4)
        usual = 200 / 50 + 120
        if known:
            assert max(took) < 1.5 * usual, took
        # What a jammed link's owner says comes behind what it sends: rounds fail, and the run goes on all the same.
        assert sum(took) < 4 * (3 * usual + 5), took

    tell(story, [("trainer", 50.0), ("monitor", 0.0)], elements=300_000, bandwidth=10e6)


def test_an_auxiliary_with_a_limit_that_a_round_would_outlast_reduces_nothing() -> None:
    async def story(swarm: Swarm, peers: list[Unlike]) -> None:
        *trainers, helper = peers
        usual = (await epochs_of(trainers, 3))[-1]
        helper.limit(5e3, None)
        took = await epochs_of(trainers, 12)
        assert max(took) < usual + 2, took  # what it says comes late all the same

    tell(story, [("trainer", 50.0), ("trainer", 60.0), ("auxiliary", 0.0)], elements=100_000)


def test_a_helper_that_costs_every_round_its_time_stays_away_from_more_and_more_of_them() -> None:
    """Its link is slow, and nothing that it says of itself tells that."""

    async def story(swarm: Swarm, peers: list[Unlike]) -> None:
        *trainers, helper = peers
        usual = (await epochs_of(trainers, 3))[-1]
        swarm.network.set_bandwidths(helper.node.peer_id, uplink=5e3, downlink=10e6)
        took = await epochs_of(trainers, 32)
        held_up = [round(seconds, 1) for seconds in took if seconds > usual + 1.5]
        assert 0 < len(held_up) <= 6, took  # in the first, and after 1, 2, 4, 8 and 16

    tell(story, [("trainer", 50.0), ("trainer", 60.0), ("auxiliary", 0.0)], elements=100_000, bandwidth=10e6)


def test_the_samples_of_a_trainer_that_was_killed_turn_nobody_against_the_leader() -> None:
    """The reports count them for a minute longer, so to the others the epoch seems over and their leader idle."""

    async def story(swarm: Swarm, peers: list[Unlike]) -> None:
        *others, guest = peers
        await epochs_of(peers, 2)
        await until(lambda: isinstance(guest.core, OptimizerCore) and guest.core.work.samples >= 120)
        swarm.network.kill(guest.node.peer_id)
        guest.ends = True
        took = await epochs_of(others, 2)
        usual = 200 / 2
        assert max(took) < usual + 20, took

    tell(story, [("monitor", 0.0), ("trainer", 1.0), ("trainer", 1.0), ("trainer", 4.0)], elements=100_000)
