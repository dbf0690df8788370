"""Keeps a peer within what its user lends: each second it decides, from the limits and what the computer's sensors say,
whether the peer may run and which share of each thing it may take."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING

from swarmcli.errors import RecipeError
from swarmcli.events import Reason, ReasonKind
from swarmcli.machine.sensors import Readings, Sensors
from swarmcli.network.rates import LEAST_RATE
from swarmcli.peer.activity import Activity
from swarmcli.recipe.limit_store import LimitStore
from swarmcli.recipe.limits import Limits, amount_of
from swarmcli.words import format_size

if TYPE_CHECKING:
    from swarmcli.training.loop import ComputePace  # it imports torch

logger = logging.getLogger(__name__)

# Seconds for which a reason holds on after it was last seen: what has just changed tends to change back.
SETTLE: Mapping[ReasonKind, float] = {
    "battery": 5.0,
    "metered": 5.0,
    "busy": 20.0,
    "heat": 20.0,
    "memory": 20.0,
    "disk": 20.0,
}
# At the very limit a peer would pause and go on again and again. So one that pauses goes on only well within it.
COOLER = 5.0  # °C below the limit
QUIETER = 0.75  # of BUSY
LESS = 0.95  # of a limit for memory or disk
BUSY = 0.25  # of the processors: if other programs use more than that, the computer is not idle
SHORT = 0.02  # of all memory or disk: with less free, this computer is short of it, until twice that is free


def judge(
    limits: Limits, readings: Readings, held: Collection[ReasonKind] = ()
) -> tuple[dict[ReasonKind, str], list[str]]:
    """Returns why the peer may not run now, other than hours (each text completes "paused: …"); and which limits have
    no effect, since this computer does not tell what they need. `held`: the reasons so far."""
    bad: dict[ReasonKind, str] = {}
    unknown: list[str] = []
    if limits.on_battery is False:
        if readings.on_battery is None:
            unknown.append("this computer does not tell whether it is on battery, so on_battery: no has no effect")
        elif readings.on_battery:
            bad["battery"] = "on battery"
    if limits.on_metered is False:
        if readings.metered is None:
            unknown.append(
                "this computer does not tell whether it is on a metered network, so on_metered: no has no effect"
            )
        elif readings.metered:
            bad["metered"] = "on a metered network"
    if limits.only_when_idle is not None:
        if readings.idle is None:
            unknown.append(
                "this computer does not tell when keyboard and mouse were used, so only_when_idle looks only at other "
                "programs"
            )
        elif readings.idle < limits.only_when_idle * 60:
            bad["busy"] = "somebody uses this computer"
        if (readings.others or 0.0) > BUSY * (QUIETER if "busy" in held else 1):
            bad.setdefault("busy", "other programs use this computer")
    if (most := limits.temperature) is not None:
        if (found := readings.temperature) is None:
            unknown.append("this computer does not tell how hot it is, so temperature has no effect")
        elif found >= most - (COOLER if "heat" in held else 0):
            bad["heat"] = f"{found:.0f} °C hot, and your limit is {most:g} °C"

    def compare(
        kind: ReasonKind, limit: float | None, taken: float | None, free: float | None, whole: float | None, who: str
    ) -> None:
        if limit is None:
            return
        if taken is None or free is None or whole is None:
            unknown.append(f"this computer does not tell how much {kind} is taken, so {kind} has no effect")
            return
        most = amount_of(limit, whole) or 0.0
        if kind == "disk":  # each peer has its share of the disk; memory counts for all together
            most /= readings.peers
        if taken > most * (LESS if kind in held else 1):
            bad[kind] = f"{who} {format_size(taken)} of {kind}, and your limit is {format_size(most)}"
        elif free < SHORT * whole * (2 if kind in held else 1):
            bad[kind] = f"this computer has only {format_size(free)} of {kind} left"

    together = f"your {readings.peers} peers here together take" if readings.peers > 1 else "it takes"
    compare("memory", limits.memory, readings.memory, readings.memory_free, readings.memory_whole, together)
    compare("disk", limits.disk, readings.disk, readings.disk_free, readings.disk_whole, "it takes")
    return bad, unknown


def outside_hours(limits: Limits, now: float) -> Reason | None:
    """Returns why the peer may not run at this hour; None: it may."""
    hours = limits.when
    if hours is None or hours.hold(now):
        return None
    until = hours.next_change(now)
    shown = ""
    if until is not None:
        then = datetime.fromtimestamp(until)
        day = "" if until - now < 20 * 3600 else f"on {then:%A} "  # within a day the hour is enough
        shown = f", on again {day}at {then:%H:%M}"
    return Reason("hours", f"outside the hours that you lend{shown}", until)


@dataclass(frozen=True, slots=True)
class PeerShare:
    """What one peer may take of a computer. None: no limit."""

    upload: float | None = None  # bytes per second
    download: float | None = None
    processor: float = 1.0  # of the time
    gpu: float = 1.0
    divided: float = 1.0  # the lower rate that the user has set, divided by this peer's: several peers share it


def share_of(limits: Limits, readings: Readings) -> PeerShare:
    """Returns one peer's share of a computer's limits.

    Rates are divided by the number of this user's peers on the computer. Shares of time are not: the processors'
    threads are divided among the trainers already, so if half of the processors is lent, each may compute half of the
    time. A graphics card computes for one peer at a time, so its time is divided. A peer with a rate below LEAST_RATE
    would be lost to the run, so each keeps that much.
    """

    def rate(limit: float | None) -> float | None:
        return None if limit is None else max(LEAST_RATE, limit / readings.peers)

    lower = limits.link
    return PeerShare(
        upload=rate(limits.upload),
        download=rate(limits.download),
        processor=limits.processor or 1.0,
        gpu=(limits.gpu or 1.0) / (readings.trainers if limits.gpu else 1),
        divided=1.0 if lower is None else lower / (rate(lower) or lower),
    )


class Governor:
    """Looks each second, in a thread of its own, and applies what it decides. A context manager."""

    def __init__(
        self,
        limits: LimitStore,
        sensors: Sensors,
        activity: Activity,
        pace: ComputePace,
        limit_rates: Callable[[float | None, float | None], object],
        notice: Callable[[str], object],
    ) -> None:
        """`pace`: of this peer's computing. `limit_rates`: gives the line its limits. `notice`: is told what the user
        should know."""
        self._limits = limits
        self._sensors = sensors
        self._activity = activity
        self._pace = pace
        self._limit_rates = limit_rates
        self._notice = notice
        self._heeded = Limits()  # the limits at the last look
        self._share = PeerShare()
        self._on_card = False
        self._rates_changed: Callable[[float], object] = bool
        self._said: set[str] = set()
        self._looking = threading.Lock()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="swarm-governor", daemon=True)

    def __enter__(self) -> Governor:
        self.look()  # before the peer does anything
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def when_rates_change(self, heed: Callable[[float], object]) -> None:
        """From now on `heed` is called in the governor's thread after each change of the line's limits, and once now.
        Its argument: by how much the user's rate is divided."""
        self._rates_changed = heed
        heed(self._share.divided)

    def compute_on_card(self, on_card: bool) -> None:
        """Says whether the trainer of this process computes on a graphics card."""
        self._on_card = on_card
        self._pace.share = self._share.gpu if on_card else self._share.processor

    def look(self) -> None:
        """Applies the limits as they are now. Any thread may call it, after a change that is to hold at once."""
        with self._looking:
            try:
                self._limits.reload()
            except RecipeError as error:
                self._notice(f"the limits stay as they are: {error}")
            limits = self._limits.limits
            try:
                readings = self._sensors.read(limits)
            except Exception:
                self._hold_on()
                raise
            self._pause_or_run(limits, readings)
            if (share := share_of(limits, readings)) != self._share:
                before, self._share = self._share, share
                if (share.upload, share.download) != (before.upload, before.download):
                    self._limit_rates(share.upload, share.download)
                    self._rates_changed(share.divided)
                self.compute_on_card(self._on_card)

    def _hold_on(self) -> None:
        """While nothing can be read, the reasons that hold the peer go on, and do not end by themselves."""
        for reason in self._activity.status().reasons:
            if reason.kind in SETTLE:
                self._activity.hold(reason, SETTLE[reason.kind])

    def _pause_or_run(self, limits: Limits, readings: Readings) -> None:
        held = {reason.kind: reason for reason in self._activity.status().reasons}
        changed, self._heeded = limits != self._heeded, limits
        bad, unknown = judge(limits, readings, () if changed else held)
        for kind, text in bad.items():
            # The words stay those of the first moment, or each second would bring news.
            self._activity.hold((not changed and held.get(kind)) or Reason(kind, text), SETTLE[kind])
        if changed:  # a limit that was raised lets the peer go on at once
            for kind in SETTLE.keys() - bad.keys():
                self._activity.release(kind)
        if (outside := outside_hours(limits, readings.now)) is not None:
            self._activity.hold(outside)
        else:
            self._activity.release("hours")
        for text in unknown:
            if text not in self._said:
                self._said.add(text)
                self._notice(text)

    def _run(self) -> None:
        while not self._ended.wait(1.0):
            try:
                self.look()
            except Exception:  # a driver's fault, say; the limits stay as they are
                logger.exception("the limits could not be looked after")
