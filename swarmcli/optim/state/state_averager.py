"""TrainingStateAverager: parameters and extra tensors, averaged as they are, with the optimizer that moves them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from swarmcli.averaging import DecentralizedAverager, RoundResult
from swarmcli.optim.setup import make_optimizer, make_scheduler
from swarmcli.optim.state.training_state import OptimizerFactory, Parameters, Scheduler, SchedulerFactory

if TYPE_CHECKING:
    from swarmcli.dht import DHT


class TrainingStateAverager(DecentralizedAverager):
    """For training loops in which every peer steps by itself and the parameters are averaged now and then.

    Parameters and `extra_tensors` (batch norm statistics, for example) are averaged in place, in host memory.
    `local_epoch` counts what the user counts with `increment_epoch`; the scheduler is stepped with it.
    """

    def __init__(
        self,
        *,
        dht: DHT,
        prefix: str,
        optimizer: torch.optim.Optimizer | OptimizerFactory,
        params: Parameters | None = None,
        scheduler: Scheduler | SchedulerFactory | None = None,
        extra_tensors: Sequence[torch.Tensor] = (),
        start: bool = True,
        **averager_options: Any,
    ) -> None:
        self.optimizer = make_optimizer(optimizer, params)
        self.scheduler = make_scheduler(scheduler, self.optimizer, optimizer)
        self.local_epoch = 0
        own = [p.detach() for group in self.optimizer.param_groups for p in group["params"]]
        super().__init__([*own, *extra_tensors], dht, prefix=prefix, start=start, **averager_options)

    def step_optimizer(self) -> None:
        """Moves the parameters by the gradients that they hold; waits for an all-reduce under way."""
        with self.get_tensors():
            self.optimizer.step()

    def increment_epoch(self) -> None:
        self.local_epoch += 1
        if self.scheduler is not None:
            self.scheduler.step()

    def average(self, **averaging_options: Any) -> RoundResult | None:
        """One round over the whole state; None if it failed, and nothing has changed then."""
        return DecentralizedAverager.step(self, **averaging_options)

    def step(  # type: ignore[override]
        self,
        optimizer_step: bool = False,
        zero_grad: bool = False,
        increment_epoch: bool = False,
        averaging_round: bool = False,
        averaging_opts: Mapping[str, Any] | None = None,
    ) -> RoundResult | None:
        """The chosen actions, in this order; returns the round's result if there was one."""
        if averaging_opts and not averaging_round:
            raise ValueError("averaging_opts: only with averaging_round=True")
        if optimizer_step:
            self.step_optimizer()
        if zero_grad:
            self.optimizer.zero_grad()
        if increment_epoch:
            self.increment_epoch()
        return self.average(**(averaging_opts or {})) if averaging_round else None
