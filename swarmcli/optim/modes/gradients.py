"""A way to train, as one object: the options that it refuses, the work that it builds, and what a round means for it.

`Mode` itself is synchronous training: gradients add up over an epoch, and all step with their mean over the swarm.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, ClassVar

import torch

from swarmcli.averaging import AveragerCore
from swarmcli.averaging.aggregators import Mean
from swarmcli.averaging.checks import check_flags
from swarmcli.compression import NoCompression
from swarmcli.concurrency import OFFLOAD_FROM, on_executor
from swarmcli.events import Noticed
from swarmcli.optim.gradients.accumulator import GradientAccumulator, GradientMethod, Weighed, sum_type
from swarmcli.optim.modes.base import AS_USUAL, GivenUp, StateOptions, Timing, tell_lost
from swarmcli.optim.state.buffers import Buffers, room_for
from swarmcli.optim.state.replica import Replica
from swarmcli.optim.state.training_state import TrainingState
from swarmcli.threads import on_one_thread

if TYPE_CHECKING:
    from swarmcli.averaging import AveragerConfig, RoundResult
    from swarmcli.dht import DHTNode
    from swarmcli.optim.config import PeerContext
    from swarmcli.optim.modes.base import Trained
    from swarmcli.optim.modes.outer import Riders
    from swarmcli.optim.state.differences import Differences
    from swarmcli.optim.state.lineage import LineagePosition
    from swarmcli.optim.state.norms import StepNorms

# Bytes that are added in the loop's thread. It takes 2 ms, for which the trainer waits in every step: a busy machine
# takes longer to hand work to another thread and back.
ACCUMULATE_HERE = 32 << 20


@dataclass(frozen=True, kw_only=True)
class Mode:
    """A way to train that all peers of a run share, with its options. Others are subclasses in files of their own,
    which `modes/__init__.py` names. Raises ValueError for options that cannot work together, with the reason.

    Here all peers hold the same parameters, and step once per epoch with the average of everyone's gradients.
    """

    timing: Timing = Timing.AT_ONCE
    reuse_grad_buffers: bool = False  # the parameters' gradients are the sums: no other buffer
    share_gradients: bool = False  # the last average is part of the state that newcomers download
    local: ClassVar[bool] = False  # each peer steps at every batch, and parameters are averaged in place of gradients
    target_group_size: int | None = None  # if there are more peers, several groups end each epoch; None: never
    state: StateOptions = AS_USUAL

    def __post_init__(self) -> None:
        check_flags(reuse_grad_buffers=self.reuse_grad_buffers, use_ext_grad_buffer=self.share_gradients)
        codec = self.state.compression
        if self.target_group_size is not None and not (self.local or isinstance(codec, NoCompression)):
            raise ValueError(
                f"state_averaging_compression={codec.description!r}: with target_group_size states travel as they are, "
                "since several groups have no common average that differences could be told from; use NoCompression()"
            )

    def method(self, means: Sequence[torch.Tensor], beside: Sequence[torch.Tensor] = ()) -> GradientMethod:
        """How the `means` of gradients are averaged; `beside` are tensors that are averaged as they are."""
        return GradientMethod(means, beside)

    def build(self, peer: PeerContext, trained: Trained) -> GradientWork:
        """Makes the work of one trainer, for all its epochs."""
        parameters = [p for p in trained.placement.model_parameters if p.requires_grad]
        accumulator = trained.make_accumulator(parameters, reuse=self.reuse_grad_buffers)
        buffers = Buffers(trained.extra_tensors)
        method = self.method(accumulator.means, buffers.means)
        shared = dict(method.shared)
        if self.share_gradients:
            shared |= {f"average/{index}": mean for index, mean in enumerate(method.averaged)}
        state = TrainingState(
            peer.config.run_id, trained.optimizer, trained.scheduler, buffers.own, shared=shared, own=method.own
        )
        replica = Replica(state, trained.placement, buffers=buffers)
        return GradientWork(self, peer, replica, accumulator, method, (buffers,))

    def assisting_averager(
        self,
        node: DHTNode,
        config: AveragerConfig,
        parameters: Sequence[torch.Tensor],
        buffers: Sequence[torch.Tensor] = (),
    ) -> AveragerCore:
        """Makes the averager of an auxiliary, which reduces for the trainers. `parameters`, `buffers`: tensors that
        nobody ever touches, of the shapes of the trainers'. It has tensors only for what travels, not for sums or what
        a peer keeps for itself."""
        trained = [each for each in parameters if each.requires_grad]
        with torch.device("meta"):
            means = [torch.empty(each.shape, dtype=sum_type(each.dtype)) for each in trained]
            method = self.method(means, [*room_for(buffers), *self.room_for_riders(trained)])
        tensors = [torch.empty_like(each, device="cpu") for each in method.tensors]
        return averager_of(method, tensors, node, self.configured(config))

    def room_for_riders(self, trained: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Tensors of the shapes of those statistics of an inner optimizer that are averaged in the same rounds."""
        return []

    def brings(self, epoch: int) -> bool:
        """Whether the round that ends this epoch (the first is 0) averages anything; otherwise it only counts
        samples."""
        return True

    def configured(self, config: AveragerConfig) -> AveragerConfig:
        """The options of this mode's averager, made from those of an averager of gradients."""
        return config

    def after(self, position: LineagePosition, committed: RoundResult, target_batch_size: int) -> LineagePosition:
        """Where a round that was committed at `position` leads. If several groups ended the epoch, peers differ by
        design, and their lineage only counts epochs."""
        if committed.several:
            return position.by_epoch(target_batch_size)
        return position.after(committed.round_id, committed.total_samples)

    def average_state_every(self, several: bool) -> int | None:
        """After how many epochs states are averaged; None: never, sketches decide when one is replaced. `several`:
        several groups ended the last epoch."""
        every = self.state.average_every
        return 1 if every is None and several else every

    def state_weight(self, weight: float) -> float:
        """A peer's weight in the averaging of states after an epoch in which its gradients had `weight`."""
        return 1.0


def averager_of(
    method: GradientMethod, tensors: Sequence[torch.Tensor], node: DHTNode, config: AveragerConfig
) -> AveragerCore:
    """Makes the averager of `tensors`, which have the shapes of the method's own, as the method says. Raises ValueError
    for options of `config` that do not go with the method."""
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
    """Takes in batches, brings their gradients to the round that ends the epoch, and steps with the outcome.

    Its coroutines exclude each other where they must: `accumulate` may be called while what was frozen is on its way.
    `replica` is what steps, the group of `averager` ends the epoch, and `given_up` counts how often gradients that were
    not finite were dropped: those of a batch, or all that had been accumulated.
    """

    # What becomes of this peer's samples if it does not know a round's outcome, in words for people; see `set_aside`.
    if_undecided = "this peer's samples wait for the next round, unless the run goes on from this one"

    def __init__(
        self,
        mode: Mode,
        peer: PeerContext,
        replica: Replica,
        accumulator: GradientAccumulator | Differences,
        method: GradientMethod,
        beside: Sequence[Buffers | Riders],
    ) -> None:
        """`beside`: what else is averaged in the same round."""
        self.replica = replica
        self.method = method
        self._mode = mode
        self.averager = averager_of(method, self._travels(), peer.node, mode.configured(peer.averaging))
        self._events, self._own_id = peer.events, peer.node.peer_id
        self._target = peer.config.target_batch_size
        self._gradients, self._beside = accumulator, beside
        self.given_up = GivenUp(peer.events)
        self._handed: Weighed | None = None  # what was frozen, until the outcome is known; None: nothing
        self._nbytes = sum(parameter.nbytes for parameter in accumulator.parameters)
        self._freeze_bytes = max(self._nbytes, OFFLOAD_FROM) if accumulator.waits else self._nbytes

    @property
    def samples(self) -> int:
        """Samples that are accumulated for the next round, without those frozen for the present one."""
        return self._gradients.samples

    async def accumulate(self, batch_size: int, scale: float | None = None, weight: float | None = None) -> None:
        """Takes in the present gradients of the parameters, means over `batch_size` samples. `weight`: theirs in the
        average (None: the number of samples). `scale`: the losses were multiplied by it. ValueError: they do not fit.

        A batch with a gradient that is not finite is dropped, and `given_up` counts it; with `scale` all that this peer
        has accumulated for the round may be dropped with it.
        """
        self.replica.placement.check_trained()
        taken = self._gradients.samples
        add = partial(self._gradients.add, batch_size, scale, weight)
        here = self._nbytes <= ACCUMULATE_HERE
        if on_one_thread(add) if here else await on_executor(self._nbytes, add):
            self.given_up.end()
        else:
            self.given_up.note(taken + batch_size - self._gradients.samples, scale)

    async def freeze(self) -> Weighed:
        """Fixes what the averager averages, and returns its samples and its weight.

        Gradients that come from now on belong to the next round. Called again before the outcome is known, it changes
        nothing and returns the same. If the gradients are not finite, all of them are dropped, and `given_up` says so.
        """
        if self._handed is None:
            async with self.averager.tensors():
                taken = self._gradients.samples
                self._handed = await on_executor(self._freeze_bytes, self._freeze)
            if dropped := taken - self._handed.samples:
                self.given_up.note(dropped)
        return self._handed

    def _freeze(self) -> Weighed:
        handed = self._gradients.freeze()
        self.method.load(handed.weight)
        for each in self._beside:
            each.load()
        return handed

    async def restore(self) -> None:
        """The round is dead: what was frozen counts for the next one. Without effect if nothing was frozen."""
        if self._handed is not None:
            async with self.averager.tensors():
                await self.replica.change(self._gradients.restore)  # the trainer may add samples at this moment
            self._handed = None

    async def set_aside(self) -> None:
        """The round is undecided: it may have counted what was frozen. Without effect if nothing was frozen.

        A lineage goes on from one round of a position, and gradients belong to one position. So they may count for the
        next round of this position; if the run turns out to go on from the undecided round, they are dropped, and its
        record says how many of them it counted.
        """
        if self._handed is not None:
            async with self.averager.tensors():
                await self.replica.change(self._set_aside)
            self._handed = None

    def _set_aside(self) -> None:
        self.method.set_aside()
        self._gradients.restore()

    async def average_alone(self) -> None:
        """Makes what was frozen the average, as in a round with nobody else."""
        async with self.averager.tensors():
            await self.replica.change(self.method.alone)

    async def advance(self, committed: RoundResult) -> StepNorms | None:
        """Steps with the averager's tensors; from here on the replica is at the next epoch of the next lineage. Returns
        the norms of the step; None if no gradients are averaged.

        If the round counted any share of what was frozen, all of it is used up: no round gets the rest.
        """
        async with self.averager.tensors():
            self._forget_aside(0.0)
            following = self._mode.after(self.replica.position, committed, self._target)
            norms = await self.replica.change(partial(self._step, following, committed))
            self.replica.state.apart |= committed.several
        await self._go_on()
        return norms

    async def replay(self, averages: Sequence[torch.Tensor], committed: RoundResult) -> None:
        """Steps with a round that this peer missed. Drops gradients, accumulated or frozen, of the parameters
        before."""

        async with self.averager.tensors() as tensors:  # a step takes the averages from these

            def replay() -> None:
                for tensor, average in zip(tensors, averages, strict=True):
                    tensor.copy_(average)
                counted = committed.samples.get(self._own_id, 0.0)
                self._forget_aside(counted)
                self._drop_former(counted)
                following = self.replica.position.after(committed.round_id, committed.total_samples)
                self._step(following, committed, missed=True)

            await self.replica.change(replay)
        await self._go_on()

    async def pass_by(self, wanted: LineagePosition) -> bool:
        """Takes the position `wanted` with the parameters as they are, if that only counts epochs from here. Drops
        gradients, accumulated or frozen. Returns False, and changes nothing, if `wanted` is of another lineage.
        """
        path = [self.replica.position]
        while path[-1].epoch < wanted.epoch:
            path.append(path[-1].by_epoch(self._target))
        if self._mode.target_group_size is None or path[-1] != wanted:
            return False  # if one group ends all epochs, no round has led anybody to such a lineage
        for position in path[1:]:
            await self.replica.change(partial(self.replica.state.end_epoch, position))
        self.replica.state.apart = True
        await self.drop()
        return True

    async def drop(self) -> None:
        """Drops what was accumulated or frozen, which belongs to parameters that are gone, and warns."""
        async with self.averager.tensors():
            self._forget_aside(0.0)
            tell_lost(self._events, await on_executor(self._nbytes, self._drop))
        await self._go_on()

    async def start_over(self) -> None:
        """Another peer's state has replaced this peer's: drops all that belonged to the old one."""
        await self.drop()
        async with self.averager.tensors():
            lost = await on_executor(self._nbytes, self.method.reset_own)
        if lost:
            self._events.emit(Noticed("warning", lost))

    def _travels(self) -> Sequence[torch.Tensor]:
        """The tensors that the round at the end of the present epoch averages."""
        return self.method.tensors

    async def _go_on(self) -> None:
        """Called when the epoch may have changed."""

    def _step(self, position: LineagePosition, committed: RoundResult, *, missed: bool = False) -> StepNorms | None:
        counted = not missed and committed.samples.get(self._own_id, 0.0) > 0
        self.method.finish(math.fsum(committed.weights.values()), counted)
        for each in self._beside:
            each.finish(counted=not missed)
        self._gradients.settle(counted)
        self._handed = None
        return self.replica.state.step(self._descent(committed), position)

    def _forget_aside(self, counted: float) -> None:
        """This peer leaves the position. `counted`: how many samples that it set aside have counted, because the run
        goes on from the round that was undecided here; 0: it goes on from another one, as far as this peer knows."""
        self.method.forget_aside(counted=counted > 0)

    def _drop_former(self, counted: float) -> None:
        """Drops gradients of the parameters before a round that this peer replays, and warns. `counted`: samples of
        this peer that the round has counted."""
        tell_lost(self._events, self._drop() - counted)

    def _descent(self, committed: RoundResult) -> Sequence[torch.Tensor]:
        """What the optimizer steps with: here the average of the gradients."""
        return self.method.averaged

    def _drop(self) -> int:
        """Drops what was accumulated or frozen. Returns its number of samples."""
        samples = self._gradients.samples + self._gradients.handed_in.samples
        self._gradients.reset()
        self._handed = None
        return samples
