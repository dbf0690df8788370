"""Buffers of a model, such as batch norm's: averaged, handed out, saved and compared as parameters are."""

from __future__ import annotations

import asyncio
from typing import Any

import torch

from swarmcli.optim.arguments import averager_config
from swarmcli.optim.config import OptimizerConfig, PeerContext
from swarmcli.optim.core import OptimizerCore
from swarmcli.optim.modes.base import Trained
from swarmcli.optim.state.buffers import Buffers
from tests.optim.optim_swarm import Swarm, together
from tests.simulation import within

TARGET = 24


def net(seed: int = 0) -> torch.nn.Module:
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8), torch.nn.ReLU(), torch.nn.Linear(8, 2))


class Peer:
    """A trainer of a network with batch norm; its inputs are around `level`."""

    def __init__(self, node: Any, *, level: float = 0.0, seed: int = 0) -> None:
        self.model, self.level = net(seed), level
        config = OptimizerConfig("run", TARGET)
        optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05)
        trained = Trained(optimizer, extra_tensors=list(self.model.buffers()))
        self.core = OptimizerCore(PeerContext(node, config, averager_config(config)), trained)
        self.data = torch.Generator().manual_seed(int.from_bytes(node.peer_id[:4]))

    async def step(self, size: int = 4) -> dict[str, torch.Tensor]:
        """Computes one batch; returns the model's buffers after it."""
        rows = self.level + torch.randn(size, 8, generator=self.data)
        self.model.zero_grad()
        torch.nn.functional.cross_entropy(self.model(rows), (rows.mean(1) > self.level).long()).backward()
        running = self.running
        await asyncio.sleep(0.1)
        await self.core.step(size)
        return running

    async def train(self, until: int) -> None:
        while self.core.position.epoch < until:
            await self.step()

    @property
    def running(self) -> dict[str, torch.Tensor]:
        """The model's buffers."""
        return {name: tensor.clone() for name, tensor in self.model.named_buffers()}

    @property
    def own(self) -> list[torch.Tensor]:
        """The state's buffers."""
        return [tensor.clone() for tensor in self.core.replica.state.extra_tensors]


@within(300)
async def test_they_are_the_mean_by_samples_of_what_one_process_would_have_seen() -> None:
    async with Swarm() as swarm:
        one, two = [await swarm.add(Peer(await swarm.node(), level=level)) for level in (0.0, 2.0)]
        seen: dict[int, dict[str, torch.Tensor]] = {}

        async def once(peer: Peer, size: int) -> None:
            await peer.core.join()
            seen[size] = await peer.step(size)
            while peer.core.position.epoch < 1:
                await peer.core.step(0)

        await together(once(one, 8), once(two, 16))
        for name in ("1.running_mean", "1.running_var"):
            expected = sum(size * running[name] for size, running in seen.items()) / 24
            torch.testing.assert_close(one.running[name], expected)
            assert torch.equal(one.running[name], two.running[name])


@within(300)
async def test_a_checkpoint_has_them_and_one_without_takes_the_models() -> None:
    async with Swarm() as swarm:
        one = await swarm.add(Peer(await swarm.node()))
        await one.train(3)
        await one.step()  # the model's have moved since the last average
        saved, model = await one.core.state_dict(), {k: v.clone() for k, v in one.model.state_dict().items()}
        own, running = one.own, one.running
        await one.train(5)
        again = await swarm.add(Peer(await swarm.node(), seed=1))
        again.model.load_state_dict(model)
        await again.core.load_state_dict(saved)
        assert all(map(torch.equal, again.own, own)) and not torch.equal(own[0], running["1.running_mean"])
        former = {**saved, "swarm": {key: value for key, value in saved["swarm"].items() if key != "extra"}}
        again.model.load_state_dict(model)
        await again.core.load_state_dict(former)
        assert all(map(torch.equal, again.own, running.values()))


def test_what_a_model_moves_during_a_round_is_kept() -> None:
    live = [torch.tensor([1.0, 2.0]), torch.tensor(4), torch.tensor([True])]
    buffers = Buffers(live)
    live[0].add_(1.0)
    live[1].add_(2)
    buffers.load()
    live[0].add_(0.5)  # the next batch, while the round goes on
    live[1].add_(1)
    assert [mean.tolist() for mean in buffers.means] == [[1.0, 1.0], 2.0]
    buffers.means[0].fill_(3.0)
    buffers.means[1].fill_(2.6)
    buffers.finish()
    assert [own.tolist() for own in buffers.own] == [[4.0, 5.0], 7, [True]]
    assert live[0].tolist() == [2.5, 3.5], "a model may be computing with them"
    buffers.publish()
    assert live[0].tolist() == [4.5, 5.5] and live[1].item() == 8
    buffers.publish()
    assert live[0].tolist() == [4.5, 5.5]
    live[0][0] = float("nan")
    buffers.load()
    assert buffers.means[0].tolist() == [0.0, 0.0], "what is not finite goes to nobody"
