"""Processes that learn beside a peer's own: what they bring is in what is averaged, and void after a download."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from swarmcli.optim.arguments import averager_config
from swarmcli.optim.config import OptimizerConfig, PeerContext
from swarmcli.optim.core import OptimizerCore
from swarmcli.optim.modes.base import SiteHooks, Trained
from swarmcli.testing import virtual_time
from tests.optim.local_swarm import EpochOver, LocalPeer, local_peer
from tests.optim.optim_swarm import Swarm, make_model, momentum, together

EPOCHS = 4


class Others:
    """Lets the weights be what they are and `brings` more, whenever they are gathered."""

    def __init__(self, brings: float) -> None:
        self.brings = brings
        self.peer: LocalPeer | None = None
        self.log: list[str] = []
        self.at_rest = True

    def gather(self) -> None:
        assert self.peer is not None
        assert self.peer.core.replica._lock.locked()
        self.log.append("gather")
        with torch.no_grad():
            self.peer.weights += self.brings

    def note_replaced(self) -> None:
        self.log.append("replaced")


async def peer_with(swarm: Swarm, others: Others, **options: Any) -> LocalPeer:
    others.peer = await local_peer(swarm, companions=others, seed=1, **options)
    return others.peer


def test_what_they_bring_is_averaged() -> None:
    async def main() -> None:
        async with Swarm() as swarm:
            others = Others(8.0)
            options = {"seed": 1, "delay": False, "make": lambda params: torch.optim.SGD(params, lr=0.0)}
            others.peer = await local_peer(swarm, companions=others, **options)
            peers = [others.peer, await local_peer(swarm, **options)]
            await together(*(peer.train(1) for peer in peers))
            samples = [next(entry.samples for entry in peer.log if isinstance(entry, EpochOver)) for peer in peers]
            for peer in peers:
                expected = make_model(1).detach() + 8.0 * samples[0] / sum(samples)
                torch.testing.assert_close(peer.weights.detach(), expected)

    virtual_time.run(main(), timeout=300)


def test_between_steps_a_checkpoint_asks_for_nothing_and_loses_nothing_of_what_they_learn() -> None:
    async def main() -> None:
        async with Swarm() as swarm:
            others = Others(0.0)
            peers = [await peer_with(swarm, others), await local_peer(swarm, seed=1)]
            await together(*(peer.train(3) for peer in peers))
            others.at_rest, gathered, before = False, len(others.log), peers[0].weights.detach().clone()
            await peers[0].core.state_dict()
            assert len(others.log) == gathered
            assert torch.equal(peers[0].weights, peers[0].core.replica.state.trained[0])
            others.at_rest = True
            await peers[0].core.replica.gather()
            assert torch.equal(peers[0].weights.detach(), before)

    virtual_time.run(main(), timeout=300)


def test_a_download_makes_void_what_they_learned() -> None:
    async def main() -> None:
        async with Swarm() as swarm:
            first = await local_peer(swarm, seed=1)
            await first.train(3)
            others = Others(0.0)
            newcomer = await peer_with(swarm, others)
            assert await newcomer.core.join()
            assert others.log == ["replaced"]
            await newcomer.core.load_state_dict(await newcomer.core.state_dict())
            assert others.log == ["replaced"] * 2

    virtual_time.run(main(), timeout=300)


def test_there_are_none_where_gradients_are_averaged() -> None:
    async def main() -> None:
        async with Swarm() as swarm:
            node = await swarm.node()
            config = OptimizerConfig("run", 8)
            with pytest.raises(ValueError, match="companions: where gradients are averaged nobody has parameters"):
                OptimizerCore(
                    PeerContext(node, config, averager_config(config)),
                    Trained(momentum([make_model(1)])),
                    site=SiteHooks(companions=Others(0.0)),
                )
            await node.shutdown()

    virtual_time.run(main(), timeout=300)
