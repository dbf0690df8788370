"""What users hand to the Optimizer, checked, and made into the few values that its parts are built with."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from inspect import Parameter, signature
from typing import TYPE_CHECKING, Any, Protocol, cast

import torch

from swarmcli.averaging import AllreduceOptions, AveragerConfig, MatchmakingOptions
from swarmcli.averaging.checks import as_count, check_flags, check_numbers, check_text
from swarmcli.compression import CompressionBase, NoCompression
from swarmcli.optim.epoch.wait import Timing
from swarmcli.optim.gradients.accumulator import GradientAccumulator
from swarmcli.optim.peers.progress import RefreshOptions
from swarmcli.optim.peers.report import PeerDescription
from swarmcli.optim.state.placement import InPlace, Offloaded, ParameterPlacement
from swarmcli.optim.state.training_state import (
    OptimizerFactory,
    Parameters,
    Scheduler,
    SchedulerFactory,
    TrainingState,
)

if TYPE_CHECKING:
    from swarmcli.dht import DHTNode
    from swarmcli.events import Events
    from swarmcli.optim.state.replica import Companions

# What averager_opts may hold, by the component that it is for.
_AVERAGER_OPTIONS = (
    {"request_timeout", "preformed_grace", "min_group_size", "target_group_size"},
    {"compression", "part_size_bytes", "sender_timeout", "reducer_timeout"},
    {"bandwidth", "min_vector_size", "initial_group_bits"},
)
_OPTIMIZERS_OWN = {"state_tolerance", "proceed_alone"}


@dataclass(frozen=True)
class OptimizerConfig:
    """What the peers of a run agree on, and how long one of them waits. Times are seconds and upper bounds."""

    run_id: str  # peers with the same one train together
    target_batch_size: int  # samples of all peers together that make an epoch
    matchmaking_time: float = 15.0  # how long an epoch that is over waits for others who should be in its round
    averaging_timeout: float = 60.0  # how long a round that failed is tried again
    load_state_timeout: float = 600.0  # how long a newcomer looks for somebody who gives it the state
    idle_wait: float = 1.0  # how long a step without samples waits for the epoch's end before it returns
    description: PeerDescription = field(default_factory=PeerDescription)  # what people see of this peer
    fingerprint: Mapping[str, str] = field(default_factory=dict)  # key → hash; groups admit only equal ones
    tracker: RefreshOptions = field(default_factory=RefreshOptions)
    performance_ema_alpha: float = 0.1
    client_mode: bool | None = None  # as if nobody could dial this peer; None: as the DHT
    proceed_alone: bool = False  # with own gradients when no round comes about, although others are there
    verbose: bool = False  # the progress of the swarm goes to the log at level INFO

    def __post_init__(self) -> None:
        check_text(run_id=self.run_id)
        as_count(self.target_batch_size, "target_batch_size", least=1)
        check_flags(proceed_alone=self.proceed_alone)
        if not self.run_id:
            raise ValueError("run_id: expected a name, got an empty string")
        for name in ("matchmaking_time", "averaging_timeout", "load_state_timeout", "idle_wait"):
            value = getattr(self, name)
            check_numbers(**{name: value})
            if not (math.isfinite(value) and value > 0):
                raise ValueError(f"{name}={value!r}: expected a positive number of seconds")

    @cached_property
    def terms(self) -> str:
        """A short digest of the fingerprint: equal for peers that may train together."""
        return hashlib.sha256(json.dumps(sorted(self.fingerprint.items())).encode()).hexdigest()[:16]


@dataclass(frozen=True, slots=True)
class PeerContext:
    """One peer of a run: its node of the network, the run's options, and how its rounds average gradients."""

    node: DHTNode
    config: OptimizerConfig
    averaging: AveragerConfig

    @property
    def events(self) -> Events:
        return self.node.endpoint.events


class Trained:
    """What a peer trains: the parameters of `placement` by `optimizer`, which steps in place."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        scheduler: Scheduler | None = None,
        extra_tensors: Sequence[torch.Tensor] = (),
        placement: ParameterPlacement | None = None,
    ) -> None:
        """`placement` says where the model's parameters are if the optimizer's are others."""
        self.optimizer, self.scheduler, self.extra_tensors = optimizer, scheduler, extra_tensors
        self.placement = placement or InPlace([p for group in optimizer.param_groups for p in group["params"]])

    def state(
        self,
        run_id: str,
        *,
        shared: Mapping[str, torch.Tensor] | None = None,
        own: Mapping[str, torch.Tensor] | None = None,
    ) -> TrainingState:
        """With what a mode keeps beside the parameters, see TrainingState."""
        return TrainingState(run_id, self.optimizer, self.scheduler, self.extra_tensors, shared=shared, own=own)


class AccumulatorFactory(Protocol):
    """Makes what sums the gradients of the parameters that are trained: of a site, those of all its processes."""

    def __call__(self, parameters: Sequence[torch.Tensor], *, reuse: bool) -> GradientAccumulator: ...


@dataclass(frozen=True, slots=True)
class SiteHooks:
    """Where the processes of a site take part in what one process does otherwise."""

    make_accumulator: AccumulatorFactory = GradientAccumulator  # of what sums the gradients
    companions: Companions | None = None  # other processes that make local updates beside this one


def choose_timing(
    optimizer: object, params: object, *, offload: bool | None, delayed_step: bool | None, delayed_averaging: bool
) -> tuple[Timing, bool]:
    """For what of an epoch's end the trainer waits, and whether the optimizer is offloaded; defaults are filled in.

    Raises ValueError for a combination that cannot work, with the reason.
    """
    offload = params is not None if offload is None else offload
    delayed_step = delayed_averaging if delayed_step is None else delayed_step
    check_flags(delay_grad_averaging=delayed_averaging, offload_optimizer=offload, delay_optimizer_step=delayed_step)
    ready_made = isinstance(optimizer, torch.optim.Optimizer)
    refused = {
        "params: only for an optimizer factory; the optimizer that was given has its own": (
            ready_made and params is not None
        ),
        "delay_grad_averaging=True needs delay_optimizer_step: a step cannot come before its gradients": (
            delayed_averaging and not delayed_step
        ),
        "offload_optimizer=True needs an optimizer factory and params: a ready-made optimizer keeps its "
        "parameters where they are": offload and (ready_made or params is None),
        "delay_optimizer_step=True and delay_grad_averaging=True need an optimizer factory and params: a "
        "ready-made optimizer steps the model's parameters while the model computes with them": (
            ready_made and delayed_step
        ),
        "delay_optimizer_step=True needs offload_optimizer: otherwise the step changes the model's parameters "
        "while the model computes with them": delayed_step and not offload,
    }
    for reason, applies in refused.items():
        if applies:
            raise ValueError(reason)
    if delayed_averaging:
        return Timing.DELAYED_AVERAGING, offload
    return (Timing.DELAYED_STEP if delayed_step else Timing.AT_ONCE), offload


def place_optimizer(
    optimizer: torch.optim.Optimizer | OptimizerFactory, params: Parameters | None, *, offload: bool
) -> tuple[torch.optim.Optimizer, ParameterPlacement]:
    """The optimizer, and where its parameters are: with `offload` in host memory, as copies of the model's `params`.

    Raises ValueError or TypeError.
    """
    if offload and params is not None and callable(optimizer):
        place = Offloaded(params, optimizer)
        check_step(place.optimizer)
        return place.optimizer, place
    made = make_optimizer(optimizer, params)
    return made, InPlace([p for group in made.param_groups for p in group["params"]])


def make_optimizer(
    optimizer: torch.optim.Optimizer | OptimizerFactory, params: Parameters | None
) -> torch.optim.Optimizer:
    """The optimizer itself, or what the factory makes of `params`. Raises ValueError or TypeError."""
    if isinstance(optimizer, torch.optim.Optimizer):
        if params is not None:
            raise ValueError("params: only for an optimizer factory; the optimizer that was given has its own")
        return check_step(optimizer)
    if not callable(optimizer):
        raise TypeError(f"optimizer: expected a torch optimizer or a factory, got {type(optimizer).__name__}")
    if params is None:
        raise ValueError("params: an optimizer factory needs the parameters that the optimizer is for")
    made = optimizer(params)
    if not isinstance(made, torch.optim.Optimizer):
        raise TypeError(f"optimizer: the factory returned {type(made).__name__}, expected a torch optimizer")
    return check_step(made)


def check_step(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """The same. Raises ValueError for one, such as LBFGS, that computes the loss anew within its step."""
    closure = signature(type(optimizer).step).parameters.get("closure")
    if closure is not None and closure.default is Parameter.empty:
        name = type(optimizer).__name__
        raise ValueError(f"optimizer: {name} wants a closure at every step, a swarm steps with one average gradient")
    return optimizer


def make_scheduler(
    scheduler: Scheduler | SchedulerFactory | None,
    made: torch.optim.Optimizer,
    optimizer: torch.optim.Optimizer | OptimizerFactory,
) -> Scheduler | None:
    """The scheduler itself, or what the factory makes of the optimizer `made`. Raises ValueError or TypeError."""
    if scheduler is None:
        return None
    if hasattr(scheduler, "step") and hasattr(scheduler, "state_dict"):
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise ValueError("scheduler: give a factory, since the optimizer that it is for is only made here")
        if getattr(scheduler, "optimizer", made) is not made:
            raise ValueError("scheduler: it belongs to another optimizer than the one that was given")
        return _check_schedule(cast(Scheduler, scheduler))
    if not callable(scheduler):
        raise TypeError(f"scheduler: expected a scheduler or a factory, got {type(scheduler).__name__}")
    return _check_schedule(scheduler(made))


def _check_schedule(scheduler: Scheduler) -> Scheduler:
    wanted = [p.name for p in signature(scheduler.step).parameters.values() if p.default is Parameter.empty]
    if wanted and not any(name in ("args", "kwargs") for name in wanted):
        name = type(scheduler).__name__
        raise ValueError(f"scheduler: {name} wants {wanted[0]!r} at every step, in which peers would differ")
    return scheduler


def averager_config(
    config: OptimizerConfig,
    *,
    auxiliary: bool = False,
    client_mode: bool | None = None,
    allreduce_timeout: float | None = None,
    next_chunk_timeout: float | None = None,
    compression: CompressionBase | None = None,
    options: Mapping[str, Any] | None = None,
) -> AveragerConfig:
    """The averager of a run. `options` are averager_opts without the Optimizer's own; TypeError names one that there is
    not."""
    given = dict(options or {})
    grouped = [{name: given.pop(name) for name in names & given.keys()} for names in _AVERAGER_OPTIONS]
    if given:
        known = ", ".join(sorted(_OPTIMIZERS_OWN.union(*_AVERAGER_OPTIONS)))
        raise TypeError(f"averager_opts: there is no {min(given)!r}; there are {known}")
    matchmaking, allreduce, others = grouped
    defaults = {"sender_timeout": next_chunk_timeout, "compression": compression or NoCompression()}
    return AveragerConfig(
        prefix=f"{config.run_id}_grads",
        matchmaking=MatchmakingOptions(min_matchmaking_time=config.matchmaking_time, **matchmaking),
        allreduce=AllreduceOptions(
            allreduce_timeout=config.averaging_timeout if allreduce_timeout is None else allreduce_timeout,
            **(defaults | allreduce),
        ),
        auxiliary=auxiliary,
        client_mode=client_mode,
        **others,
    )
