"""Peers with local updates, who write down what they did, and the same computation in one process."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch

from swarmcli.optim.arguments import averager_config
from swarmcli.optim.config import OptimizerConfig, PeerContext, PeerDescription, Role
from swarmcli.optim.core import OptimizerCore
from swarmcli.optim.modes.base import StateOptions, Trained
from swarmcli.optim.modes.outer import LocalUpdates
from swarmcli.optim.state.replica import Offloaded
from tests.optim.optim_swarm import FEATURES, TARGET, Swarm, loss_of, make_model, momentum

Entry: TypeAlias = "Gradient | Step | EpochOver | StatisticsApplied | Applied"
Optimizers: TypeAlias = Callable[..., torch.optim.Optimizer]


@dataclass
class Gradient:
    """Computed with the parameters of this moment."""

    batch: torch.Tensor


@dataclass
class Step:
    """One local step, with the last gradient."""


@dataclass
class EpochOver:
    """Handed in for the round that leads to this epoch, with this peer's samples in it."""

    epoch: int
    samples: int


@dataclass
class StatisticsApplied:
    """The average of the last round came into the optimizer's statistics."""


@dataclass
class Applied:
    """The average of the last round came into the parameters."""


@dataclass
class LocalPeer:
    """Trains a small linear model by itself, and keeps a log."""

    core: OptimizerCore
    weights: torch.nn.Parameter
    batch_size: int
    pace: float
    log: list[Entry] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.data = torch.Generator().manual_seed(int.from_bytes(self.core.node.peer_id[:4]))
        work: Any = self.core.work
        place, (_, riders) = self.core.replica.placement, work._beside
        freeze, accumulate, publish, finish = work.freeze, work.accumulate, place.publish, riders.finish

        async def logged_freeze() -> Any:
            begins = work._handed is None
            handed = await freeze()
            if begins and work._brings:
                self.log.append(EpochOver(self.epoch + 1, handed.samples))
            return handed

        async def logged_step(*args: Any) -> Any:
            self.log.append(Step())
            return await accumulate(*args)

        def logged_finish(counted: bool) -> None:
            self.log.append(StatisticsApplied())
            finish(counted)

        def logged_publish() -> None:
            if place.moved:
                self.log.append(Applied())
            publish()

        work.freeze, work.accumulate, place.publish, riders.finish = (
            logged_freeze,
            logged_step,
            logged_publish,
            logged_finish,
        )

    @property
    def epoch(self) -> int:
        return self.core.position.epoch

    async def compute(self) -> None:
        """One batch and its step."""
        await asyncio.sleep(self.pace)
        batch = torch.randn(self.batch_size, FEATURES, dtype=torch.float64, generator=self.data)
        self.weights.grad = None
        loss_of(self.weights, batch).backward()
        self.log.append(Gradient(batch))
        await self.core.step(len(batch))

    async def train(self, until: int) -> None:
        while self.epoch < until:
            await self.compute()

    async def finish(self) -> None:
        """Until no round is under way, and its average has come in."""
        await self.core.state_dict()
        await self.core.replica.publish()


async def local_peer(
    swarm: Swarm,
    *,
    batch_size: int = 4,
    seed: int = 0,
    pace: float = 0.1,
    make: Optimizers = momentum,
    role: Role = "trainer",
    extra_tensors: Sequence[torch.Tensor] = (),
    offload: bool = False,
    **options: Any,
) -> LocalPeer:
    """A peer that has been started; `options` are those of the states' averaging. With `offload` its optimizer and
    the states that are averaged are copies in host memory."""
    node = await swarm.node()
    config = OptimizerConfig("run", TARGET, description=PeerDescription(role))
    weights = make_model(seed)
    mode = LocalUpdates(state=StateOptions(**options))
    place = Offloaded([weights], make) if offload else None
    optimizer = make([weights]) if place is None else place.optimizer
    averaging = averager_config(config)
    trained = Trained(optimizer, extra_tensors=extra_tensors, placement=place)
    core = OptimizerCore(PeerContext(node, config, averaging), trained, mode)
    peer = LocalPeer(core, weights, batch_size, pace)
    await core.start()
    swarm.trainers.append(peer)  # type: ignore[arg-type]  # shut down with the others
    return peer


class _Double:
    """One peer's part in the computation of one process."""

    def __init__(self, log: Sequence[Entry], seed: int, make: Optimizers, names: Sequence[str]):
        self.weights = make_model(seed)
        self.optimizer = make([self.weights])
        self.names = names
        self._log = iter(log)

    @property
    def state(self) -> list[torch.Tensor]:
        made = self.optimizer.state.get(self.weights, {})
        return [self.weights.detach(), *(made[name] for name in self.names if name in made)]

    def run(self) -> EpochOver | None:
        """To the next end of an epoch."""
        for entry in self._log:
            if isinstance(entry, EpochOver):
                self.before = [tensor.clone() for tensor in self.state]
                return entry
            if isinstance(entry, Applied | StatisticsApplied):
                named = list(zip(("weights", *self.names), self.state, self.average, self.before, strict=True))
                for name, tensor, average, before in named[:1] if isinstance(entry, Applied) else named[1:]:
                    least = torch.minimum(tensor, average) if name == "exp_avg_sq" else torch.tensor(-torch.inf)
                    tensor.copy_(torch.maximum(tensor + (average - before), least))
            elif isinstance(entry, Gradient):
                self.weights.grad = None
                loss_of(self.weights, entry.batch).backward()
            else:
                self.optimizer.step()
        return None


def in_one_process(
    logs: Sequence[Sequence[Entry]],
    *,
    seed: int = 0,
    make: Optimizers = momentum,
    names: Sequence[str] = (),
) -> list[torch.Tensor]:
    """Everyone's weights after the same steps, averages weighted by samples, and delta rule."""
    doubles = [_Double(log, seed, make, names) for log in logs]
    while all(over := [double.run() for double in doubles]):
        assert len({each.epoch for each in over if each}) == 1
        samples = [each.samples for each in over if each]
        for place in range(len(doubles[0].before)):
            summed = sum(d.before[place] * n for d, n in zip(doubles, samples, strict=True))
            for double in doubles:
                if place == 0:
                    double.average = []
                double.average.append(summed / sum(samples))
    return [double.weights.detach() for double in doubles]
