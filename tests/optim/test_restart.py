"""A run restarted from its checkpoints goes on bit for bit as one that never stopped, in every mode."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from swarmcli.optim.arguments import averager_config
from swarmcli.optim.config import OptimizerConfig, PeerContext
from swarmcli.optim.core import OptimizerCore
from swarmcli.optim.modes.base import Timing, Trained
from swarmcli.optim.modes.gradients import Mode
from swarmcli.optim.modes.low_rank import PowerEF, PowerSGD
from swarmcli.optim.state.replica import InPlace, Offloaded
from swarmcli.testing import virtual_time
from tests.optim.optim_swarm import Swarm, adamw, decay, momentum, together
from tests.suites import soak

TARGET, FEATURES, OUTPUTS = 16, 9, 7  # each peer's weight is a power of two, so that the order of a sum rounds nothing


@dataclass(frozen=True)
class Kind:
    """How the peers of one run train."""

    name: str
    mode: Mode = field(default_factory=Mode)
    make: Callable[[Iterable[torch.Tensor]], torch.optim.Optimizer] = momentum
    offloaded: bool = False


FIRST = [
    Kind("powersgd", PowerSGD(averager_rank=2, min_compression_ratio=0.1, reuse_grad_buffers=True)),
    Kind("delayed averaging", Mode(timing=Timing.DELAYED_AVERAGING), offloaded=True, make=adamw),
]
OTHERS = [
    Kind("adamw", make=adamw),
    Kind("poweref", PowerEF(averager_rank=2, min_compression_ratio=0.1)),
    Kind("offloaded", offloaded=True, make=adamw),
    Kind("reused buffers", Mode(reuse_grad_buffers=True)),
    Kind("delayed step", Mode(timing=Timing.DELAYED_STEP), offloaded=True),
]


class Peer:
    """Computes exactly half of each epoch's batch, and then waits for its end."""

    def __init__(self, node: Any, kind: Kind, number: int) -> None:
        start = torch.Generator().manual_seed(1)
        shapes = [(FEATURES, OUTPUTS), (OUTPUTS,)]
        self.parameters = [
            torch.nn.Parameter(torch.randn(shape, dtype=torch.float64, generator=start)) for shape in shapes
        ]
        self.kind, self.number = kind, number
        self.data = torch.Generator().manual_seed(100 + number)
        place = Offloaded(self.parameters, kind.make) if kind.offloaded else InPlace(self.parameters)
        optimizer = place.optimizer if isinstance(place, Offloaded) else kind.make(self.parameters)
        config = OptimizerConfig("run", TARGET)
        trained = Trained(optimizer, decay(optimizer), placement=place)
        self.core = OptimizerCore(PeerContext(node, config, averager_config(config)), trained, kind.mode)

    async def train(self, until: int) -> None:
        while self.core.position.epoch < until:
            epoch = self.core.position.epoch
            await asyncio.sleep(0.1 + 0.05 * self.number)
            rows = torch.randn(TARGET // 2, FEATURES, dtype=torch.float64, generator=self.data)
            if not self.kind.mode.reuse_grad_buffers:
                for parameter in self.parameters:
                    parameter.grad = None
            ((rows @ self.parameters[0] + self.parameters[1]) ** 2).mean().backward()
            await self.core.step(len(rows))
            while self.core.position.epoch == epoch:
                await self.core.step(0)

    async def leave(self) -> tuple[dict[str, Any], list[torch.Tensor], torch.Tensor]:
        saved = await self.core.state_dict()
        weights = [parameter.detach().clone() for parameter in self.parameters]
        await self.core.shutdown()
        return saved, weights, self.data.get_state()

    async def resume(self, left: tuple[dict[str, Any], list[torch.Tensor], torch.Tensor]) -> None:
        saved, weights, data = left
        for parameter, weight in zip(self.parameters, weights, strict=True):
            parameter.data.copy_(weight)
        self.data.set_state(data)
        await self.core.load_state_dict(saved)


async def peer(swarm: Swarm, kind: Kind, number: int) -> Peer:
    return await swarm.add(Peer(await swarm.node(), kind, number))


async def run(kind: Kind, restarted: Collection[int], *, at: int = 2, until: int = 3) -> list[Any]:
    """Runs two peers, and restarts some of them `at` an epoch; returns what each holds in the end."""
    async with Swarm() as swarm:
        peers = [await peer(swarm, kind, number) for number in range(2)]
        await together(*(each.train(at) for each in peers))
        for each in peers:  # with delays the model gets the new parameters here, whether it is restarted or not
            await each.core.state_dict()
        left = {number: await peers[number].leave() for number in restarted}
        await asyncio.sleep(3)  # whoever has not left may do what it does about that
        for number in restarted:
            peers[number] = await peer(swarm, kind, number)
            await peers[number].resume(left[number])
            assert peers[number].core.position.epoch == at
        await together(*(each.train(until) for each in peers))
        end = [(await each.core.state_dict(), each.core.replica.state.digest()) for each in peers]
        return [(digest, _plain(state)) for state, digest in end]


def _plain(state: Any) -> Any:
    """The state without what every run draws again: the ids of rounds, and so the lineage and what proves it."""
    if isinstance(state, dict):
        return {key: _plain(value) for key, value in state.items() if key not in ("lineage", "standing")}
    if isinstance(state, torch.Tensor):
        return state.dtype, state.tolist()
    return [_plain(value) for value in state] if isinstance(state, list | tuple) else state


@pytest.mark.parametrize("kind", [*FIRST, *soak(OTHERS)], ids=lambda kind: kind.name)
@pytest.mark.parametrize("restarted", [(0, 1), *soak([((0,),)])], ids=["both", "one"])
def test_it_goes_on_as_one_that_never_stopped(kind: Kind, restarted: Collection[int]) -> None:
    never_stopped = virtual_time.run(run(kind, ()), seed=1)
    assert virtual_time.run(run(kind, restarted), seed=1) == never_stopped
