"""Keeps a peer within what its user lends: decides each second, from the limits and what the computer tells of itself,
whether it may run and how much of each thing is its own."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime

from swarmcli.errors import RecipeError
from swarmcli.machine.sensors import Readings, Sensors
from swarmcli.network.rates import LEAST_RATE
from swarmcli.peer.activity import Activity
from swarmcli.recipe.limit_store import LimitStore
from swarmcli.recipe.limits import Limits, amount_of
from swarmcli.run.values import Reason, ReasonKind
from swarmcli.words import format_size

logger = logging.getLogger(__name__)

# Seconds for which all has to be well again before a peer goes on: what has just changed tends to change back.
SETTLE: Mapping[ReasonKind, float] = {
    "battery": 5.0,
    "metered": 5.0,
    "busy": 20.0,
    "heat": 20.0,
    "memory": 20.0,
    "disk": 20.0,
}


@dataclass(frozen=True, slots=True)
class Margins:
    """So far within its limits a peer goes on: at the limits themselves it would come and go."""

    cooler: float = 5.0  # °C below the limit
    busy: float = 0.25  # of the processors: a computer that other programs use more than that is not idle
    quieter: float = 0.75  # of that
    less: float = 0.95  # of a limit for memory or disk
    short: float = 0.02  # of all memory or disk: with less that is free, this computer is short of it


MARGINS = Margins()


@dataclass(frozen=True, slots=True)
class Judgement:
    """One kind of reason at one moment. Between well and bad nothing changes."""

    bad: str = ""  # completes "paused: …"
    well: bool = True
    unknown: str = ""  # which limit has no effect, and why


class Latch:
    """Holds at once, and lets go when all has been well for a while."""

    def __init__(self, settle: float) -> None:
        self._settle = settle
        self._held = ""
        self._well_since: float | None = None

    def look(self, now: float, judged: Judgement) -> str:
        """Why the peer is held; "": it is not. The words stay those of the first moment, or every second were news."""
        if judged.bad:
            self._held, self._well_since = self._held or judged.bad, None
        elif not judged.well:
            self._well_since = None
        elif self._held:
            if self._well_since is None or now < self._well_since:  # a clock that was set back begins anew
                self._well_since = now
            if now >= self._well_since + self._settle:
                self._held = ""
        return self._held


class Governor:
    """The decisions, without clock, sensors or threads of their own: `readings.now` is the time."""

    def __init__(self) -> None:
        self._latches = {kind: Latch(settle) for kind, settle in SETTLE.items()}
        self._limits = Limits()
        self.unknown: list[str] = []  # what this computer does not tell, and which limit has no effect for that

    def decide(self, limits: Limits, readings: Readings) -> dict[ReasonKind, Reason]:
        """Why the peer may not run now; empty: it may."""
        if limits != self._limits:  # a limit that was raised frees at once
            self._latches = {kind: Latch(settle) for kind, settle in SETTLE.items()}
            self._limits = limits
        judged = judge(limits, readings)
        self.unknown = [each.unknown for each in judged.values() if each.unknown]
        held = {kind: self._latches[kind].look(readings.now, each) for kind, each in judged.items()}
        reasons = {kind: Reason(kind, text) for kind, text in held.items() if text}
        if (outside := outside_hours(limits, readings.now)) is not None:
            reasons["hours"] = outside
        return reasons


def outside_hours(limits: Limits, now: float) -> Reason | None:
    """None: within them."""
    hours = limits.when
    if hours is None or hours.hold(now):
        return None
    until = hours.next_change(now)
    shown = ""
    if until is not None:
        then = datetime.fromtimestamp(until)
        day = "" if until - now < 20 * 3600 else f"on {then:%A} "  # within a day the hour says enough
        shown = f", on again {day}at {then:%H:%M}"
    return Reason("hours", f"outside the hours that you lend{shown}", until)


def judge(limits: Limits, readings: Readings) -> dict[ReasonKind, Judgement]:
    """Each kind of reason but the hours."""
    return {
        "battery": _forbidden(limits.on_battery, readings.on_battery, "on battery", "on_battery"),
        "metered": _forbidden(limits.on_metered, readings.metered, "on a metered network", "on_metered"),
        "busy": _busy(limits, readings),
        "heat": _heat(limits, readings),
        "memory": _taken(
            limits.memory,
            readings.memory,
            readings.memory_free,
            readings.memory_whole,
            "memory",
            who=f"your {readings.peers} peers here together take" if readings.peers > 1 else "it takes",
        ),
        "disk": _taken(limits.disk, readings.disk, readings.disk_free, readings.disk_whole, "disk", readings.peers),
    }


def _forbidden(allowed: bool | None, found: bool | None, words: str, key: str) -> Judgement:
    if allowed is not False:
        return Judgement()
    if found is None:
        return Judgement(unknown=f"this computer does not tell whether it is {words}, so {key}: no has no effect")
    return Judgement(words if found else "", not found)


def _busy(limits: Limits, readings: Readings) -> Judgement:
    if limits.only_when_idle is None:
        return Judgement()
    unknown = ""
    if readings.idle is None:
        unknown = (
            "this computer does not tell when keyboard and mouse were used, so only_when_idle goes by other programs "
            "alone"
        )
    elif readings.idle < limits.only_when_idle * 60:
        return Judgement("somebody uses this computer", False)
    others = readings.others or 0.0
    if others > MARGINS.busy:
        return Judgement("other programs use this computer", False, unknown)
    return Judgement("", others <= MARGINS.quieter * MARGINS.busy, unknown)


def _heat(limits: Limits, readings: Readings) -> Judgement:
    most, found = limits.temperature, readings.temperature
    if most is None:
        return Judgement()
    if found is None:
        return Judgement(unknown="this computer does not tell how hot it is, so temperature has no effect")
    if found >= most:
        return Judgement(f"{found:.0f} °C hot, and your limit is {most:g} °C", False)
    return Judgement("", found <= most - MARGINS.cooler)


def _taken(
    limit: float | None,
    taken: float | None,
    free: float | None,
    whole: float | None,
    what: str,
    peers: int = 1,
    who: str = "it takes",
) -> Judgement:
    """Judges memory, which peers take together, or the disk, of which each of so many `peers` has its share."""
    if limit is None:
        return Judgement()
    if taken is None or free is None or whole is None:
        return Judgement(unknown=f"this computer does not tell how much {what} is taken, so {what} has no effect")
    most = (amount_of(limit, whole) or 0.0) / peers
    if taken > most:
        return Judgement(f"{who} {format_size(taken)} of {what}, and your limit is {format_size(most)}", False)
    if free < MARGINS.short * whole:
        return Judgement(f"this computer has only {format_size(free)} of {what} left", False)
    return Judgement("", taken <= MARGINS.less * most and free >= 2 * MARGINS.short * whole)


@dataclass(frozen=True, slots=True)
class PeerShare:
    """One peer takes so much of a computer. None: no limit."""

    upload: float | None = None  # bytes per second
    download: float | None = None
    processor: float = 1.0  # of the time
    gpu: float = 1.0
    divided: float = 1.0  # the lower rate that the user has set, by this peer's: several peers have it together


def share_of(limits: Limits, readings: Readings) -> PeerShare:
    """One peer's share of a computer's limits.

    Rates and sizes are divided by the peers of this user on the computer. Shares of time are not: the processors'
    threads are divided among the trainers already, so each may compute half of the time where half of the processors
    are lent. A graphics card is there for one at a time, so its time is divided. With fewer bytes per second than a
    peer needs it would be lost to the run, so each keeps that much.
    """

    def rate(limit: float | None) -> float | None:
        return None if limit is None else max(LEAST_RATE, limit / readings.peers)

    lower = min(filter(None, (limits.upload, limits.download)), default=None)
    return PeerShare(
        upload=rate(limits.upload),
        download=rate(limits.download),
        processor=limits.processor or 1.0,
        gpu=(limits.gpu or 1.0) / (readings.trainers if limits.gpu else 1),
        divided=1.0 if lower is None else lower / (rate(lower) or lower),
    )


class GovernorThread:
    """Looks each second, in a thread of its own, and applies what is decided. A context manager."""

    def __init__(
        self,
        limits: LimitStore,
        sensors: Sensors,
        activity: Activity,
        take: Callable[[PeerShare], object],
        notice: Callable[[str], object],
        heed: Callable[[], object] = bool,
    ) -> None:
        """`heed`: takes up what the user has asked of a peer that cannot be asked yet. `take`: gives the peer its
        share of the computer, whenever that is another one. `notice`: is told what the user should know."""
        self._limits = limits
        self._sensors = sensors
        self._activity = activity
        self._take = take
        self._notice, self._heed = notice, heed
        self._governor = Governor()
        self._held: Mapping[ReasonKind, Reason] = {}
        self._share = PeerShare()
        self._said: set[str] = set()
        self._looking = threading.Lock()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="swarm-governor", daemon=True)

    def __enter__(self) -> GovernorThread:
        self.look()  # before the peer does anything
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def look(self) -> None:
        """Applies the limits as they are now. From any thread: after a change that is to hold at once."""
        with self._looking:
            try:
                self._limits.reload()
            except RecipeError as error:
                self._notice(f"the limits stay as they are: {error}")
            limits = self._limits.limits
            readings = self._sensors.read(limits)
            reasons = self._governor.decide(limits, readings)
            for kind in self._held.keys() - reasons.keys():
                self._activity.release(kind)
            for kind, reason in reasons.items():
                if self._held.get(kind) != reason:
                    self._activity.hold(reason)
            self._held = reasons
            if (share := share_of(limits, readings)) != self._share:
                self._take(share)
                self._share = share
            for text in self._governor.unknown:
                if text not in self._said:
                    self._said.add(text)
                    self._notice(text)

    def _run(self) -> None:
        while not self._ended.wait(1.0):
            try:
                self._heed()
                self.look()
            except Exception:  # a driver's fault; the limits that hold stay
                logger.exception("the limits could not be looked after")
