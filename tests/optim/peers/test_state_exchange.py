"""A run hands its state to many newcomers at once, and goes on training meanwhile."""

from __future__ import annotations

import asyncio

import pytest
import torch

from swarmcli.events import StateDonated, StateDownloaded
from swarmcli.testing import virtual_time
from tests.optim.optim_swarm import Swarm, Trainer, digests, record, together

STATE = 1_000_000  # bytes
SPEED = 500_000  # bytes per second of every link


def extra() -> list[torch.Tensor]:
    return [torch.zeros(STATE, dtype=torch.bool)]  # masks are downloaded, and in no round


async def veterans(swarm: Swarm, count: int) -> list[Trainer]:
    """Peers that have trained for a while, over links of the usual speed."""
    peers = [await swarm.trainer(seed=1, pace=0.25, target=80, extra_tensors=extra()) for _ in range(count)]
    await together(*(peer.train(4) for peer in peers))
    for peer in peers:
        swarm.network.set_bandwidth(peer.node.peer_id, SPEED)
    return peers


def longest(trainer: Trainer) -> float:
    return max(epoch.seconds for epoch in trainer.epochs[1:])


@pytest.mark.soak
@pytest.mark.parametrize(("seed", "count", "epochs"), [(0, 8, 24), (1, 8, 24)])
def test_many_newcomers_at_once_do_not_hold_up_those_who_train(seed: int, count: int, epochs: int) -> None:
    """They take `count` S / 2 B from two donors alone; eight of them three epochs."""

    async def main() -> None:
        async with Swarm(seed=seed) as swarm:
            old = await veterans(swarm, 2)
            usual = longest(old[0])
            training = asyncio.create_task(together(*(peer.train(epochs) for peer in old)))
            newcomers = [await swarm.trainer(seed=2, pace=0.25, target=80, extra_tensors=extra()) for _ in range(count)]
            for newcomer in newcomers:
                swarm.network.set_bandwidth(newcomer.node.peer_id, SPEED)
            downloads = [record(newcomer.node, StateDownloaded) for newcomer in newcomers]
            given = [record(peer.node, StateDonated) for peer in [*old, *newcomers]]
            began = asyncio.get_running_loop().time()
            joined: list[float] = []

            async def join(newcomer: Trainer) -> None:
                await newcomer.core.join()
                joined.append(asyncio.get_running_loop().time() - began)
                await newcomer.train(epochs)

            await together(*(join(newcomer) for newcomer in newcomers))
            await training
            assert len(digests([*old, *newcomers])) == 1
            assert longest(old[0]) < 1.25 * usual
            assert max(joined) < count * STATE / (2 * SPEED) + 2.0
            assert sum(map(len, downloads)) <= count + 2
            assert sum(map(bool, given[2:])) >= count // 4, "newcomers that are done give it to others"

    virtual_time.run(main(), seed=seed, timeout=600)
