"""TrainingStateAverager: a whole training state, averaged as it is, with the optimizer that moves it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from swarmcli.averaging import RoundResult, StepControl
from swarmcli.optim.grad_scaler import GradScaler, check_grad_scaler
from swarmcli.optim.setup import make_scheduler, place_optimizer
from swarmcli.optim.state.delayed_actions import DelayedActions
from swarmcli.optim.state.optimizer_averager import OptimizerAverager
from swarmcli.optim.state.slots import extra_slots, parameter_slots, statistic_slots
from swarmcli.optim.state.training_state import (
    OptimizerFactory,
    Parameters,
    Scheduler,
    SchedulerFactory,
    TrainingState,
    lent,
)

if TYPE_CHECKING:
    from swarmcli.dht import DHT

Gradients = Sequence[tuple[torch.Tensor, torch.Tensor]]  # of parameters of the optimizer


class TrainingStateAverager(OptimizerAverager):
    """For training loops in which every peer steps by itself and the states are averaged now and then.

    What is averaged are copies in host memory: of the parameters, of the statistics of the optimizer that are named in
    `average_opt_statistics` and have the shape of their parameter, and of floating-point `extra_tensors` (batch norm's,
    for example). The state then moves by the delta rule, state += average - state before the round, so what was
    learned while a round was under way is kept; a round that fails changes nothing.

    Every action is a method; `step` calls those that are asked for, in order. Delayed ones run in a thread of their
    own, one after the other, and take effect on the model in `apply_delayed_updates`. Others download the whole
    state from here: parameters, all statistics, scheduler, extra tensors and epoch. Methods are for one thread.
    """

    def __init__(
        self,
        *,
        dht: DHT,
        prefix: str,
        optimizer: torch.optim.Optimizer | OptimizerFactory,
        params: Parameters | None = None,
        scheduler: Scheduler | SchedulerFactory | None = None,
        offload_optimizer: bool = False,
        average_opt_statistics: Sequence[str] = (),
        extra_tensors: Sequence[torch.Tensor] = (),
        start: bool = True,
        **averager_options: Any,
    ) -> None:
        """`offload_optimizer`: a factory is given `params` as copies in host memory; the model's own only change when
        the copies are published. ValueError, TypeError or OptimizerError for arguments that make no sense."""
        if offload_optimizer and (params is None or isinstance(optimizer, torch.optim.Optimizer)):
            raise ValueError("offload_optimizer=True: expected an optimizer factory and params, to make copies of them")
        self.optimizer, place = place_optimizer(optimizer, params, offload=offload_optimizer)
        self.scheduler = make_scheduler(scheduler, self.optimizer, optimizer)
        self._offloaded = offload_optimizer
        self._delayed = DelayedActions("swarm-delayed")
        state = TrainingState(prefix, self.optimizer, self.scheduler, extra_tensors)
        slots = [
            *parameter_slots(state.parameters),
            *statistic_slots(state.parameters, self.optimizer, average_opt_statistics),
            *extra_slots(extra_tensors),
        ]
        super().__init__(state, place, slots, dht=dht, prefix=prefix, start=start, **averager_options)

    @property
    def local_epoch(self) -> int:
        """How often `increment_epoch` was called here, or where the state was downloaded from."""
        return self._state.epoch

    # the optimizer

    def step_optimizer(
        self, wait_for_trigger: Callable[[], Any] | None = None, grad_scaler: GradScaler | None = None
    ) -> None:
        """Moves the parameters by the gradients of the model's. Those are read after `wait_for_trigger` was called.

        A trigger may also write gradients of its own to an offloaded optimizer's parameters; they are used up then.
        `grad_scaler` is a swarmcli.GradScaler, which leaves out a step that has overflowed.
        """
        check_grad_scaler(grad_scaler)
        self._step(None, wait_for_trigger, grad_scaler)
        self._place.publish()

    def delay_step(self, wait_for_trigger: Callable[[], Any] | None = None) -> None:
        """The same in the background, with the gradients of this moment unless there is a trigger to wait for.

        Needs an offloaded optimizer: otherwise the model would change while it computes.
        """
        if not self._offloaded:
            raise ValueError("delay_optimizer_step=True needs offload_optimizer: the model computes meanwhile")
        gradients = None if wait_for_trigger is not None else [(p, g.cpu().clone()) for p, g in self._gradients()]
        self._delayed.submit(partial(self._step, gradients, wait_for_trigger, None))

    def delay_scheduler_step(self) -> None:
        """The scheduler's step in the background, after the optimizer's."""
        self._delayed.submit(self.step_scheduler)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Of the model's parameters."""
        for parameter in self._place.model_parameters:
            if set_to_none:
                parameter.grad = None
            elif parameter.grad is not None:
                parameter.grad.detach_().zero_()

    def increment_epoch(self) -> None:
        """Counts the epoch that is over; the scheduler's step is another action."""
        self._state.standing = self._state.standing.by_epoch(1)

    def step_scheduler(self) -> None:
        """After the optimizer's step of the epoch, which is still with its learning rate."""
        if self.scheduler is not None:
            with self._changing:
                self.scheduler.step()

    def _gradients(self) -> Gradients:
        own = [(state, state.grad) for state in self._place.state_parameters if state.grad is not None]
        pairs = zip(self._place.state_parameters, self._place.model_parameters, strict=True)
        return own or [(state, model.grad) for state, model in pairs if model.grad is not None]

    def _step(
        self, gradients: Gradients | None, trigger: Callable[[], Any] | None, grad_scaler: GradScaler | None
    ) -> None:
        if trigger is not None:
            trigger()
        with self._changing:
            used = self._gradients() if gradients is None else gradients
            with lent([parameter for parameter, _ in used], [gradient for _, gradient in used]):
                if grad_scaler is None:
                    self.optimizer.step()
                else:
                    with grad_scaler.running_global_step():
                        grad_scaler.step(self.optimizer)
            if self._offloaded:
                self.optimizer.zero_grad()

    # averaging

    def average(self, control: StepControl | None = None, **averaging_options: Any) -> RoundResult | None:
        """One round over the whole state, now; None if it failed (logged), and nothing has changed then."""
        self.load(changes=False)
        result = self.average_loaded(control, averaging_options)
        if result is not None:
            self.apply_average()
        return result

    def delay_averaging(self, control: StepControl | None = None, **averaging_options: Any) -> None:
        """The same in the background, with the state of this moment, or after the delayed steps under way."""
        load = partial(self.load, changes=True)
        if self._delayed.are_done:
            load()
        else:
            self._delayed.submit(load)
        self._delayed.submit(partial(self.average_loaded, control, averaging_options))

    # what was delayed

    def wait_for_delayed_updates(self, timeout: float | None = None) -> bool:
        """Waits for the delayed actions; whether they are done after so many seconds."""
        return self._delayed.wait(timeout)

    def apply_delayed_updates(self) -> RoundResult | None:
        """Lets the model have what delayed actions have brought; without effect while one of them is under way.

        Returns the result of a delayed round that succeeded. Raises what a delayed action or its trigger has raised.
        """
        if not self._delayed.are_pending or not self._delayed.are_done:
            return None
        results = [result for result in self._delayed.collect() if result is not None]
        if results:
            self.apply_average()
        else:
            with self._changing:
                self._place.publish()
        return results[-1] if results else None

    # all of it

    def step(  # type: ignore[override]
        self,
        wait_for_delayed_updates: bool | None = None,
        apply_delayed_updates: bool = True,
        increment_epoch: bool = False,
        optimizer_step: bool = False,
        zero_grad: bool = False,
        delay_optimizer_step: bool = False,
        averaging_round: bool = False,
        delay_averaging: bool | None = None,
        averaging_control: StepControl | None = None,
        wait_for_trigger: Callable[[], Any] | None = None,
        grad_scaler: GradScaler | None = None,
        set_to_none: bool = False,
        averaging_opts: Mapping[str, Any] | None = None,
    ) -> RoundResult | None:
        """The chosen actions, in this order; returns the result of a round that was not delayed.

        The scheduler of an epoch that is counted is stepped after the optimizer, and before a round.
        Delayed updates are waited for before anything that changes the state (`wait_for_delayed_updates` None);
        averaging is delayed if the optimizer's step is (`delay_averaging` None). ValueError: they do not go together.
        """
        _refuse(
            {
                "delay_optimizer_step, wait_for_trigger, grad_scaler: only with optimizer_step=True": not optimizer_step
                and (delay_optimizer_step or wait_for_trigger is not None or grad_scaler is not None),
                "delay_averaging, averaging_control, averaging_opts: only with averaging_round=True": (
                    not averaging_round and bool(delay_averaging or averaging_control or averaging_opts)
                ),
                "averaging_opts: the round of averaging_control has its own": bool(
                    averaging_control and averaging_opts
                ),
                "delay_averaging=False: a round cannot come before the delayed step whose outcome it averages": (
                    averaging_round and delay_optimizer_step and delay_averaging is False
                ),
                "grad_scaler: a delayed step takes gradients that were unscaled and checked before": (
                    delay_optimizer_step and grad_scaler is not None
                ),
            }
        )
        changes = optimizer_step or zero_grad or averaging_round
        if changes if wait_for_delayed_updates is None else wait_for_delayed_updates:
            self.wait_for_delayed_updates()
        if apply_delayed_updates:
            self.apply_delayed_updates()
        if increment_epoch:
            self.increment_epoch()
        if optimizer_step and delay_optimizer_step:
            self.delay_step(wait_for_trigger)
        elif optimizer_step:
            self.step_optimizer(wait_for_trigger, grad_scaler)
        if increment_epoch and delay_optimizer_step:
            self.delay_scheduler_step()
        elif increment_epoch:
            self.step_scheduler()
        if zero_grad:
            self.zero_grad(set_to_none)
        if averaging_round and (delay_optimizer_step if delay_averaging is None else delay_averaging):
            self.delay_averaging(averaging_control, **(averaging_opts or {}))
        elif averaging_round:
            return self.average(averaging_control, **(averaging_opts or {}))
        return None

    def load_state_from_peers(self, timeout: float | None = None) -> bool:  # type: ignore[override]
        """Downloads the state of others and goes on from it; False (logged) if nobody gave one that fits.

        Delayed updates of the former state are waited for and dropped. Raises what one of them has raised.
        """
        self._delayed.collect()
        return super().load_state_from_peers(timeout)

    def shutdown(self) -> None:
        super().shutdown()
        self._delayed.close()


def _refuse(reasons: Mapping[str, bool]) -> None:
    for reason, applies in reasons.items():
        if applies:
            raise ValueError(reason)
