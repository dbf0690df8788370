"""What users hand to the Optimizer, checked and made into what its core works with."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import torch

from swarmcli.averaging import AllreduceOptions, AveragerConfig, MatchmakingOptions
from swarmcli.optim.config import OptimizerConfig
from swarmcli.optim.state.training_state import OptimizerFactory, Parameters, Scheduler, SchedulerFactory

# What averager_opts may hold, by the component that it is for.
_AVERAGER_OPTIONS = (
    {"request_timeout", "standing_grace"},
    {"compression", "part_size_bytes", "sender_timeout", "reducer_timeout"},
    {"bandwidth", "min_vector_size", "client_mode"},
)


def make_optimizer(
    optimizer: torch.optim.Optimizer | OptimizerFactory, params: Parameters | None
) -> torch.optim.Optimizer:
    """The optimizer itself, or what the factory makes of `params`. Raises ValueError or TypeError."""
    if isinstance(optimizer, torch.optim.Optimizer):
        if params is not None:
            raise ValueError("params: only for an optimizer factory; the optimizer that was given has its own")
        return optimizer
    if not callable(optimizer):
        raise TypeError(f"optimizer: expected a torch optimizer or a factory, got {type(optimizer).__name__}")
    if params is None:
        raise ValueError("params: an optimizer factory needs the parameters that the optimizer is for")
    made = optimizer(params)
    if not isinstance(made, torch.optim.Optimizer):
        raise TypeError(f"optimizer: the factory returned {type(made).__name__}, expected a torch optimizer")
    return made


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
        return cast(Scheduler, scheduler)
    if not callable(scheduler):
        raise TypeError(f"scheduler: expected a scheduler or a factory, got {type(scheduler).__name__}")
    return scheduler(made)


def averager_config(
    config: OptimizerConfig,
    *,
    auxiliary: bool = False,
    allreduce_timeout: float | None = None,
    options: Mapping[str, Any] | None = None,
) -> AveragerConfig:
    """The gradient averager of a run. `options` are averager_opts; TypeError names one that there is not."""
    given = dict(options or {})
    grouped = [{name: given.pop(name) for name in names & given.keys()} for names in _AVERAGER_OPTIONS]
    if given:
        known = ", ".join(sorted(set().union(*_AVERAGER_OPTIONS)))
        raise TypeError(f"averager_opts: there is no {min(given)!r}; there are {known}")
    matchmaking, allreduce, others = grouped
    return AveragerConfig(
        prefix=f"{config.run_id}_grads",
        matchmaking=MatchmakingOptions(min_matchmaking_time=config.matchmaking_time, **matchmaking),
        allreduce=AllreduceOptions(allreduce_timeout=allreduce_timeout or config.averaging_timeout, **allreduce),
        auxiliary=auxiliary,
        **others,
    )
