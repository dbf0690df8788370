"""GradientAverager: accumulates gradients of many batches and averages them with other peers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from swarmcli.averaging import DecentralizedAverager, RoundResult, StepControl
from swarmcli.errors import AveragingError
from swarmcli.optim.gradients.accumulator import GradientAccumulator
from swarmcli.optim.gradients.method import MethodFactory
from swarmcli.optim.gradients.plain import Plain
from swarmcli.optim.state.training_state import lent

if TYPE_CHECKING:
    from swarmcli.dht import DHT


class GradientAverager(DecentralizedAverager):
    """For training loops that decide themselves when to average; the Optimizer does all of this by itself.

        averager.accumulate_grads_(batch_size)          # after each backward pass
        control = averager.schedule_step()              # finds a group while the last batches are computed
        averager.step(control=control)                  # averages, weighted by samples
        with averager.use_averaged_gradients():
            optimizer.step()

    Peers average with those of the same `prefix` whose parameters have the same shapes. The tensors that are averaged
    are buffers in host memory beside the accumulators, so a round that fails costs nothing that was accumulated.
    """

    def __init__(
        self,
        parameters: Iterable[torch.nn.Parameter],
        *,
        dht: DHT,
        prefix: str,
        start: bool = True,
        **averager_options: Any,
    ) -> None:
        self._gradients = GradientAccumulator([p for p in parameters if p.requires_grad])
        super().__init__(self._gradients.means, dht, prefix=prefix, start=start, **averager_options)

    @classmethod
    def get_factory(cls, **options: Any) -> Callable[..., GradientAverager]:
        """A function of what is still missing, with these options filled in."""
        return partial(cls, **options)

    @property
    def local_samples_accumulated(self) -> int:
        return self._gradients.samples

    @property
    def local_times_accumulated(self) -> int:
        return self._gradients.times

    def accumulate_grads_(self, batch_size: int) -> None:
        """Adds the parameters' gradients, each the mean over `batch_size` samples. ValueError: they do not fit."""
        self._gradients.add(batch_size)

    def reset_accumulated_grads_(self) -> None:
        self._gradients.reset()

    def load_accumulators_into_averager_(self) -> None:
        """Writes the mean over this peer's samples into the buffers that are averaged; zeros without samples."""
        with self.get_tensors():
            self._gradients.load_means()

    def schedule_step(self, scheduled_time: float | None = None, **step_options: Any) -> StepControl:
        """Begins to find a group. The round waits for `step(control=…)`; `scheduled_time` is swarm time."""
        return DecentralizedAverager.step(
            self, scheduled_time=scheduled_time, require_trigger=True, wait=False, **step_options
        )

    def step(  # type: ignore[override]
        self,
        weight: float | None = None,
        reset_accumulators: bool = True,
        control: StepControl | None = None,
        timeout: float | None = None,
        wait: bool = True,
    ) -> RoundResult | StepControl | None:
        """Averages what was accumulated; `weight` is the number of samples unless given.

        Waits for the outcome and returns it, None if the round failed; the accumulators are reset only if it did not.
        With `wait=False` they are reset at once, since the buffers hold their content, and the control is returned.
        `timeout` bounds finding a group, in seconds, and is for a step without `control`.
        """
        if control is None:
            control = self.schedule_step(timeout=timeout)
        elif control.triggered:
            raise RuntimeError("this control has been used for a step already")
        self.load_accumulators_into_averager_()
        control.weight = float(self.local_samples_accumulated) if weight is None else weight
        control.allow_allreduce()
        if not wait:
            if reset_accumulators:
                self.reset_accumulated_grads_()
            return control
        try:
            result = control.result()
        except AveragingError:
            return None  # the averager has emitted the reason
        finally:
            control.cancel()  # without effect unless the waiting was interrupted
        if reset_accumulators:
            self.reset_accumulated_grads_()
        return result

    @contextmanager
    def use_averaged_gradients(self) -> Iterator[None]:
        """Inside the block the parameters' gradients are the averaged ones; afterwards the user's own are back."""
        with self.get_tensors(), lent(self._gradients.parameters, self._gradients.means):
            yield


def gradient_method_of(factory: Callable[..., Any]) -> MethodFactory:
    """The method of averaging that an averager class, or what its `get_factory` returned, stands for."""
    if factory is GradientAverager:
        return Plain()
    raise TypeError(f"grad_averager: expected GradientAverager or one of its kind, got {factory!r}")
