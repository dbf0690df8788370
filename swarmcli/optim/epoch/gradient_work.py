"""The work of an epoch in which gradients add up, and everyone steps with their mean over the swarm."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from swarmcli.averaging import AveragerCore
from swarmcli.averaging.tasks import OFFLOAD_FROM, on_executor
from swarmcli.averaging.threads import on_one_thread
from swarmcli.events import Events
from swarmcli.optim.epoch.group import Committed
from swarmcli.optim.epoch.work import GivenUp
from swarmcli.optim.gradients.accumulator import GradientAccumulator
from swarmcli.optim.gradients.method import GradientMethod
from swarmcli.optim.membership.lineage import Standing
from swarmcli.optim.state.replica import Replica

# Bytes. The trainer waits in every step: adding so much takes 2 ms, less than a busy machine needs to hand it to
# another thread and back.
TAKE_IN_HERE = 32 << 20


class GradientWork:
    """EpochWork with an accumulator of this peer's gradients and a method of averaging them."""

    replays = True

    def __init__(
        self,
        replica: Replica,
        accumulator: GradientAccumulator,
        method: GradientMethod,
        averager: AveragerCore,
        events: Events,
        *,
        passes_by: int | None = None,
    ) -> None:
        """`passes_by`: the samples of an epoch, where several groups may end one; None: only one does."""
        self.averager = averager
        self._target = passes_by
        self.method = method
        self._replica = replica
        self._gradients = accumulator
        self._losses = GivenUp(events)
        self._handed: int | None = None  # samples on their way; None: nothing is
        self._nbytes = sum(parameter.nbytes for parameter in accumulator.parameters)
        self._hand_in_bytes = max(self._nbytes, OFFLOAD_FROM) if accumulator.waits else self._nbytes

    @property
    def samples(self) -> int:
        return self._gradients.samples

    @property
    def overflows(self) -> int:
        return self._losses.count

    async def take_in(self, batch_size: int, scale: float | None = None) -> None:
        self._replica.placement.check_trained()
        taken = self._gradients.samples
        add = partial(self._gradients.add, batch_size, scale)
        here = self._nbytes <= TAKE_IN_HERE
        if on_one_thread(add) if here else await on_executor(self._nbytes, add):
            self._losses.end()
        else:
            self._losses.note(taken + batch_size - self._gradients.samples, scale)

    async def hand_in(self) -> int:
        """Gradients that are not finite are worth nothing to anybody: they are dropped, all of them, and said to be."""
        if self._handed is None:
            async with self.averager.tensors():
                taken = self._gradients.samples
                self._handed = await on_executor(self._hand_in_bytes, self._hand_in)
            if dropped := taken - self._handed:
                self._losses.note(dropped)
        return self._handed

    def _hand_in(self) -> int:
        samples = self._gradients.hand_in()
        self.method.load(samples)
        return samples

    async def take_back(self) -> None:
        if self._handed is not None:
            async with self.averager.tensors():
                self._gradients.take_back()
            self._handed = None

    async def average_alone(self) -> None:
        async with self.averager.tensors():
            await self._replica.change(self.method.alone)

    async def advance(self, committed: Committed, counted: bool) -> None:
        async with self.averager.tensors():
            following = self._following(committed)
            await self._replica.change(partial(self._step, following, committed.samples, counted))
            self._replica.state.apart |= committed.several

    def _following(self, committed: Committed) -> Standing:
        standing = self._replica.standing
        if committed.several and self._target is not None:
            return standing.by_epoch(self._target)
        return standing.after(committed.round_id, committed.samples)

    async def replay(self, averages: Sequence[torch.Tensor], round_id: bytes, samples: int) -> None:
        async with self.averager.tensors() as tensors:  # they hold the averages during a step

            def replay() -> None:
                for tensor, average in zip(tensors, averages, strict=True):
                    tensor.copy_(average)
                self._drop()
                self._step(self._replica.standing.after(round_id, samples), samples, counted=False)

            await self._replica.change(replay)

    async def pass_by(self, wanted: Standing) -> bool:
        if (target := self._target) is None:
            return False  # whoever claims such a lineage has not come to it by rounds
        passed = await self._replica.pass_by(wanted, lambda standing: standing.by_epoch(target))
        if passed:
            self._replica.state.apart = True
            await self.drop()
        return passed

    async def drop(self) -> None:
        async with self.averager.tensors():
            await on_executor(self._nbytes, self._drop)

    async def start_over(self) -> None:
        await self.drop()
        async with self.averager.tensors():
            await on_executor(self._nbytes, self.method.reset_own)

    def _step(self, standing: Standing, samples: int, counted: bool) -> None:
        self.method.finish(samples, counted)
        self._gradients.settle()
        self._handed = None
        self._replica.state.step(self.method.averaged, standing)

    def _drop(self) -> None:
        self._gradients.reset()
        self._handed = None
