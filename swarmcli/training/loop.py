"""The training loop: micro-batches until told to stop. When the swarm averages is the optimizer's affair."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
from torch import nn

from swarmcli.errors import TrainingError
from swarmcli.training.device import Compute
from swarmcli.training.stream import RememberedStream
from swarmcli.training.task import Task, samples_in

logger = logging.getLogger(__name__)

MAX_BAD_STEPS = 20  # in a row; then the model itself is broken and no batch will help

StopReason = Literal["stopped", "max_epochs", "data ended"]


class CollaborativeOptimizer(Protocol):
    """What the loop asks of the optimizer: see swarmcli.Optimizer."""

    @property
    def local_epoch(self) -> int: ...
    def step(self, *, batch_size: int) -> Any: ...
    def zero_grad(self) -> Any: ...


@dataclass(frozen=True)
class StepReport:
    """One step of this peer: its forward and backward passes and the optimizer's share."""

    epoch: int  # in which the samples were computed
    samples: int
    loss: float  # mean over the samples
    seconds: float  # computing
    waiting_seconds: float  # in the optimizer: averaging, stepping, downloading


@dataclass(frozen=True)
class EpochReport:
    """An epoch that ended, as this peer saw it."""

    epoch: int
    samples: int  # this peer's
    loss: float | None  # mean over them; None without any
    seconds: float


@dataclass(frozen=True)
class LoopResult:
    reason: StopReason
    epoch: int  # reached at the end
    samples: int  # computed by this peer, in steps that counted
    loss: float | None  # of the last epoch with samples


@dataclass(frozen=True)
class LoopSettings:
    """What one peer's loop goes by."""

    stream_seed: int  # of the data (see `stream_seed`) and, with the number of starts, of dropout
    accumulation_steps: int = 1  # forward passes per step of the optimizer
    max_epochs: int | None = None  # None: until stopped
    stream_file: Path | None = None  # remembers where the stream is; see RememberedStream
    older_streams: Sequence[Path] = ()


class MeanLoss:
    """A mean weighted by samples."""

    def __init__(self) -> None:
        self.samples = 0
        self._sum = 0.0

    def add(self, loss: float, samples: int) -> None:
        self._sum += loss * samples
        self.samples += samples

    @property
    def value(self) -> float | None:
        return self._sum / self.samples if self.samples else None


class TrainingLoop:
    """Computes micro-batches and hands their gradients to a collaborative optimizer.

    In the loop's thread, `on_loss(loss, samples)` is called before the optimizer takes a step's gradients (so that it
    belongs to the epoch in which it was computed), `on_step` after it has, and `on_epoch` whenever it has come to
    another epoch. Errors of task and optimizer go to the caller of `run`.
    """

    def __init__(
        self,
        task: Task,
        model: nn.Module,
        optimizer: CollaborativeOptimizer,
        settings: LoopSettings,
        *,
        compute: Compute | None = None,
        on_loss: Callable[[float, int], object] | None = None,
        on_step: Callable[[StepReport], object] | None = None,
        on_epoch: Callable[[EpochReport], object] | None = None,
    ) -> None:
        self._task = task
        self._model = model
        self._optimizer = optimizer
        self._settings = settings
        self._compute = compute or Compute(torch.device("cpu"))
        self._on_loss = on_loss or _ignore
        self._on_step = on_step or _ignore
        self._on_epoch = on_epoch or _ignore
        self._samples = 0
        self._last_loss: float | None = None
        self._bad_steps = 0

    def run(self, stop: threading.Event) -> LoopResult:
        """Trains until `stop` is set (the step in progress is finished), max_epochs is reached or the data ends.

        Raises TrainingError when losses are no numbers for many steps in a row, and what task and optimizer raise.
        """
        settings = self._settings
        batches = RememberedStream(self._task, settings.stream_seed, settings.stream_file, settings.older_streams)
        torch.manual_seed(batches.dropout_seed)
        self._optimizer.zero_grad()
        try:
            return self._train(batches, stop)
        finally:
            batches.remember()

    def _train(self, batches: RememberedStream, stop: threading.Event) -> LoopResult:
        epoch, mean, began = self._optimizer.local_epoch, MeanLoss(), time.monotonic()
        while (reason := self._reason_to_end(stop)) is None:
            report = self._step(batches)
            if report is None:
                reason = "data ended"
                break
            mean.add(report.loss, report.samples)
            self._last_loss = mean.value
            if self._optimizer.local_epoch != epoch:
                batches.remember()
                self._on_epoch(EpochReport(epoch, mean.samples, mean.value, time.monotonic() - began))
                epoch, mean, began = self._optimizer.local_epoch, MeanLoss(), time.monotonic()
        return LoopResult(reason, self._optimizer.local_epoch, self._samples, self._last_loss)

    def _reason_to_end(self, stop: threading.Event) -> StopReason | None:
        limit = self._settings.max_epochs
        if limit is not None and self._optimizer.local_epoch >= limit:
            return "max_epochs"
        return "stopped" if stop.is_set() else None

    def _step(self, batches: RememberedStream) -> StepReport | None:
        """One step of the optimizer; None when the data has ended before it was full."""
        began, epoch = time.monotonic(), self._optimizer.local_epoch
        while True:
            accumulated = self._accumulate(batches)
            if accumulated is None:
                return None
            loss, samples = accumulated
            if math.isfinite(loss):
                break
            self._give_up_step(loss)
        self._bad_steps = 0
        computed = time.monotonic()
        self._on_loss(loss, samples)
        self._optimizer.step(batch_size=samples)
        self._optimizer.zero_grad()
        self._samples += samples
        report = StepReport(epoch, samples, loss, computed - began, time.monotonic() - computed)
        self._on_step(report)
        return report

    def _accumulate(self, batches: RememberedStream) -> tuple[float, int] | None:
        """Adds the gradients of the mean loss over `accumulation_steps` micro-batches; that loss, and the samples."""
        losses, samples = [], 0
        for _ in range(self._settings.accumulation_steps):
            batch = batches.next()
            if batch is None:
                return None
            placed = self._compute.place(batch)
            with self._compute.autocast():
                loss = self._task.loss(self._model, placed)
            (loss / self._settings.accumulation_steps).backward()
            losses.append(loss.detach())
            samples += samples_in(batch)
        # One read at the end: each makes the processor wait for the device.
        return torch.stack(losses).mean().item(), samples

    def _give_up_step(self, loss: float) -> None:
        """Forgets gradients that are no numbers: averaged, they would spoil everyone's."""
        self._bad_steps += 1
        self._optimizer.zero_grad()
        logger.warning("the loss of a step is %s; its gradients are dropped", loss)
        if self._bad_steps >= MAX_BAD_STEPS:
            raise TrainingError(
                f"the loss was no number in {MAX_BAD_STEPS} steps in a row; lower optimizer.learning_rate, set "
                "optimizer.max_grad_norm, or look for broken data"
            )


def _ignore(*what: object) -> None:
    """Nobody asked to be told."""
