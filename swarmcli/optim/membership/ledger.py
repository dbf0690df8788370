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
        self._epoch_began: float | None = None  # moved on by what was left out
        self._alone_at: float | None = None  # the last look at which nobody computed; None: somebody did

    def begin(self, moment: float) -> None:
        """The present epoch begins here: what came before was waiting."""
        self._epoch_began, self._alone_at = moment, None

    def leave_out(self, seconds: float) -> None:
        """For so long this peer waited for others: that is no part of the present epoch's length."""
        if self._epoch_began is not None:
            self._epoch_began += seconds

    def look(self, moment: float, *, anyone_computes: bool) -> None:
        """What a peer that computes nothing itself sees now and then: between two looks at nobody nothing was done.

        Whoever comes between two looks counts from the first of them: an epoch should not seem shorter than it was.
        """
        if self._alone_at is not None and not anyone_computes:
            self.leave_out(moment - self._alone_at)
        self._alone_at = None if anyone_computes else moment

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
        began = self._epoch_began
        self.begin(moment)
        return loss, max(0.0, moment - began) if began is not None else 0.0
