"""The training loop: computes micro-batches until told to stop. The optimizer decides when the swarm averages."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn

from swarmcli.errors import TrainingError
from swarmcli.events import Evaluated
from swarmcli.optim.gradients.accumulator import Weighed
from swarmcli.training.device import Compute, LossScaler
from swarmcli.training.stream import RememberedStream
from swarmcli.training.task import Batch, MeasuredTask, Task, samples_in, weight_of
from swarmcli.words import first_words

logger = logging.getLogger(__name__)

StopReason = Literal["stopped", "max_epochs", "data ended"]
LOOK_SECONDS = 0.1  # seconds: while the loop rests, it checks this often whether something is wanted of it
# Steps in a row without a finite loss and gradients. After so many the model itself is broken, and no batch will help;
# in float16 the scale has come from 65536 down to 1/16.
MOST_BAD_STEPS = 20
# seconds of computing at most that earlier waiting may make up for; more would end in a burst of computing
CREDIT = 0.5


class CollaborativeOptimizer(Protocol):
    """What the loop calls of the optimizer: see swarmcli.Optimizer."""

    @property
    def local_epoch(self) -> int: ...
    def step(self, *, batch_size: int, weight: float | None = None) -> Any: ...
    @property
    def is_averaging(self) -> bool: ...


@dataclass(frozen=True)
class LoopResult:
    reason: StopReason
    epoch: int  # reached at the end
    samples: int  # computed by this peer, in steps that counted
    loss: float | None  # of the last epoch with samples


@dataclass(frozen=True)
class LoopSettings:
    """Options of one peer's loop."""

    stream_seed: int  # seeds the data (see `stream_seed`) and, with the number of starts, dropout
    accumulation_steps: int = 1  # forward passes per step of the optimizer
    stream_file: Path | None = None  # remembers where the stream is; see RememberedStream
    compile: bool = False  # the model, for this machine
    batches_ahead: int = 2  # batches that are made while the device computes; 0: each is made when it is wanted


class ComputePace:
    """Tells the loop how long to rest between two batches so that computing takes a share of the time.

    Time in which the loop waits for others counts as rest. Any thread may change `share`; all else belongs to the
    loop's thread.
    """

    def __init__(
        self,
        share: float = 1.0,
        *,
        interrupted: Callable[[], bool] = lambda: False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`share`: above 0, 1 is all of the time. `interrupted`: whether there is something better to do than to rest,
        such as to pause."""
        self.share = share
        self.interrupted = interrupted
        self._clock = clock
        self._unrested = 0.0  # seconds of computing that no rest has made up for yet; below 0, credit
        self._since = clock()

    def begin(self) -> None:
        """A batch begins."""
        self._rested()

    def end(self) -> None:
        """The batch has been computed."""
        now = self._clock()
        self._unrested += now - self._since
        self._since = now

    @property
    def owed(self) -> float:
        """Seconds to rest now; 0: the next batch may begin. To be called between two batches."""
        self._rested()
        return max(0.0, self._unrested) * (1 - self.share) / self.share

    def _rested(self) -> None:
        now, share = self._clock(), self.share
        if share >= 1:
            self._unrested = 0.0
        else:
            worth = share / (1 - share)  # seconds of computing that a second of rest makes up for
            least = -CREDIT * min(1.0, worth)
            self._unrested = max(least, self._unrested - (now - self._since) * worth)
        self._since = now


class MeanLoss:
    """A weighted mean."""

    def __init__(self) -> None:
        self._weight = self._sum = 0.0

    def add(self, loss: float, weight: float) -> None:
        self._sum += loss * weight
        self._weight += weight

    @property
    def value(self) -> float | None:
        return self._sum / self._weight if self._weight else None


@torch.no_grad()
def evaluate(
    task: Task,
    model: nn.Module,
    batches: Iterable[Batch],
    compute: Compute,
    stopped: Callable[[], bool],
    epoch: int = 0,
) -> Evaluated | None:
    """Evaluates the model of an epoch on data that nobody trains on. Returns None if `stopped`, which is asked before
    each batch, says so, or if no batch weighs anything.

    The model is moved to the device of `compute`, and is in the mode for inference while this runs. Raises
    torch.OutOfMemoryError, and what the task raises.
    """
    was_training, mean, samples = model.training, MeanLoss(), 0
    metrics = task.metrics() if isinstance(task, MeasuredTask) else {}
    for each in metrics.values():
        each.to(compute.device)
    model.to(compute.device).eval()
    try:
        for batch in batches:
            if stopped():
                return None
            samples += samples_in(batch)
            if not (weight := weight_of(task, batch)):
                continue
            placed = compute.place(batch)
            with compute.autocast():
                if isinstance(task, MeasuredTask):
                    loss = task.measure(model, placed, metrics)
                else:
                    loss = task.loss(model, placed)
            mean.add(loss.item(), weight)
    finally:
        model.train(was_training)
    if mean.value is None:
        return None
    values = {name: float(each.compute()) for name, each in metrics.items() if each.update_called}
    finite = {name: value for name, value in values.items() if math.isfinite(value)}
    return Evaluated(epoch, mean.value, samples, finite)


class TrainingLoop:
    """Computes micro-batches and hands their gradients to a collaborative optimizer.

    In the loop's thread, `on_loss(loss, weight)` is called before the optimizer takes a step's gradients (so that the
    loss counts for the epoch in which it was computed), and `on_step` after it has. Errors of task and optimizer go to
    the caller of `run`.
    """

    def __init__(
        self,
        task: Task,
        model: nn.Module,
        optimizer: CollaborativeOptimizer,
        settings: LoopSettings,
        *,
        compute: Compute | None = None,
        pace: ComputePace | None = None,
        on_loss: Callable[[float, float], object] = lambda loss, weight: None,
        on_step: Callable[[], object] = lambda: None,
        rest: Callable[[], bool] = lambda: False,
        last_epoch: Callable[[], int | None] = lambda: None,
    ) -> None:
        """`rest()` is called before each batch, and returns when the next one may be computed; True: it has waited for
        that. `last_epoch()`: the epoch after which the run ends, as far as is known; None: the loop trains until
        stopped."""
        self._task = task
        self._model = model
        self._optimizer = optimizer
        self._settings = settings
        self._compute = compute or Compute(torch.device("cpu"))
        self._pace = pace or ComputePace()
        self._on_loss = on_loss
        self._on_step = on_step
        self._wait_to_go_on = rest
        self._last_epoch = last_epoch
        self._samples = 0
        self._last_loss: float | None = None
        self._bad_steps = 0
        self._scaler = LossScaler() if self._compute.autocast_dtype is torch.float16 else None
        self._compiled: nn.Module | None = torch.compile(model) if settings.compile else None  # type: ignore[assignment]

    def run(self, stop: threading.Event) -> LoopResult:
        """Trains until `stop` is set (the step in progress is finished), the last epoch is reached or the data ends.

        Raises TrainingError when losses or gradients are not finite for many steps in a row, and what task and
        optimizer raise.
        """
        settings = self._settings
        batches = RememberedStream(self._task, settings.stream_seed, settings.stream_file, settings.batches_ahead)
        torch.manual_seed(batches.dropout_seed)
        self._model.zero_grad()
        try:
            return self._train(batches, stop)
        finally:
            batches.close()

    def _train(self, batches: RememberedStream, stop: threading.Event) -> LoopResult:
        epoch, mean = self._optimizer.local_epoch, MeanLoss()
        while (reason := self._reason_to_end(stop)) is None:
            if self._wait_to_go_on():
                continue  # the run may have ended meanwhile, or the peer is to stop
            computed = self._step(batches)
            if computed is None:
                reason = "data ended"
                break
            if computed:
                mean.add(*computed)
                self._last_loss = mean.value
            self._rest(stop)
            if self._optimizer.local_epoch != epoch:
                batches.remember()
                epoch, mean = self._optimizer.local_epoch, MeanLoss()
        return LoopResult(reason, self._optimizer.local_epoch, self._samples, self._last_loss)

    def _reason_to_end(self, stop: threading.Event) -> StopReason | None:
        limit = self._last_epoch()
        if limit is not None and self._optimizer.local_epoch >= limit:
            return "max_epochs"
        return "stopped" if stop.is_set() else None

    def _rest(self, stop: threading.Event) -> None:
        """Computes nothing for as long as the pace asks. If the epoch ends meanwhile, this peer takes part at once: the
        others wait for it."""
        while (owed := self._pace.owed) > 0 and not (stop.is_set() or self._pace.interrupted()):
            if self._optimizer.is_averaging:
                self._optimizer.step(batch_size=0)
            else:
                stop.wait(min(owed, LOOK_SECONDS))

    def _step(self, batches: RememberedStream) -> tuple[float, float] | tuple[()] | None:
        """Makes one step of the optimizer, and returns its mean loss and weight; () if the step is dropped, since its
        loss or gradients are not finite: averaged, they would spoil everyone's. None: the data ended before the step
        was full."""
        accumulated = self._accumulate(batches)
        if accumulated is None:
            return None
        loss, batch = accumulated
        sound = math.isfinite(loss)
        if not (sound and (self._scaler is None or self._scaler.unscale(self._model.parameters()))):
            self._give_up_step("gradients" if sound else "loss")
            return ()
        self._bad_steps = 0
        self._on_loss(loss, batch.weight)
        self._optimizer.step(batch_size=batch.samples, weight=batch.weight)
        self._model.zero_grad()  # sets them to None: the next backward pass writes them and need not add
        self._samples += batch.samples
        self._on_step()
        return loss, batch.weight

    def _accumulate(self, batches: RememberedStream) -> tuple[float, Weighed] | None:
        """Accumulates the gradients of the mean loss over `accumulation_steps` micro-batches, weighted. Returns that
        loss, and the samples and weight behind it. A micro-batch whose loss is not finite is dropped alone; if none is
        left, the loss is not finite either. None: the data ended."""
        summed, total, unit, bad = 0.0, Weighed(), 0.0, math.nan
        for number in range(self._settings.accumulation_steps):
            if number:
                self._rest_between()
            batch = batches.next()
            if batch is None:
                return None
            own = Weighed.of(samples_in(batch), weight_of(self._task, batch))
            if own.weight:
                self._pace.begin()
                placed = self._compute.place(batch)
                with self._compute.autocast():
                    loss = self._loss(placed)
                # Read before the backward pass: a micro-batch's gradients cannot be taken out of the sum again.
                if sound := math.isfinite(value := loss.item()):
                    scale = self._scaler.scale if self._scaler is not None else 1.0
                    unit = unit or own.weight * self._settings.accumulation_steps  # the total, if all weigh the same
                    (loss * (scale * own.weight / unit)).backward()
                    summed += value * own.weight
                if self._pace.share < 1:
                    self._compute.wait()
                self._pace.end()
                if not sound:
                    bad = value
                    logger.warning("the loss of a micro-batch of %d samples is %s; it is dropped", own.samples, value)
                    continue
            total += own
        if not total.samples:
            return bad, total
        if unit and unit != total.weight:
            gradients = [parameter.grad for parameter in self._model.parameters() if parameter.grad is not None]
            torch._foreach_mul_(gradients, unit / total.weight)
        return summed / (total.weight or 1.0), total

    def _loss(self, batch: Batch) -> Tensor:
        if self._compiled is not None:
            try:
                return self._task.loss(self._compiled, batch)
            except Exception as error:  # what torch does not compile it refuses in many ways
                self._compiled = None
                logger.warning("torch.compile cannot compile this model (%s); it trains without", first_words(error))
        return self._task.loss(self._model, batch)

    def _rest_between(self) -> None:
        """Rests within a step. A step's gradients belong to the parameters as they are, so this peer takes part in a
        round only after the step: if others wait for it, it goes on without a rest."""
        while (owed := self._pace.owed) > 0 and not (self._optimizer.is_averaging or self._pace.interrupted()):
            time.sleep(min(owed, LOOK_SECONDS))

    def _give_up_step(self, what: str) -> None:
        """Drops a step. `what` is not finite: the loss, or the gradients, which in float16 a smaller scale of the loss
        may help."""
        self._bad_steps += 1
        self._model.zero_grad()
        if self._bad_steps >= MOST_BAD_STEPS:
            scaled = f" (float16, with the loss scaled by {self._scaler.scale:g} at last)" if self._scaler else ""
            raise TrainingError(
                f"the {what} held no numbers in {self._bad_steps} steps in a row{scaled}; lower "
                "optimizer.learning_rate, set optimizer.max_grad_norm, or look for broken data"
            )
