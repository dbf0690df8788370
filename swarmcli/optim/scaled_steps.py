"""What an Optimizer and its GradScaler tell each other."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import torch

from swarmcli.errors import GradScalerError
from swarmcli.optim.grad_scaler import GradScaler
from swarmcli.optim.optimizer_core import OptimizerCore


class ScaledSteps:
    """The steps of one core whose gradients may be of scaled losses. See grad_scaler.ScaledIntake."""

    def __init__(
        self,
        core: OptimizerCore,
        parameters: Sequence[torch.Tensor],
        run: Callable[[Coroutine[Any, Any, bool]], bool],
        *,
        gradients_are_sums: bool,
    ) -> None:
        """`parameters` are the model's; `run` waits for a coroutine of the core."""
        self.gradients_are_sums = gradients_are_sums
        self._core = core
        self._parameters = parameters
        self._run = run
        self._told: tuple[int, int] | None = None  # overflows and global steps that a scaler knows of

    def step(self, samples: int, scaler: GradScaler | None) -> None:
        """One step of the core. GradScalerError: the gradients come without the scaler that there was so far."""
        core = self._core
        if scaler is not None and scaler.is_enabled():
            scale = scaler.scale_of(self)
            # Kept, so that what happens in a call that is interrupted is told after the next one.
            overflows, steps = self._told = self._told or (core.overflows, core.global_steps)
            self._run(core.step(samples, scale))
            self._told = core.overflows, core.global_steps
            scaler.note_step(self, overflow=core.overflows > overflows, global_step=core.global_steps > steps)
        elif self._told is not None and samples:
            raise GradScalerError("step: the gradients were scaled so far; call grad_scaler.step(optimizer)")
        else:
            self._run(core.step(samples))

    def batch_gradients(self) -> list[torch.Tensor]:
        """Those that the last backward pass wrote; with reused buffers the sums that it added to."""
        return [parameter.grad for parameter in self._parameters if parameter.grad is not None]

    @property
    def holds_scaled_sums(self) -> bool:
        """Whether reused buffers hold gradients at the scaler's present scale."""
        return self.gradients_are_sums and self._core.samples > 0
