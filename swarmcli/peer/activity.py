"""Whether a peer works at this moment, and why not: the one place that its user, limits and signals speak to.

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

State = Literal["running", "pausing", "paused", "stopping"]


@dataclass(frozen=True, slots=True)
class StaySeconds:
    """For so long at most a peer that is to leave stays for what it has computed."""

    asked: float = 600.0  # where a person has asked for the end, sees that it takes long, and can ask again
    hurried: float = 60.0  # where the machine asks (shutdown, logout, a service's manager), which kills later
    hasty: float = (
        10.0  # under torchrun, which kills its processes 30 seconds after it has asked them: they save as well
    )


STAYS = StaySeconds()


def asked(until: float | None = None) -> Reason:
    """The user wants a pause, until that moment or until told otherwise."""
    if until is None:
        return Reason("asked", "you asked for it")
    moment, now = time.localtime(until), time.localtime()
    same_day = moment[:3] == now[:3]
    shown = time.strftime("%H:%M" if same_day else "%Y-%m-%d %H:%M", moment)
    return Reason("asked", f"you asked for it, until {shown}", until)


NOTHING = 0, math.inf  # samples that are computed, and seconds until a round is expected to take them


def nothing(stays: float) -> tuple[int, float]:
    """The answer where nothing is computed, so that nothing is handed in."""
    return NOTHING


class Activity:
    """One peer's. For any thread; listeners and events are told in the thread that changed it, with no lock held.

    A reason whose time is over ends when somebody looks: the loop that pauses does, about once a second.
    """

    def __init__(
        self,
        emit: Callable[[ActivityStatus], object] = lambda event: None,
        clock: Callable[[], float] = time.time,
        steady: Callable[[], float] | None = None,
    ) -> None:
        """`clock` is the one on the wall, by which people name moments. `steady` goes on as it is when that one is set,
        also while the computer sleeps: durations go by it."""
        self._emit = emit
        self._clock, self._steady = clock, steady or Clock().raw
        self._lock = threading.Lock()
        self._reasons: dict[ReasonKind, Reason] = {}
        self._ends: dict[ReasonKind, float] = {}  # of those that were to last for a time, by `steady`
        self._rests = False  # what was computed has been handed in, or is kept
        self._keeps = 0
        self._round_at = math.inf  # by `steady`, when a round is expected to take them
        self._stays = math.inf  # less: it stops
        self.hands_in = nothing  # what a peer would stay for if it were asked to stop now
        self._listeners: list[Callable[[], object]] = []
        self._told = self._status = ActivityStatus("running", (), clock())

    # for the user, limits and signals

    def hold(self, reason: Reason, seconds: float | None = None) -> ActivityStatus:
        """The peer does not work while this reason holds: for so many `seconds`, else until the moment that it names,
        if any. Replaces one of the same kind."""
        with self._lock:
            self._reasons[reason.kind] = reason
            self._ends[reason.kind] = math.inf if seconds is None else self._steady() + seconds
        return self._tell()

    def release(self, kind: ReasonKind) -> ActivityStatus:
        """This reason holds no more. Without effect if it did not."""
        with self._lock:
            self._reasons.pop(kind, None)
        return self._tell()

    def stop(self, stays: float = STAYS.asked) -> ActivityStatus:
        """The peer hands in what it has computed, as for a pause, for which it `stays` so many seconds at most, and
        leaves the run. 0: it leaves after its present step, and hands in nothing more. Either way it saves what nobody
        else holds. `swarm stop` and all signals come here. What is asked later can only shorten the time."""
        keeps, seconds = self.hands_in(stays) if stays else NOTHING
        with self._lock:
            self._keeps, self._round_at = keeps, self._steady() + seconds
            self._stays = min(self._stays, stays)
        return self._tell()

    def status(self) -> ActivityStatus:
        """The status at this moment."""
        return self._tell()

    # for the loop that works

    @property
    def is_held(self) -> bool:
        """Whether the peer is to compute no further batch: something holds it, or it is to stop."""
        return self._tell().state != "running"

    def note(self, *, rests: bool, keeps: int = 0, seconds: float = math.inf) -> None:
        """How far the loop is with a pause: it `keeps` so many samples, which a round is expected to take in so many
        `seconds`; it `rests` when it has nothing to hand in any more, or nobody to hand it to."""
        with self._lock:
            self._rests = rests
            self._keeps, self._round_at = keeps, self._steady() + seconds
        self._tell()

    def subscribe(self, listener: Callable[[], object]) -> Callable[[], None]:
        """Calls `listener` after each change until the returned function is called."""
        self._listeners = [*self._listeners, listener]

        def unsubscribe() -> None:
            self._listeners = [other for other in self._listeners if other is not listener]

        return unsubscribe

    def _tell(self) -> ActivityStatus:
        """Works out the present status, and tells everyone if it is another one."""
        with self._lock:
            self._look()
            before, now = self._told, self._status
            self._told = now
        if now == before:
            return now
        if is_news(before, now):
            self._emit(now)
        for listener in self._listeners:
            listener()
        return now

    def _look(self) -> None:
        now, steady, before, stops = self._clock(), self._steady(), self._status, self._stays < math.inf
        self._reasons = {k: r for k, r in self._reasons.items() if not self._is_over(r, now, steady)}
        reasons = tuple(self._reasons.values())
        if not reasons and not stops:
            self._rests, self._round_at = False, math.inf
        state: State = "stopping" if stops else "running" if not reasons else "paused" if self._rests else "pausing"
        keeps = self._keeps if state in ("paused", "stopping") else 0
        left = max(0.0, self._round_at - steady) if state in ("pausing", "stopping") else math.inf
        self._status = ActivityStatus(
            state,
            reasons,
            before.since if state == before.state else now,
            keeps,
            self._stays,
            left if left < math.inf else None,
        )

    def _is_over(self, reason: Reason, now: float, steady: float) -> bool:
        if (end := self._ends[reason.kind]) < math.inf:
            return end <= steady
        return reason.until is not None and reason.until <= now


def is_news(before: ActivityStatus, now: ActivityStatus) -> bool:
    """Whether people should hear of the change. While a peer stops they hear once what it hands in, not each step of
    that."""
    if (now.state, now.reasons) != (before.state, before.reasons):
        return True
    if now.state == "stopping":
        return before.keeps == 0 and now.keeps > 0
    return now.keeps != before.keeps
