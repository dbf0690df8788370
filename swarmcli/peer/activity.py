"""Whether a peer works at this moment, and why not. Its user, limits and signals all act on this one object.

running ──hold──▶ pausing ──what was computed is handed in──▶ paused ──the last reason released──▶ running
   └──────────────────────────────stop──────────────────────────────▶ stopping
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from swarmcli.clock import Clock
from swarmcli.events import ActivityStatus, Reason, ReasonKind
from swarmcli.words import format_moment, roughly

State = Literal["running", "pausing", "paused", "stopping"]


# How many seconds at most a peer that is to leave stays to hand in what it has computed. ASKED: a person asked for the
# end, sees that it takes long, and can ask again. HURRIED: the machine asked (shutdown, logout, a service's manager),
# and kills later. HASTY: torchrun asked, which kills its processes 30 seconds later; they have to save too.
STAYS_ASKED, STAYS_HURRIED, STAYS_HASTY = 600.0, 60.0, 10.0


def asked(until: float | None = None) -> Reason:
    """The user wants a pause, until that moment or until told otherwise."""
    if until is None:
        return Reason("asked", "you asked for it")
    return Reason("asked", f"you asked for it, until {format_moment(until)}", until)


@dataclass(frozen=True, slots=True)
class PendingWork:
    """The samples that a peer has computed and no round has taken yet."""

    samples: int = 0
    seconds: float = math.inf  # until a round is expected to take them; infinite: not known
    nobody_takes: bool = False  # nothing of it is on its way to a round, or could come to one soon
    rests: bool = False  # the loop computes no further batch


class Activity:
    """Whether one peer computes, pauses or leaves, and why. Any thread may call it; listeners and events are told in
    the thread that made the change, with no lock held.

    A reason whose time is over ends when somebody looks: the loop that pauses does so about once a second.
    """

    def __init__(
        self,
        emit: Callable[[ActivityStatus], object] = lambda event: None,
        clock: Callable[[], float] = time.time,
        steady: Callable[[], float] | None = None,
    ) -> None:
        """`clock`: the wall clock, by which people name moments. `steady`: runs on when the wall clock is set, and
        while the computer sleeps; durations go by it."""
        self._emit = emit
        self._clock, self._steady = clock, steady or Clock().raw
        self._lock = threading.Lock()
        self._reasons: dict[ReasonKind, tuple[Reason, float]] = {}  # each with its end by `steady`; infinite: none
        # stays so many seconds at most; leaves at that moment, by `steady`, at the latest
        self._stays, self._leaves_at = math.inf, math.inf
        self.pending: Callable[[], PendingWork] = PendingWork  # what there is to hand in at this moment
        self._listeners: list[Callable[[], object]] = []
        self._status = ActivityStatus("running", (), clock())

    # for the user, limits and signals

    def hold(self, reason: Reason, seconds: float | None = None) -> ActivityStatus:
        """Stops the peer's work while this reason holds: for so many `seconds`, else until the moment that the reason
        names, if any. Replaces a reason of the same kind."""
        with self._lock:
            self._reasons[reason.kind] = reason, math.inf if seconds is None else self._steady() + seconds
        return self._tell()

    def release(self, kind: ReasonKind) -> ActivityStatus:
        """This reason holds no more. No effect if it did not hold."""
        with self._lock:
            self._reasons.pop(kind, None)
        return self._tell()

    def stop(self, stays: float = STAYS_ASKED) -> ActivityStatus:
        """The peer leaves the run, after it has handed in what it has computed, as for a pause; for that it `stays` so
        many seconds at most. 0: it leaves after its present step, and hands in nothing more. Either way it saves what
        nobody else holds. `swarm stop` and all signals call this. A later call can only shorten the time."""
        with self._lock:
            self._stays = min(self._stays, stays)
            self._leaves_at = min(self._leaves_at, self._steady() + stays)
        return self._tell()

    def status(self) -> ActivityStatus:
        """The status at this moment."""
        return self._tell()

    # for the loop that works

    @property
    def is_held(self) -> bool:
        """Whether the peer is to compute no further batch: something holds it, or it is to stop."""
        return self._tell().state != "running"

    def why_leave(self) -> str:
        """Says why a peer that is to stop need not, or cannot, hand in what it has computed; "": it may. It waits until
        the deadline for a round that is later than expected."""
        return self._why_leave(self.pending())

    def _why_leave(self, pending: PendingWork) -> str:
        if pending.nobody_takes:
            return "nobody else computes at present"
        if self._steady() >= self._leaves_at:
            return f"no round took them within {roughly(self._stays)}"
        if pending.samples and self._stays < pending.seconds < math.inf:
            return f"the next round is expected in about {roughly(pending.seconds)}, which is too long to wait"
        return ""

    def subscribe(self, listener: Callable[[], object]) -> Callable[[], None]:
        """Calls `listener` after each change until the returned function is called."""
        self._listeners = [*self._listeners, listener]

        def unsubscribe() -> None:
            self._listeners = [other for other in self._listeners if other is not listener]

        return unsubscribe

    def _tell(self) -> ActivityStatus:
        """Works out the present status, and tells everyone if it has changed."""
        pending = self.pending() if self._reasons or self._stays < math.inf else PendingWork()  # without the lock
        with self._lock:
            before, now = self._status, self._look(pending)
            self._status = now
        if now == before:
            return now
        if is_news(before, now):
            self._emit(now)
        for listener in self._listeners:
            listener()
        return now

    def _look(self, pending: PendingWork) -> ActivityStatus:
        now, steady, before = self._clock(), self._steady(), self._status
        self._reasons = {k: held for k, held in self._reasons.items() if not is_over(*held, now, steady)}
        state: State = "running"
        if self._stays < math.inf:
            state = "stopping"
        elif self._reasons:
            state = "paused" if pending.rests and pending.nobody_takes else "pausing"
        hands_in = state == "stopping" and not self._why_leave(pending)
        left = pending.seconds if state == "pausing" or (hands_in and pending.samples) else math.inf
        return ActivityStatus(
            state,
            tuple(reason for reason, _ in self._reasons.values()),
            before.since if state == before.state else now,
            pending.samples if state == "paused" or hands_in else 0,
            self._stays,
            left if left < math.inf else None,
        )


def is_over(reason: Reason, end: float, now: float, steady: float) -> bool:
    return end <= steady if end < math.inf else reason.until is not None and reason.until <= now


def is_news(before: ActivityStatus, now: ActivityStatus) -> bool:
    """Whether people should hear of the change. While a peer stops they hear once that it hands something in, and not
    of each step."""
    if (now.state, now.reasons) != (before.state, before.reasons):
        return True
    if now.state == "stopping":
        return before.keeps == 0 and now.keeps > 0
    return now.keeps != before.keeps
