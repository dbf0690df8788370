"""Checks the user's arguments of the Optimizer, and makes from them what its parts need."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from inspect import Parameter, signature
from typing import Any, cast

import torch
from torch.nn.utils import clip_grad_norm_

from swarmcli.averaging import AllreduceOptions, AveragerConfig, MatchmakingOptions
from swarmcli.averaging.checks import check_flags, check_numbers
from swarmcli.compression import CompressionBase, NoCompression
from swarmcli.optim.config import OptimizerConfig
from swarmcli.optim.modes.base import Timing
from swarmcli.optim.state.replica import InPlace, Offloaded, ParameterPlacement
from swarmcli.optim.state.training_state import OptimizerFactory, Parameters, Scheduler, SchedulerFactory

# The keys of averager_opts: for matchmaking, for the all-reduce, for the averager itself.
_AVERAGER_OPTIONS = (
    {"request_timeout", "min_group_size", "target_group_size", "seats_per_network"},
    {"compression", "part_size_bytes", "sender_timeout", "reducer_timeout"}
    | {"trust", "aggregator", "audit", "max_share"},
    {"bandwidth", "min_vector_size", "initial_group_bits"},
)
_OPTIMIZERS_OWN = {"state_tolerance", "proceed_alone"}


def choose_timing(
    optimizer: object,
    params: object,
    *,
    offload: bool | None,
    delayed_step: bool | None,
    delayed_averaging: bool,
    outer: bool = False,
) -> tuple[Timing, bool]:
    """Returns for what the trainer waits at the end of an epoch, and whether the optimizer is offloaded, with defaults
    filled in. `outer`: the optimizer makes inner steps of the model itself, and the anchor steps elsewhere.

    Raises ValueError for a combination that cannot work, with the reason.
    """
    offload = params is not None and not outer if offload is None else offload
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
        "offload_optimizer=True: with outer steps the optimizer makes inner steps, of the model itself": (
            offload and outer
        ),
        "offload_optimizer=True needs an optimizer factory and params: a ready-made optimizer keeps its "
        "parameters where they are": offload and (ready_made or params is None),
        "delay_optimizer_step=True and delay_grad_averaging=True need an optimizer factory and params: a "
        "ready-made optimizer steps the model's parameters while the model computes with them": (
            ready_made and delayed_step and not outer
        ),
        "delay_optimizer_step=True needs offload_optimizer: otherwise the step changes the model's parameters "
        "while the model computes with them": delayed_step and not (offload or outer),
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
    """Returns the optimizer, or what the factory makes of `params`, and where its parameters are: with `offload` in
    host memory, as copies of the model's `params`. Raises ValueError or TypeError."""
    if isinstance(optimizer, torch.optim.Optimizer):
        made = optimizer
    elif not callable(optimizer):
        raise TypeError(f"optimizer: expected a torch optimizer or a factory, got {type(optimizer).__name__}")
    elif params is None:
        raise ValueError("params: an optimizer factory needs the parameters that the optimizer is for")
    elif offload:
        place = Offloaded(params, optimizer)
        return check_step(place.optimizer), place
    else:
        made = optimizer(params)
        if not isinstance(made, torch.optim.Optimizer):
            raise TypeError(f"optimizer: the factory returned {type(made).__name__}, expected a torch optimizer")
    return check_step(made), InPlace([p for group in made.param_groups for p in group["params"]])


def check_step(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Returns the optimizer. Raises ValueError for one that computes the loss anew within its step, such as LBFGS."""
    closure = signature(type(optimizer).step).parameters.get("closure")
    if closure is not None and closure.default is Parameter.empty:
        name = type(optimizer).__name__
        raise ValueError(f"optimizer: {name} needs a closure at every step; a swarm steps with one average gradient")
    return optimizer


def clipping(limit: float, clip: Callable[..., object] = clip_grad_norm_) -> Callable[..., None]:
    """Returns a hook to run before each step of an optimizer: it clips the gradients, which by then are the swarm's
    average, equal at all peers. Raises ValueError or TypeError for a `limit` that is no norm."""
    check_numbers(max_grad_norm=limit)
    if not 0 < limit < math.inf:
        raise ValueError(f"max_grad_norm={limit!r}: expected None or a positive number")

    def hook(optimizer: torch.optim.Optimizer, *_: object) -> None:
        clip([parameter for group in optimizer.param_groups for parameter in group["params"]], limit)

    return hook


def make_scheduler(
    scheduler: Scheduler | SchedulerFactory | None,
    made: torch.optim.Optimizer,
    optimizer: torch.optim.Optimizer | OptimizerFactory,
) -> Scheduler | None:
    """Returns the scheduler, or what the factory makes of the optimizer `made`. Raises ValueError or TypeError."""
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
    allreduce_timeout: float | None = None,
    next_chunk_timeout: float | None = None,
    compression: CompressionBase | None = None,
    options: Mapping[str, Any] | None = None,
) -> AveragerConfig:
    """Returns the options of a run's averager of gradients. `options`: averager_opts without the Optimizer's own.
    Raises TypeError for an option that does not exist."""
    given = dict(options or {})
    grouped = [{name: given.pop(name) for name in names & given.keys()} for names in _AVERAGER_OPTIONS]
    if given:
        known = ", ".join(sorted(_OPTIMIZERS_OWN.union(*_AVERAGER_OPTIONS)))
        raise TypeError(f"averager_opts: there is no {min(given)!r}; there are {known}")
    matchmaking, allreduce, others = grouped
    defaults = {"sender_timeout": next_chunk_timeout, "compression": compression or NoCompression()}
    return AveragerConfig(
        prefix=f"{config.run_id}_grads",
        run=config.run_id,
        matchmaking=MatchmakingOptions(min_matchmaking_time=config.matchmaking_time, **matchmaking),
        allreduce=AllreduceOptions(
            allreduce_timeout=config.averaging_timeout if allreduce_timeout is None else allreduce_timeout,
            **(defaults | allreduce),
        ),
        auxiliary=auxiliary,
        client_mode=config.client_mode,
        **others,
    )
