"""Whole runs with PowerSGD and PowerEF: peers that come, miss rounds, die and return hold the same bits."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from swarmcli.events import RoundsReplayed
from swarmcli.optim.arguments import averager_config
from swarmcli.optim.config import OptimizerConfig, PeerContext, PeerDescription
from swarmcli.optim.core import OptimizerCore
from swarmcli.optim.modes.base import Trained
from swarmcli.optim.modes.low_rank import LowRank, PowerEF, PowerSGD
from swarmcli.testing import virtual_time
from tests.optim.optim_swarm import Swarm, record, together, until
from tests.suites import soak

TARGET, FEATURES, OUTPUTS = 24, 12, 10
MODES = [PowerSGD(averager_rank=2, min_compression_ratio=0.1), PowerEF(averager_rank=2, min_compression_ratio=0.1)]
# PowerSGD is among the modes of test_mode_faults.py.
both = pytest.mark.parametrize("mode", [*soak(MODES[:1]), MODES[1]], ids=["powersgd", "poweref"])
TRUTH = torch.randn(FEATURES, OUTPUTS, dtype=torch.float64, generator=torch.Generator().manual_seed(5))


def first_weights() -> torch.Tensor:
    return torch.randn(FEATURES, OUTPUTS, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


class Fitter:
    """A peer that fits a matrix and a bias to a linear map."""

    def __init__(self, node: Any, mode: LowRank, pace: float = 0.1, samples: int = 4) -> None:
        self.parameters = [
            torch.nn.Parameter(first_weights()),
            torch.nn.Parameter(torch.zeros(OUTPUTS, dtype=torch.float64)),
        ]
        self.node, self.pace, self.samples = node, pace, samples
        self.data = torch.Generator().manual_seed(int.from_bytes(node.peer_id[:4]))
        config = OptimizerConfig("run", TARGET, description=PeerDescription("trainer"))
        optimizer = torch.optim.SGD(self.parameters, lr=0.1, momentum=0.5)
        self.core = OptimizerCore(PeerContext(node, config, averager_config(config)), Trained(optimizer), mode)
        self.digests: dict[int, str] = {}  # epoch → of the parameters then

    async def step(self, samples: int | None = None) -> None:
        await asyncio.sleep(self.pace)
        count = self.samples if samples is None else samples
        if count:
            rows = torch.randn(count, FEATURES, dtype=torch.float64, generator=self.data)
            loss = ((rows @ self.parameters[0] + self.parameters[1] - rows @ TRUTH) ** 2).mean()
            gradients = torch.autograd.grad(loss, self.parameters)
            for parameter, gradient in zip(self.parameters, gradients, strict=True):
                parameter.grad = gradient
        await self.core.step(count)
        self.digests[self.core.position.epoch] = self.core.replica.state.digest()

    async def train(self, epochs: int) -> None:
        while self.core.position.epoch < epochs:
            await self.step()


async def fitter(swarm: Swarm, mode: LowRank, **options: Any) -> Fitter:
    made = Fitter(await swarm.node(), mode, **options)
    await made.core.start()
    swarm.trainers.append(made)  # type: ignore[arg-type]  # for its end
    return made


def assert_in_step(fitters: Sequence[Fitter], epochs: int) -> None:
    """Wherever two were at the end of a step in one epoch, they held the same bits; and what they share is equal."""
    for epoch in range(1, epochs):
        assert len({f.digests[epoch] for f in fitters if epoch in f.digests}) <= 1, epoch
    at_end = [f for f in fitters if f.core.position.epoch == fitters[0].core.position.epoch]
    for other in at_end[1:]:
        for name, tensor in shared(fitters[0]).items():
            assert torch.equal(tensor, shared(other)[name]), name


def shared(peer: Fitter) -> dict[str, torch.Tensor]:
    return dict(peer.core.replica.state.shared)


def run(main: Any) -> None:
    virtual_time.run(main, seed=0, timeout=7200)


@pytest.mark.soak
@both
def test_a_swarm_learns_in_step(mode: LowRank) -> None:
    async def main() -> None:
        async with Swarm() as swarm:
            fitters = [await fitter(swarm, mode, samples=2 + index) for index in range(3)]
            await together(*(each.train(30) for each in fitters))
            assert_in_step(fitters, 31)
            assert (fitters[0].parameters[0] - TRUTH).norm() < 0.9 * (first_weights() - TRUTH).norm()

    run(main())


@pytest.mark.soak
@both
def test_one_that_was_frozen_replays_and_one_that_dies_is_done_without(mode: LowRank) -> None:
    async def main() -> None:
        async with Swarm() as swarm:
            fitters = [await fitter(swarm, mode) for _ in range(4)]
            replayed = record(fitters[2].node, RoundsReplayed)
            await together(*(each.train(3) for each in fitters))
            stayers = fitters[:2]
            await swarm.kill(fitters[3])  # type: ignore[arg-type]
            swarm.network.freeze(fitters[2].node.peer_id)

            async def thaw() -> None:
                await until(lambda: fitters[0].core.position.epoch >= 5)
                swarm.network.thaw(fitters[2].node.peer_id)
                await fitters[2].train(9)

            await together(*(each.train(9) for each in stayers), thaw())
            assert_in_step(fitters[:3], 10)
            assert replayed or fitters[2].core.position.epoch >= 9

    run(main())


@both
def test_one_left_alone_goes_on_and_a_newcomer_gets_what_all_share(mode: LowRank) -> None:
    async def main() -> None:
        async with Swarm() as swarm:
            alone = await fitter(swarm, mode)
            await alone.train(4)
            other = await fitter(swarm, mode)
            await together(alone.train(10), other.train(10))
            assert_in_step([alone, other], 11)
            assert len(other.digests) >= 4

    run(main())
