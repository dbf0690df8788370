"""Decides when the owner of a run has to look at it: it stalls, nobody holds its state, or its loss goes the wrong way.

It goes by what one peer sees of the run, look by look, without a clock of its own. That a peer pauses or computes is
only its own word, so no such word delays an alert for long, or ends it soon.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from itertools import pairwise

from swarmcli.run.standstill import LONGEST_GAP
from swarmcli.run.values import Alert, AlertKind, PeerStatus, RunStatus

STANDS = 60.0  # seconds for which the screens have said that the run stands still: alerts are for what lasts
DESERTED = 600.0  # seconds of an epoch in which nobody computed
DONORLESS = 60.0  # seconds; the first report of the next donor may come so long after a donor's goodbye
LOST_NUMBERS = 3  # epochs in a row whose loss is not finite
LATELY = 10  # epochs, whose median loss is compared with …
SMOOTHED = 5  # … the best median of so many in a row
# a rise by this share of what had been learned, by this share of the best loss, and by so many times the usual
# difference between two epochs
RISEN = 0.5, 0.2, 6.0


class Alerts:
    """Keeps which alerts stand. One thread calls `look`; any thread may read `standing`."""

    def __init__(self) -> None:
        self._standing: dict[AlertKind, Alert] = {}
        self.standing: tuple[Alert, ...] = ()  # replaced and never changed
        self._looked: float | None = None
        self._stalled_in = -1  # epoch
        self._goes_on = 0.0  # seconds for which that epoch seems to go on again
        self._had_donor = False
        self._without = 0.0  # seconds
        self._first, self._best = math.inf, math.inf  # smoothed losses

    def look(self, status: RunStatus) -> tuple[list[Alert], list[Alert]]:
        """Returns the alerts that begin with this look, and those that end with it. `status.now` tells the time."""
        gap, self._looked = status.now - (self._looked or status.now), status.now
        gap = gap if 0.0 <= gap <= LONGEST_GAP else 0.0
        told: dict[AlertKind, str] = {
            "stalled": self._stalled(status, gap),
            "no donor": self._no_donor(status, gap),
            "diverged": self._diverged(status.losses[:-1]),  # the last one may still change, as reports arrive
        }
        begun, ended = [], []
        for kind, text in told.items():
            text = "" if status.state == "finished" else text
            if text and kind not in self._standing:
                self._standing[kind] = Alert(id=f"{kind}-{status.now:.0f}", kind=kind, text=text, since=status.now)
                begun.append(self._standing[kind])
            elif not text and kind in self._standing:
                ended.append(self._standing.pop(kind))
        self.standing = tuple(self._standing.values())
        return begun, ended

    def _stalled(self, status: RunStatus, seconds: float) -> str:
        """The epoch does not end, or nobody computes. Until it ends, only the peers' word says that it goes on, so the
        alert waits before it ends: otherwise it would begin again each time that a peer says so for a moment."""
        self._goes_on = 0.0 if status.overdue else self._goes_on + seconds
        if status.waits and status.overdue >= (STANDS if status.state == "standing" else DESERTED):
            self._stalled_in = status.epoch
        stands = status.epoch == self._stalled_in and self._goes_on < DESERTED
        return (status.waits or "The run stands still.") if stands else ""

    def _no_donor(self, status: RunStatus, seconds: float) -> str:
        """Nobody can hand the state to a newcomer any more, though somebody could."""
        out_of_reach = status.state == "stranded"
        there = any(_holds_state(peer, status) for peer in status.peers) and not out_of_reach
        self._had_donor = self._had_donor or there or out_of_reach
        self._without = 0.0 if there else self._without + seconds
        if not self._had_donor or self._without < DONORLESS:
            return ""
        return (
            "Nobody who can be reached holds the state of the run: nobody can join, and what was learned may be lost."
        )

    def _diverged(self, losses: Sequence[float]) -> str:
        """The loss is not finite, or has risen far and stays there. It compares medians, so that a single bad epoch is
        no alert."""
        if len(losses) >= LOST_NUMBERS and not any(map(math.isfinite, losses[-LOST_NUMBERS:])):
            return "The loss is no number any more."
        losses = [loss for loss in losses if math.isfinite(loss)]
        if len(losses) < LATELY:
            return ""
        smoothed = [statistics.median(losses[end - SMOOTHED : end]) for end in range(SMOOTHED, len(losses) + 1)]
        self._first = smoothed[0] if self._first == math.inf else self._first
        self._best = min(self._best, *smoothed)
        usual = statistics.median(abs(one - other) for one, other in pairwise(losses))
        of_learned, of_best, of_usual = RISEN
        rise = max(of_learned * (self._first - self._best), of_best * abs(self._best), of_usual * usual)
        lately = statistics.median_low(losses[-LATELY:])
        if lately <= self._best + (rise / 2 if "diverged" in self._standing else rise):
            return ""
        return f"The loss has risen from {self._best:.3g} to {lately:.3g} and stays there."


def _holds_state(peer: PeerStatus, status: RunStatus) -> bool:
    if peer.me and status.state == "synchronizing":
        return False
    holds = peer.health in ("in step", "behind", "paused", "leaving", "line too slow")
    return holds and peer.role in ("trainer", "monitor")
