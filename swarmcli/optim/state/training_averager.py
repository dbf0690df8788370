"""TrainingAverager: parameters, gradients or statistics of a plain optimizer that the user steps himself."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, Literal, overload

import torch

from swarmcli.averaging import RoundResult
from swarmcli.optim.state.optimizer_averager import OptimizerAverager
from swarmcli.optim.state.residence import InPlace
from swarmcli.optim.state.slots import Slot, extra_slots, gradient_slots, parameter_slots, statistic_slots
from swarmcli.optim.state.training_state import TrainingState

if TYPE_CHECKING:
    from swarmcli.dht import DHT


class TrainingAverager(OptimizerAverager):
    """Call `step` whenever what was chosen is to be averaged; the optimizer is stepped by the user, as ever.

        averager = TrainingAverager(optimizer, average_parameters=True, average_gradients=False, dht=dht, prefix="run")
        optimizer.step()
        averager.step(timeout=30)

    Tensors move by the delta rule: by what the average differs from them as they were when the round began. A round
    that fails changes nothing. A gradient or a statistic that is not there counts as zero, and stays so.
    """

    def __init__(
        self,
        opt: torch.optim.Optimizer,
        *,
        average_parameters: bool,
        average_gradients: bool,
        average_opt_statistics: Sequence[str] = (),
        extra_tensors: Sequence[torch.Tensor] = (),
        dht: DHT,
        prefix: str,
        start: bool = True,
        **averager_options: Any,
    ) -> None:
        """`average_opt_statistics`: by name, those with the shape of their parameter. ValueError: there is nothing to
        average; OptimizerError: statistics that the optimizer does not keep."""
        if not isinstance(opt, torch.optim.Optimizer):
            raise TypeError(f"opt: expected a torch optimizer, got {type(opt).__name__}")
        self.opt = opt
        state = TrainingState(prefix, opt, extra_tensors=extra_tensors)
        slots: list[Slot] = [*parameter_slots(state.parameters)] if average_parameters else []
        slots += gradient_slots(state.parameters) if average_gradients else []
        slots += statistic_slots(state.parameters, opt, average_opt_statistics)
        slots += extra_slots(extra_tensors)
        if not slots:
            raise ValueError("average_parameters, average_gradients, average_opt_statistics: nothing is to be averaged")
        self._steps = ThreadPoolExecutor(1, thread_name_prefix="swarm-training-averager")
        super().__init__(
            state, InPlace(state.parameters), slots, dht=dht, prefix=prefix, start=start, **averager_options
        )

    @overload  # type: ignore[override]
    def step(
        self, data_lock: AbstractContextManager[Any] | None = None, wait: Literal[True] = True, **averaging_options: Any
    ) -> RoundResult | None: ...
    @overload
    def step(
        self, data_lock: AbstractContextManager[Any] | None = None, *, wait: Literal[False], **averaging_options: Any
    ) -> Future[RoundResult | None]: ...
    def step(
        self, data_lock: AbstractContextManager[Any] | None = None, wait: bool = True, **averaging_options: Any
    ) -> RoundResult | Future[RoundResult | None] | None:
        """One round; None if it failed (logged). `averaging_options` are those of DecentralizedAverager.step.

        With `wait=False` it goes on in the background, one round after the other, and a future is returned; training
        may go on. `data_lock` is held while tensors are read and, at the end, changed: whoever trains meanwhile holds
        it while he uses them.
        """
        future = self._steps.submit(self._round, data_lock or nullcontext(), averaging_options)
        return future.result() if wait else future

    def _round(self, data_lock: AbstractContextManager[Any], options: dict[str, Any]) -> RoundResult | None:
        with data_lock:
            self.load(changes=True)
        result = self.average_loaded(None, options)
        if result is not None:
            with data_lock:
                self.apply_average()
        return result

    def shutdown(self) -> None:
        super().shutdown()
        self._steps.shutdown(cancel_futures=True)
