"""Synchronous training: gradients add up over an epoch, and everyone steps with their mean over the swarm."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import torch

from swarmcli.averaging import AveragerCore
from swarmcli.averaging.aggregators import Mean
from swarmcli.compression import NoCompression
from swarmcli.events import Noticed
from swarmcli.optim.gradients.accumulator import Accumulator, GradientMethod, Shapes, Weighed
from swarmcli.optim.modes.base import GivenUp, Mode, tell_lost, tell_undecided
from swarmcli.optim.state.buffers import Buffers, room_for
from swarmcli.optim.state.replica import Replica
from swarmcli.tasks import OFFLOAD_FROM, on_executor
from swarmcli.threads import on_one_thread

if TYPE_CHECKING:
    from swarmcli.averaging import AveragerConfig, RoundResult
    from swarmcli.dht import DHTNode
    from swarmcli.optim.config import PeerContext
    from swarmcli.optim.modes.base import EpochWork, SiteHooks, Trained
    from swarmcli.optim.state.lineage import LineagePosition
    from swarmcli.optim.state.norms import StepNorms

# Bytes. The trainer waits in every step: adding so much takes 2 ms, less than a busy machine needs to hand it to
# another thread and back.
ACCUMULATE_HERE = 32 << 20


@dataclass(frozen=True, kw_only=True)
class Synchronous(Mode):
    """All peers hold the same parameters, which step once per epoch with the average of everyone's gradients."""

    def method(self, accumulator: Accumulator | Shapes, beside: Sequence[torch.Tensor] = ()) -> GradientMethod:
        """How the gradients are averaged, and `beside` as they are."""
        return GradientMethod(accumulator, beside)

    def build(self, peer: PeerContext, trained: Trained, site: SiteHooks) -> EpochWork:
        if site.companions is not None:
            raise ValueError("companions: where gradients are averaged nobody has parameters of its own")
        parameters = [p for p in trained.placement.model_parameters if p.requires_grad]
        accumulator = site.make_accumulator(parameters, reuse=self.reuse_grad_buffers)
        buffers = Buffers(trained.extra_tensors)
        method = self.method(accumulator, buffers.means)
        shared = dict(method.shared)
        if self.share_gradients:
            shared |= {f"average/{index}": mean for index, mean in enumerate(method.averaged)}
        state = trained.state(peer.config.run_id, shared=shared, own=method.own, extra_tensors=buffers.own)
        replica = Replica(state, trained.placement, buffers=buffers)
        return GradientWork(self, peer, replica, accumulator, method)

    def assisting_averager(
        self,
        node: DHTNode,
        config: AveragerConfig,
        parameters: Sequence[torch.Tensor],
        buffers: Sequence[torch.Tensor] = (),
    ) -> AveragerCore:
        """It needs to know how gradients are averaged, and what travels: no sums, nor what a peer keeps of its own."""
        with torch.device("meta"):
            method = self.method(Shapes.of(parameters), [*room_for(buffers), *self.room_for_riders(parameters)])
        tensors = [torch.empty_like(each, device="cpu") for each in method.tensors]
        return averager_of(method, tensors, node, self.configured(config))

    def room_for_riders(self, parameters: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Tensors like those statistics of an inner optimizer that are averaged in the same rounds."""
        return []


def averager_of(
    method: GradientMethod, tensors: Sequence[torch.Tensor], node: DHTNode, config: AveragerConfig
) -> AveragerCore:
    """Averages `tensors`, which are like those of the method, as it says. Raises ValueError for options of `config`
    that leave it no choice."""
    if method.compression is not None:
        options = config.allreduce
        if not isinstance(options.compression, NoCompression):
            codec = options.compression.description
            raise ValueError(f"grad_compression={codec!r}: sparse gradients have a codec of their own; remove it")
        if not isinstance(options.aggregator, Mean):
            raise ValueError(
                f"aggregator: {options.aggregator.description} of sparse gradients is zero wherever most sent none; "
                "use Mean()"
            )
        config = replace(config, allreduce=replace(config.allreduce, compression=method.compression))
    return AveragerCore(tensors, node, config, program=method.program)


class GradientWork:
    """EpochWork with an accumulator of this peer's gradients and a method of averaging them."""

    replays = True

    def __init__(
        self,
        mode: Mode,
        peer: PeerContext,
        replica: Replica,
        accumulator: Accumulator,
        method: GradientMethod,
    ) -> None:
        self.replica = replica
        self.method = method
        self._mode = mode
        self.averager = averager_of(method, self._travels(), peer.node, mode.configured(peer.averaging))
        self._events, self._own_id = peer.events, peer.node.peer_id
        self._target = peer.config.target_batch_size
        self._gradients = accumulator
        self.given_up = GivenUp(peer.events)
        self._handed: Weighed | None = None  # on its way; None: nothing is
        self._aside = Weighed()  # of a round of this position of which nobody could say whether it was committed
        self._nbytes = sum(parameter.nbytes for parameter in accumulator.parameters)
        self._freeze_bytes = max(self._nbytes, OFFLOAD_FROM) if accumulator.waits else self._nbytes

    @property
    def samples(self) -> int:
        return self._gradients.samples

    async def accumulate(self, batch_size: int, scale: float | None = None, weight: float | None = None) -> None:
        self.replica.placement.check_trained()
        taken = self._gradients.samples
        add = partial(self._gradients.add, batch_size, scale, weight)
        here = self._nbytes <= ACCUMULATE_HERE
        if on_one_thread(add) if here else await on_executor(self._nbytes, add):
            self.given_up.end()
        else:
            self.given_up.note(taken + batch_size - self._gradients.samples, scale)

    async def freeze(self) -> Weighed:
        """Gradients that are not finite are worth nothing to anybody: they are dropped, all of them, and said to be."""
        if self._handed is None:
            await self.replica.gather()
            async with self.averager.tensors():
                taken = self._gradients.samples
                self._handed = await on_executor(self._freeze_bytes, self._freeze)
            if dropped := taken - self._handed.samples:
                self.given_up.note(dropped)
        return self._handed

    def _freeze(self) -> Weighed:
        handed = self._gradients.freeze()
        self.method.load(handed.weight)
        self.replica.buffers.load()
        return handed

    async def restore(self) -> None:
        if self._handed is not None:
            async with self.averager.tensors():
                await self.replica.change(self._gradients.restore)  # the trainer may add samples at this moment
            self._handed = None

    async def set_aside(self) -> None:
        if self._handed is not None:
            tell_undecided(self._events, self._aside)
            self._aside, self._handed = self._handed, None
            async with self.averager.tensors():
                await self.replica.change(self._set_aside)

    def _set_aside(self) -> None:
        self._gradients.set_aside()
        self.method.set_aside()

    async def average_alone(self) -> None:
        async with self.averager.tensors():
            await self.replica.change(self.method.alone)

    async def advance(self, committed: RoundResult) -> StepNorms | None:
        async with self.averager.tensors():
            self._forget_aside(0.0)  # that round is not the one from which the run goes on
            following = self._mode.after(self.replica.position, committed, self._target)
            norms = await self.replica.change(partial(self._step, following, committed))
            self.replica.state.apart |= committed.several
        await self._go_on()
        return norms

    async def replay(self, averages: Sequence[torch.Tensor], committed: RoundResult) -> None:
        async with self.averager.tensors() as tensors:  # they hold the averages during a step

            def replay() -> None:
                for tensor, average in zip(tensors, averages, strict=True):
                    tensor.copy_(average)
                self._forget_aside(committed.samples.get(self._own_id, 0.0))
                self._drop_former()
                following = self.replica.position.after(committed.round_id, committed.total_samples)
                self._step(following, committed, missed=True)

            await self.replica.change(replay)
        await self._go_on()

    async def pass_by(self, wanted: LineagePosition) -> bool:
        if self._mode.target_group_size is None:
            return False  # whoever claims such a lineage has not come to it by rounds
        passed = await self.replica.pass_by(wanted, lambda position: position.by_epoch(self._target))
        if passed:
            self.replica.state.apart = True
            await self.drop()
        return passed

    async def drop(self) -> None:
        async with self.averager.tensors():
            self._forget_aside(0.0)
            tell_lost(self._events, await on_executor(self._nbytes, self._drop))
        await self._go_on()

    async def start_over(self) -> None:
        await self.drop()
        async with self.averager.tensors():
            lost = await on_executor(self._nbytes, self.method.reset_own)
        if lost:
            self._events.emit(Noticed("warning", lost))

    def _travels(self) -> Sequence[torch.Tensor]:
        """What the round averages that ends the present epoch."""
        return self.method.tensors

    async def _go_on(self) -> None:
        """The epoch is another one, perhaps."""

    def _step(self, position: LineagePosition, committed: RoundResult, *, missed: bool = False) -> StepNorms | None:
        counted = not missed and committed.samples.get(self._own_id, 0.0) > 0
        self.method.finish(math.fsum(committed.weights.values()), counted)
        self.replica.buffers.finish(counted=not missed)
        self._gradients.settle(counted)
        self._handed = None
        return self.replica.state.step(self._descent(committed), position)

    def _forget_aside(self, counted: float) -> None:
        """No other round of this position will be heard of. The run goes on from one that has counted so many of the
        samples that were set aside."""
        self.method.forget_aside(counted=counted > 0)
        tell_undecided(self._events, self._aside, counted)
        self._aside = Weighed()

    def _drop_former(self) -> None:
        """What this peer has accumulated is of parameters before a round that it makes up for."""
        tell_lost(self._events, self._drop())

    def _descent(self, committed: RoundResult) -> Sequence[torch.Tensor]:
        """The optimizer steps with this: here the average, in which equal weights count alike, whosever they are."""
        return self.method.averaged

    def _drop(self) -> int:
        """Returns the number of samples that are dropped."""
        samples = self._gradients.samples + self._gradients.handed_in.samples
        self._gradients.reset()
        self._handed = None
        return samples
