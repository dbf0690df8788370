"""What this peer has done so far, for the people who watch it."""

from __future__ import annotations

import math
from collections import deque
from typing import Literal, NamedTuple

LastOutcome = Literal["", "committed", "alone", "failed", "undecided"]

MAX_RECENT = 16  # epochs; whoever reads reports now and then still learns of each


class EpochLoss(NamedTuple):
    """How an epoch went for one peer. `samples` are all of that peer's since it started."""

    epoch: int
    loss: float
    samples: int


class Ledger:
    """Counts of samples, losses and outcomes. Moments are loop time."""

    def __init__(self) -> None:
        self.samples = 0  # by this peer since it started
        self.last_loss: float | None = None  # mean of the last epoch that had one
        self.recent: deque[EpochLoss] = deque(maxlen=MAX_RECENT)  # of the latest epochs that had one, oldest first
        self.last_outcome: LastOutcome = ""
        self.last_reason = ""
        self._loss_sum = 0.0
        self._loss_samples = 0
        self._epoch_began: float | None = None

    def begin(self, moment: float) -> None:
        """The first epoch begins; calls after the first do nothing."""
        if self._epoch_began is None:
            self._epoch_began = moment

    def note_loss(self, loss: float, samples: int) -> None:
        """`loss` is the mean over `samples` of the present epoch. One that is not finite is left out."""
        if math.isfinite(loss) and samples > 0:
            self._loss_sum += loss * samples
            self._loss_samples += samples

    def note_outcome(self, outcome: LastOutcome, reason: str = "") -> None:
        self.last_outcome, self.last_reason = outcome, reason

    def forget_losses(self) -> None:
        """Those of the present epoch: they are of parameters that have been replaced."""
        self._loss_sum, self._loss_samples = 0.0, 0

    def end_epoch(self, moment: float, epoch: int) -> tuple[float | None, float]:
        """Closes the present epoch, which led to `epoch`: its mean loss, if any is known, and its length in seconds.
        Begins the next."""
        loss = self._loss_sum / self._loss_samples if self._loss_samples else None
        if loss is not None:
            self.last_loss = loss
            self.recent.append(EpochLoss(epoch, loss, self.samples))
        self.forget_losses()
        began, self._epoch_began = self._epoch_began, moment
        return loss, moment - began if began is not None else 0.0
