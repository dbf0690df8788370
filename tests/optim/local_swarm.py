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
from swarmcli.optim.modes.base import SiteHooks, StateOptions, Trained
from swarmcli.optim.modes.local import LocalUpdates
from swarmcli.optim.state.replica import Companions, Offloaded
from tests.optim.optim_swarm import FEATURES, TARGET, Swarm, loss_of, make_model, momentum

Entry: TypeAlias = "Gradient | Step | EpochOver | Applied"
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
    """The epoch that led here is over; this peer's samples in it."""

    epoch: int
    samples: int


@dataclass
class Applied:
    """The average of the last state round came into the state."""


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
        keeper, work = self.core._keeper, self.core.work
        apply, after_epoch, accumulate = keeper.averaging.apply, keeper.after_epoch, work.accumulate

        async def logged_apply(*, wait: bool = False) -> bool:
            applied = await apply(wait=wait)
            if applied:
                self.log.append(Applied())
            return applied

        async def logged_end(committed: Any, samples: int) -> None:
            self.log.append(EpochOver(self.epoch, samples))
            await after_epoch(committed, samples)

        async def logged_step(*args: Any) -> Any:
            self.log.append(Step())
            return await accumulate(*args)

        keeper.averaging.apply, keeper.after_epoch, work.accumulate = logged_apply, logged_end, logged_step  # type: ignore

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
    companions: Companions | None = None,
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
    core = OptimizerCore(PeerContext(node, config, averaging), trained, mode, SiteHooks(companions=companions))
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
            if isinstance(entry, Applied):
                named = zip(("weights", *self.names), self.state, self.average, self.before, strict=True)
                for name, tensor, average, before in named:
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
    every: int = 1,
) -> list[torch.Tensor]:
    """Everyone's weights after the same steps, averages weighted by samples, and delta rule."""
    doubles = [_Double(log, seed, make, names) for log in logs]
    while all(over := [double.run() for double in doubles]):
        assert len({each.epoch for each in over if each}) == 1
        if over[0] is not None and over[0].epoch % every:
            continue
        samples = [each.samples for each in over if each]
        for place in range(len(doubles[0].before)):
            summed = sum(d.before[place] * n for d, n in zip(doubles, samples, strict=True))
            for double in doubles:
                if place == 0:
                    double.average = []
                double.average.append(summed / sum(samples))
    return [double.weights.detach() for double in doubles]
