"""Makes the loop of a role obey its peer's Activity: it pauses, says how far the pause is, and goes on or leaves."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Self

from swarmcli.optim import Optimizer
from swarmcli.peer.activity import Activity, PendingWork


class Pauses:
    """A context manager around the loop. While it is entered, the optimizer hears of a pause, and so the swarm does,
    the moment that somebody asks for it, whatever the loop is doing. A request to stop is a pause at whose end the role
    ends: first the peer hands in what was computed, if that is possible within the time for which it is to stay. A
    request to stop at once, or one before or after the loop, ends the role after its present step."""

    def __init__(
        self,
        activity: Activity,
        optimizer: Optimizer,
        stop: threading.Event,
        *,
        last_epoch: Callable[[], int | None] = lambda: None,
        after_step: Callable[[], object] = lambda: None,
        lose: Callable[[str], object] = lambda why: None,
    ) -> None:
        """The role ends when `stop` is set, as a request to stop does in the end, or at its `last_epoch`. `after_step`
        is called after each step of a pause, `lose` with why the samples that it has are not handed in."""
        self._activity, self._optimizer, self._stop = activity, optimizer, stop
        self._last_epoch = last_epoch
        self._after_step = after_step
        self._lose = lose
        self._loops = False
        self._resting = False

    def __enter__(self) -> Self:
        self._activity.subscribe(self._heed)
        self._heed()
        self._loops = True
        self._activity.pending = self._pending
        self._heed()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._loops, self._activity.pending = False, PendingWork
        self._heed()

    def rest(self) -> bool:
        """Returns False at once if the peer may work. Otherwise hands in what was computed, waits until the pause is
        over or the role ends, and comes into step with the run."""
        if not self._rests:
            return self._follow()
        while self._rests and not self._leaves():
            self._step()
            self._resting = True
            self._activity.status()  # tells listeners how far the pause is
            self._after_step()
        self._resting = False
        if not self._is_over and not self._optimizer.auxiliary:
            self._optimizer.load_state_from_peers()
        return True

    def _follow(self) -> bool:
        """While this peer's samples cannot count, follows the run and computes nothing. Returns whether it has
        followed."""
        follows = False
        while self._optimizer.seat_lost and not (self._rests or self._stop.is_set() or self._is_over):
            follows = True
            self._step()
            self._after_step()
        if follows and not self._is_over:
            self._optimizer.load_state_from_peers()  # returns at once if this peer has only followed
        return follows

    def _heed(self) -> None:
        status = self._activity.status()
        if not self._loops or status.stays == 0:
            if status.state == "stopping":
                self._stop.set()
        elif status.state == "running":
            self._optimizer.resume()
        else:
            self._optimizer.pause(leaving=status.state == "stopping")

    def _leaves(self) -> bool:
        """Whether the role ends here: its user wants that, and there is nothing left to hand in, or nobody who takes
        it."""
        if self._activity.status().state != "stopping":
            return False
        if why := self._activity.why_leave():
            if self._kept:
                self._lose(why)
            self._stop.set()
        return bool(why)

    def _pending(self) -> PendingWork:
        kept, optimizer = self._kept, self._optimizer
        seconds = optimizer.tracker.seconds_to_round if kept else math.inf
        return PendingWork(kept, seconds, optimizer.has_handed_in, self._resting)

    def _step(self) -> None:
        if self._optimizer.auxiliary:
            self._optimizer.step()
        else:
            self._optimizer.step(batch_size=0)

    @property
    def _rests(self) -> bool:
        return self._activity.is_held and not self._is_over

    @property
    def _is_over(self) -> bool:
        last = self._last_epoch()
        return self._stop.is_set() or (last is not None and self._optimizer.local_epoch >= last)

    @property
    def _kept(self) -> int:
        return 0 if self._optimizer.auxiliary else self._optimizer.local_progress.samples_accumulated
