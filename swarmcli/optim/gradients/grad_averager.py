"""GradientAverager: accumulates gradients of many batches and averages them with other peers."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import CancelledError
from contextlib import contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from swarmcli.averaging import DecentralizedAverager, RoundResult, StepControl
from swarmcli.errors import AveragingError
from swarmcli.optim.gradients.accumulator import GradientAccumulator, GradientMethod, lent

if TYPE_CHECKING:
    from swarmcli.dht import DHT

logger = logging.getLogger(__name__)


class GradientAverager(DecentralizedAverager):
    """For training loops that decide themselves when to average; with the Optimizer you need none.

        averager.accumulate_grads_(batch_size)          # after each backward pass
        control = averager.schedule_step()              # finds a group while the last batches are computed
        averager.step(control=control)                  # averages, weighted by samples, or by the weights that you gave
        with averager.use_averaged_gradients():
            optimizer.step()

    Peers average with those of the same `prefix` whose parameters have the same shapes. What is averaged lies in
    buffers in host memory beside the accumulators, so a round that fails loses nothing that was accumulated. Use the
    methods from one thread.
    """

    _by_differences = False  # each round has new gradients

    def __init__(
        self,
        parameters: Iterable[torch.nn.Parameter],
        *,
        dht: DHT,
        prefix: str,
        reuse_grad_buffers: bool = False,
        accumulate_grads_on: torch.device | str | None = None,
        client_mode: bool | None = None,
        warn: bool = True,
        averaged_grads: Sequence[torch.Tensor] | None = None,
        start: bool = True,
        **averager_options: Any,
    ) -> None:
        """Skips parameters without `requires_grad`. Raises ValueError and TypeError for arguments that make no sense.

        reuse_grad_buffers   accumulates in the parameters' own `.grad`: no zero_grad between steps, batches of one size
        accumulate_grads_on  device of the sums; None: that of their parameters
        warn                 warns in the log if averages were not used before the next step, or accumulators not reset
        averaged_grads       host tensors for the averages, one for each parameter; None: new ones
        averager_options     of DecentralizedAverager
        """
        trained = [parameter for parameter in parameters if parameter.requires_grad]
        self._gradients = GradientAccumulator(
            trained, reuse=reuse_grad_buffers, device=accumulate_grads_on, means=averaged_grads
        )
        self._method = self._make_method(self._gradients)
        self._program = self._method.program
        self._warn = warn
        self._last: StepControl | None = None  # of a step whose outcome has not been taken in
        self._emptied = False  # that step has emptied the accumulators
        self._unused = False  # there are averages that nobody has used
        self._kept = False  # what is in the accumulators has been in a round already
        super().__init__(
            self._method.tensors, dht, prefix=prefix, client_mode=client_mode, start=start, **averager_options
        )

    @classmethod
    def get_factory(cls, **options: Any) -> Callable[..., GradientAverager]:
        """Returns a function that takes the missing arguments; these options are filled in. For the Optimizer's
        `grad_averager`."""
        return partial(cls, **options)

    @property
    def local_samples_accumulated(self) -> int:
        return self._gradients.samples

    @property
    def local_times_accumulated(self) -> int:
        return self._gradients.times

    def accumulate_grads_(self, batch_size: int, weight: float | None = None) -> None:
        """Adds the parameters' gradients, means over `batch_size` samples, or over what `weight` counts, such as
        tokens. Raises ValueError if they do not fit.

        A batch with a gradient that is not finite is dropped, unless gradients are reused buffers.
        """
        if self._kept and self._warn:
            logger.warning("gradients are added to some that have been averaged already: reset_accumulated_grads_()")
            self._kept = False
        if not self._gradients.add(batch_size, weight=weight) and self._warn:
            logger.warning("%d samples are dropped: their gradients are not finite", batch_size)

    def reset_accumulated_grads_(self) -> None:
        """Drops what was accumulated. A round under way goes on with what it has."""
        self._kept = False
        self._gradients.reset()

    def load_accumulators_into_averager_(self) -> None:
        """Writes the mean over this peer's samples to the buffers of the averages; zeros without samples. Raises
        RuntimeError while a step is under way."""
        with self._at_rest():
            self._gradients.load_means()

    def schedule_step(self, scheduled_time: float | None = None, **step_options: Any) -> StepControl:
        """Begins to find a group, and returns at once. The round waits for `step(control=…)`. `scheduled_time`: swarm
        time before which the group does not begin."""
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
        """Averages what was accumulated.

        weight              of this peer's mean; None: that of the batches in it
        reset_accumulators  True: a step empties the accumulators; if the round fails, they get back what they had
        control             what `schedule_step` has returned; None: this call finds a group
        timeout             seconds for finding a group, for a step without `control`
        wait                True: waits for the outcome, and returns it, or None if the round failed. False: returns the
                            control; the outcome is taken in when the averages are used, or by the next call

        If gradients are not finite, they are dropped, and this peer takes part with weight zero. Raises RuntimeError
        for a control that was used before, and while the last step is under way.
        """
        if control is not None and control.triggered:
            raise RuntimeError("this control has been used for a step already")
        if control is None:
            control = self.schedule_step(timeout=timeout)
        try:
            self._freeze(control, weight, reset_accumulators)
        except Exception:
            control.cancel()
            raise
        control.allow_allreduce()
        if not wait:
            return control
        try:
            return self._wait_for(control)
        except AveragingError:
            return None  # the averager has emitted the reason
        finally:
            control.cancel()  # without effect unless the waiting was interrupted
            self._take_in_outcome()

    @contextmanager
    def use_averaged_gradients(self) -> Iterator[None]:
        """Inside the block the parameters have the averaged gradients; afterwards they have the user's again.

        Waits for the end of a step under way. If that fails, they are what the buffers hold: this peer's own means.
        """
        self._take_in_outcome()
        self.notify_used_averaged_gradients()
        with self.get_tensors(), lent(self._gradients.parameters, self._method.averaged):
            yield

    def notify_used_averaged_gradients(self) -> None:
        """Call it if you have used the averages in another way than by `use_averaged_gradients`."""
        self._unused = False

    # Inside

    def _make_method(self, accumulator: GradientAccumulator) -> GradientMethod:
        return GradientMethod(accumulator.means)

    def _wait_for(self, control: StepControl) -> RoundResult | None:
        """Waits for the round's result. None: waiting longer makes no sense."""
        return control.result()

    def _freeze(self, control: StepControl, weight: float | None, empty: bool) -> None:
        with self._at_rest():
            if self._unused and self._warn:
                logger.warning("a new step begins, and the averages of the last one have not been used")
            self._unused = False
            if empty:
                own = self._gradients.freeze().weight
            else:
                own = self._gradients.weight if self._gradients.load_means() else 0.0
            control.weight = own if weight is None or not own else weight
            self._method.load(control.weight)
            self._last, self._emptied = control, empty

    @contextmanager
    def _at_rest(self) -> Iterator[None]:
        """Exclusive use of the buffers, with the outcome of the last step taken in."""
        if self._last is not None and not self._last.done():
            raise RuntimeError("the last step has not ended: wait for its control, or cancel it")
        self._take_in_outcome()
        with self.get_tensors():
            yield

    def _take_in_outcome(self) -> None:
        """Takes in the outcome of the last step, once; waits for its end."""
        if self._last is None:
            return
        result: RoundResult | None = None
        with suppress(AveragingError, CancelledError):  # a round that failed or was cancelled
            result = self._last.result()
        with self.get_tensors():
            self._last = None
            if result is None or not result.total_weight:
                self._gradients.restore()
                return
            self._method.finish(result.total_weight, self.peer_id in result.contributors)
            self._gradients.settle()
            self._committed(result)
            self._unused, self._kept = True, not self._emptied

    def _committed(self, result: RoundResult) -> None:
        """Called, while the tensors are held, after a committed round was taken in."""
