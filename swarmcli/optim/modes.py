"""How a run trains: the modes of the optimizer as one typed value, and the parts that they stand for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import torch

from swarmcli.averaging import AveragerCore
from swarmcli.compression import CompressionBase, NoCompression
from swarmcli.optim.config import OptimizerConfig
from swarmcli.optim.epoch.gradient_work import GradientWork
from swarmcli.optim.epoch.local_work import LocalWork, local_averager
from swarmcli.optim.epoch.work import EpochWork, Timing
from swarmcli.optim.gradients.accumulator import GradientAccumulator
from swarmcli.optim.gradients.method import MethodFactory
from swarmcli.optim.gradients.plain import Plain
from swarmcli.optim.state.placement import InPlace, ParameterPlacement
from swarmcli.optim.state.replica import Companions, Replica
from swarmcli.optim.state.training_state import Scheduler, TrainingState
from swarmcli.optim.state.volumes import VOLUME_BYTES

if TYPE_CHECKING:
    from swarmcli.averaging import AveragerConfig
    from swarmcli.dht import DHTNode


class AccumulatorFactory(Protocol):
    """Makes what sums the gradients of the parameters that are trained: of a site, those of all its processes."""

    def __call__(self, parameters: Sequence[torch.Tensor], *, reuse: bool) -> GradientAccumulator: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class StateOptions:
    """When and how the peers' states are averaged, and how a state travels to a newcomer."""

    average_every: int | None = None  # epochs; None: with local updates every epoch, otherwise when sketches part
    delay: bool = True  # training goes on meanwhile, and what was learned meanwhile is added to the average
    statistics: tuple[str, ...] = ()  # of the optimizer, by name, that are averaged with the parameters
    tolerance: float = 1e-3  # distance between parameters, relative to their norm, above which they are repaired
    compression: CompressionBase = field(default_factory=NoCompression)
    load_compression: CompressionBase = field(default_factory=NoCompression)
    volume_bytes: int = VOLUME_BYTES  # a constant of the protocol; only tests have another one, at all peers

    def __post_init__(self) -> None:
        every = self.average_every
        if every is not None and (isinstance(every, bool) or not isinstance(every, int) or every < 1):
            raise ValueError(f"average_state_every={every!r}: expected None or a positive number of epochs")
        for name, codec in (("state_averaging", self.compression), ("load_state", self.load_compression)):
            if not isinstance(codec, CompressionBase):
                raise TypeError(f"{name}_compression={codec!r}: expected a codec such as Float16Compression()")
        if not 0 < self.tolerance < 1:
            raise ValueError(f"state_tolerance={self.tolerance!r}: expected a number between 0 and 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class Modes:
    """What the peers of a run do with their batches. Wrong combinations are refused where users make them."""

    gradients: MethodFactory | None = field(default_factory=Plain)  # how gradients are averaged; None: local updates
    timing: Timing = Timing.AT_ONCE
    reuse_grad_buffers: bool = False  # the parameters' gradients are the sums: no other buffer
    share_gradients: bool = False  # the last average is part of the state that newcomers download
    target_group_size: int | None = None  # where more peers are there, several groups end each epoch; None: never
    state: StateOptions = StateOptions()

    def __post_init__(self) -> None:
        if self.target_group_size is not None and self.gradients is not None and not isinstance(self.gradients, Plain):
            raise ValueError(
                "target_group_size: PowerSGD and PowerEF need one group of all peers, since what these share (Q, "
                "estimates) has to be the same for everyone"
            )
        codec = self.state.compression
        if self.target_group_size is not None and not isinstance(codec, NoCompression):
            raise ValueError(
                f"state_averaging_compression={codec.description!r}: with target_group_size states travel as they are, "
                "since several groups have no common average that differences could be told from; use NoCompression()"
            )

    @property
    def state_compression(self) -> CompressionBase:
        """The codec of averaged states. Where they are only averaged to repair them nobody has a reference, and one
        would take as much memory as a state: they travel as they are."""
        return NoCompression() if self.average_state_every(several=False) is None else self.state.compression

    def by_epoch(self, several: bool) -> bool:
        """Whether peers differ by design after an epoch, so that their lineage only counts epochs; `several`: groups
        ended it."""
        return self.gradients is None or several

    def average_state_every(self, several: bool) -> int | None:
        """Epochs; None: when sketches of the peers' parameters part. `several`: groups ended the last one."""
        every = self.state.average_every
        return 1 if every is None and self.by_epoch(several) else every


def assemble(
    node: DHTNode,
    config: OptimizerConfig,
    averager_config: AveragerConfig,
    modes: Modes,
    optimizer: torch.optim.Optimizer,
    scheduler: Scheduler | None,
    extra_tensors: Sequence[torch.Tensor],
    placement: ParameterPlacement | None,
    accumulate: AccumulatorFactory = GradientAccumulator,
    companions: Companions | None = None,
) -> tuple[Replica, EpochWork]:
    """The replica and the work of one trainer. `placement` is None where the optimizer has the model's parameters."""
    place = placement or InPlace([p for group in optimizer.param_groups for p in group["params"]])
    if modes.gradients is None:
        replica = Replica(TrainingState(config.run_id, optimizer, scheduler, extra_tensors), place, companions)
        return replica, LocalWork(node, config, averager_config, replica)
    if companions is not None:
        raise ValueError("companions: where gradients are averaged nobody has parameters of its own")
    trained = [p for p in place.model_parameters if p.requires_grad]
    accumulator = accumulate(trained, reuse=modes.reuse_grad_buffers)
    method = modes.gradients(accumulator)
    shared = dict(method.shared)
    if modes.share_gradients:
        shared |= {f"average/{index}": mean for index, mean in enumerate(method.averaged)}
    state = TrainingState(config.run_id, optimizer, scheduler, extra_tensors, shared=shared, own=method.own)
    replica = Replica(state, place)
    averager = AveragerCore(method.tensors, node, averager_config, program=method.program)
    target = None if modes.target_group_size is None else config.target_batch_size
    return replica, GradientWork(replica, accumulator, method, averager, node.endpoint.events, passes_by=target)


def assemble_auxiliary(
    node: DHTNode,
    averager_config: AveragerConfig,
    modes: Modes,
    parameters: Sequence[torch.Tensor],
) -> AveragerCore:
    """What reduces for the trainers of such a run. Tensors like theirs are made and never touched, so they are not
    in memory either."""
    like = [torch.empty_like(p, device="cpu").requires_grad_(p.requires_grad) for p in parameters]
    if modes.gradients is None:
        return local_averager(node, averager_config)
    outline = modes.gradients.outline([p for p in like if p.requires_grad])
    return AveragerCore(outline.tensors, node, averager_config, program=outline.program)
