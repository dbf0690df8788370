"""GradScaler: loss scaling for float16 gradients where one global step is made of many local ones."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn, Protocol, runtime_checkable

import torch

from swarmcli.errors import GradScalerError, OptimizerError
from swarmcli.optim.gradients.accumulator import Weighed, all_finite

if TYPE_CHECKING:
    from swarmcli.optim.core import OptimizerCore


class ScaledSteps:
    """Steps one core with gradients that may be of scaled losses; between its Optimizer and a GradScaler."""

    def __init__(
        self,
        core: OptimizerCore,
        parameters: Sequence[torch.Tensor],
        run: Callable[[Callable[[OptimizerCore], Awaitable[bool]]], bool],
        *,
        gradients_are_sums: bool,
    ) -> None:
        """`parameters`: the model's. `run` calls an action with the core and waits for its result.
        `gradients_are_sums`: the gradients are reused as buffers."""
        self.gradients_are_sums = gradients_are_sums
        self._core = core
        self._parameters = parameters
        self._run = run
        self.begun = False  # gradients have come with a scaler, so none may come without
        self._told = (0, 0)  # overflows and global steps that a scaler has been told of

    def step(self, batch: Weighed, scaler: GradScaler | None) -> None:
        """One step of the core. Raises GradScalerError if there was a scaler so far, and now there is none."""
        core = self._core
        if scaler is not None and scaler.is_enabled():
            scale = scaler.scale_of(self)
            if not self.begun:
                self.begun, self._told = True, (core.work.given_up.count, core.global_steps)
            # Counted from what was told last: so what happens in an interrupted call is told after the next one.
            overflows, steps = self._told
            self._run(lambda core: core.step(batch.samples, scale, batch.weight))
            # Read once: a delayed global step may end at any moment, even right after another.
            self._told = core.work.given_up.count, core.global_steps
            scaler.note_step(self, overflow=self._told[0] > overflows, global_steps=self._told[1] - steps)
        elif self.begun and batch.samples:
            raise GradScalerError("step: the gradients were scaled so far; call grad_scaler.step(optimizer)")
        else:
            self._run(lambda core: core.step(batch.samples, weight=batch.weight))

    def batch_gradients(self) -> list[torch.Tensor]:
        """The gradients that the last backward pass wrote; with reused buffers the sums to which it added them."""
        return [parameter.grad for parameter in self._parameters if parameter.grad is not None]

    @property
    def holds_scaled_sums(self) -> bool:
        """Whether reused buffers hold gradients at the scaler's present scale."""
        return self.gradients_are_sums and self._core.work.samples > 0


@runtime_checkable
class TakesScaledGradients(Protocol):
    """The collaborative Optimizer, as its scaler sees it. An auxiliary takes none."""

    scaled_steps: ScaledSteps | None

    def step(self, closure: Any = None, batch_size: int | None = None, grad_scaler: Any = None) -> Any: ...


@dataclass(slots=True)
class _Since:
    """What has happened in one Optimizer's local steps since the last update."""

    intake: ScaledSteps
    steps: int = 0
    unscaled: bool = False  # the user has unscaled the gradients of the batch that comes next
    overflow: bool = False
    global_steps: int = 0

    @property
    def may_update(self) -> bool:
        return (self.overflow or self.global_steps > 0) and not self.intake.holds_scaled_sums


class GradScaler(torch.amp.GradScaler):
    """torch's GradScaler for the collaborative Optimizer, and still torch's for any other.

        scaler.scale(loss).backward()
        scaler.step(optimizer)        # a local step: optimizer.step(grad_scaler=scaler)
        scaler.update()               # changes the scale only after a global step, or if gradients overflowed

    Each peer has a scale of its own: what they average has been unscaled. If a batch's gradients are not finite, this
    peer alone drops what it has accumulated in the epoch, and `update` lowers its scale at once. `growth_interval`
    counts global steps. Gradients are unscaled once: when they are added to separate sums, or, in reused buffers, when
    the epoch ends; the scale does not change while reused buffers hold gradients.

    Calls in an order that would step with wrongly scaled gradients raise GradScalerError.
    """

    def __init__(
        self,
        device: str = "cuda",
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
    ) -> None:
        super().__init__(device, init_scale, growth_factor, backoff_factor, growth_interval, enabled)
        self._in_global_step = False
        self._since: dict[int, _Since] = {}  # id of an intake → its steps since the last update

    # the calls that torch's scaler has

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Divides the gradients by the scale, so that you can clip or look at them before `step`; once for each batch.

        For the collaborative Optimizer it takes the gradients of one batch. Raises GradScalerError if they have been
        unscaled, lie in reused buffers (which hold those of other batches too), or are float16 (small ones would
        vanish; the Optimizer's own sums are float32).
        """
        if not (self.is_enabled() and isinstance(optimizer, TakesScaledGradients)):
            return super().unscale_(optimizer)
        intake = _intake_of(optimizer)
        scale = self.scale_of(intake)
        if self._of(intake).unscaled:
            raise GradScalerError("unscale_() was called twice for one batch; its gradients are unscaled already")
        if intake.gradients_are_sums:
            raise GradScalerError(
                "unscale_(): reused gradient buffers hold an epoch's batches and are unscaled at its end"
            )
        gradients = intake.batch_gradients()
        if any(gradient.dtype == torch.float16 for gradient in gradients):
            raise GradScalerError("unscale_(): small float16 gradients would vanish; step() unscales them in float32")
        with torch.no_grad():
            for gradient in gradients:
                gradient.div_(scale)
        self._of(intake).unscaled = True

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        """A local step of the collaborative Optimizer, which takes in the scaled gradients; for others as in torch.

        `kwargs` go to `optimizer.step`. Raises GradScalerError for a closure, whose gradients would come after the
        check.
        """
        if not (self.is_enabled() and isinstance(optimizer, TakesScaledGradients)):
            return super().step(optimizer, *args, **kwargs)
        if args or kwargs.get("closure") is not None:
            raise GradScalerError("step(): no closure with a scaler; call scaler.scale(loss).backward() before")
        return optimizer.step(grad_scaler=self, **kwargs)

    def update(self, new_scale: float | torch.Tensor | None = None) -> None:
        """Lowers the scale after an overflow, raises it after `growth_interval` global steps without one.

        After a local step that ended no epoch it changes nothing. Raises GradScalerError if no step was taken since the
        last update, if a global step is running, and for a `new_scale` while reused buffers hold gradients.
        """
        if not self.is_enabled():
            return
        if self._in_global_step:
            raise GradScalerError("update() belongs after the block of running_global_step(), not into it")
        if new_scale is not None:
            if any(since.intake.holds_scaled_sums for since in self._since.values()):
                raise GradScalerError(
                    "update(new_scale): reused gradient buffers hold gradients at the present scale; "
                    "set another one right after a global step"
                )
            super().update(new_scale)
            self._since.clear()
            return
        stepped = any(since.steps for since in self._since.values())
        while self._report_found() or not stepped:  # once for each global step of the Optimizer that had the most
            try:
                super().update()
            except AssertionError as error:  # as torch says it
                raise GradScalerError(f"update() without a step before it: {error}") from error
            stepped = True
        for since in self._since.values():
            since.steps = 0

    # what it knows beyond torch's

    def are_grads_finite(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether all gradients with which `optimizer` would step, or which it would take in, are finite."""
        if isinstance(optimizer, TakesScaledGradients):
            return all_finite(_intake_of(optimizer).batch_gradients())
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        return all_finite(parameter.grad for parameter in parameters if parameter.grad is not None)

    @contextmanager
    def running_global_step(self) -> Iterator[None]:
        """For loops that average gradients themselves: inside the block `step(inner_optimizer)` uses the swarm's
        average.

        with averager.use_averaged_gradients(), scaler.running_global_step():
            scaler.step(inner_optimizer)
        scaler.update()

        Inside it float16 averages may be unscaled as they are. Blocks do not nest, and the collaborative Optimizer,
        which takes its global steps by itself, cannot step inside. Raises GradScalerError for either.
        """
        if self._in_global_step:
            raise GradScalerError("running_global_step(): a global step is running already")
        self._in_global_step = True
        try:
            yield
        finally:
            self._in_global_step = False

    # for the Optimizer

    def scale_of(self, intake: ScaledSteps) -> float:
        """Returns the factor of the gradients of the batch that comes next. Raises GradScalerError inside a global
        step, and if nothing was ever scaled."""
        if not self.is_enabled():
            return 1.0
        if self._in_global_step:
            raise GradScalerError("the collaborative Optimizer takes its global steps by itself: step it outside")
        if self._scale is None:
            raise GradScalerError("nothing was scaled: call scaler.scale(loss).backward() before step()")
        return 1.0 if self._of(intake).unscaled else self.get_scale()

    def note_step(self, intake: ScaledSteps, *, overflow: bool, global_steps: int) -> None:
        """A local step is over: it may have dropped gradients that overflowed, and has ended `global_steps` epochs."""
        since = self._of(intake)
        since.steps += 1
        since.unscaled = False
        since.overflow |= overflow
        since.global_steps += global_steps

    def _of(self, intake: ScaledSteps) -> _Since:
        return self._since.setdefault(id(intake), _Since(intake))

    def _report_found(self) -> bool:
        """Hands an overflow or one global step of each Optimizer that has any to torch's arithmetic. Returns whether
        there was one."""
        ended = [(key, since) for key, since in self._since.items() if since.may_update]
        for key, since in ended:
            found = torch.full((), float(since.overflow), dtype=torch.float32, device=self._device)
            self._per_optimizer_states[key]["found_inf_per_device"] = {found.device: found}
            since.global_steps = 0 if since.overflow else since.global_steps - 1
            since.overflow = False
        return bool(ended) or any(state["found_inf_per_device"] for state in self._per_optimizer_states.values())

    def _unscale_grads_(
        self,
        optimizer: torch.optim.Optimizer,
        inv_scale: torch.Tensor,
        found_inf: torch.Tensor,
        allow_fp16: bool,
    ) -> dict[torch.device, torch.Tensor]:
        return super()._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16 or self._in_global_step)

    def __getstate__(self) -> dict[str, Any]:
        if self._in_global_step:
            raise GradScalerError("a scaler cannot be copied or pickled inside a global step")
        return {**super().__getstate__(), "_since": {}}


def _intake_of(optimizer: TakesScaledGradients) -> ScaledSteps:
    if optimizer.scaled_steps is None:
        raise GradScalerError("an auxiliary computes no gradients")
    return optimizer.scaled_steps


def check_grad_scaler(grad_scaler: object) -> None:
    """Raises OptimizerError for torch's plain scaler, which takes each local step for a global one; TypeError for
    anything else that is no GradScaler."""
    if grad_scaler is None or isinstance(grad_scaler, GradScaler):
        return
    if isinstance(grad_scaler, torch.amp.GradScaler):
        refuse_plain_scaler()
    raise TypeError(f"grad_scaler: expected a swarmcli.GradScaler, got {type(grad_scaler).__name__}")


def refuse_plain_scaler(*_: object) -> NoReturn:
    raise OptimizerError(
        "grad_scaler: torch's own takes every local step for a global one; use swarmcli.GradScaler in its place, or "
        "bfloat16 where a framework (fp16=True, mixed_precision='fp16', precision='16-mixed') makes the scaler itself"
    )
