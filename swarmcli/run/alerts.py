"""When the owner of a run has to look at it: it stalls, nobody holds its state, or its loss goes the wrong way.

Decided from what one peer sees of the run, look by look, without a clock of its own. An alert begins only after a
while, since peers come and go and losses jump, and it ends only when what it tells of is clearly over.

That somebody pauses or computes is what it says itself. Such words put the alert off, none of them for ever: otherwise
one stranger could keep it from the owner of a run that stands still.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from swarmcli.run.standstill import computes
from swarmcli.run.values import Alert, AlertKind, PeerStatus, RunStatus
from swarmcli.words import format_duration


@dataclass(frozen=True, slots=True)
class AlertOptions:
    """When an alert begins, and when it ends. Durations are seconds."""

    longest_gap: float = 15.0  # between two looks that count: this computer may have slept meanwhile
    lengths: int = 10  # of the last epochs, by which is judged how long one takes

    stands: float = 60.0  # for which the screens have said that the run stands: a pager is for what stays so
    deserted: float = 600.0  # for which nobody computes before that is told …
    all_paused: float = 3600.0  # … and while somebody pauses who has computed lately: its user may be back from lunch
    slow_epochs: float = 20.0  # an epoch that is longer than so many usual ones …
    slow_least: float = 3600.0  # … and so long is told whoever says that it computes

    donorless: float = 60.0  # a goodbye and the next peer's first report may lie so far apart
    donor_back: float = 30.0

    smoothed: int = 5  # epochs whose median loss is looked at
    risen_for: int = 10  # epochs in a row, like the two below
    fallen_for: int = 5
    not_a_number_for: int = 3
    risen_of_progress: float = 0.5  # of what had been learned since the first epochs that were seen
    risen_of_loss: float = 0.2  # of the least loss
    risen_of_noise: float = 6.0  # times the usual difference between two epochs


class Alerts:
    """Keeps which alerts stand. One thread looks; `standing` may be read in any."""

    def __init__(self, options: AlertOptions = AlertOptions()) -> None:
        self._longest_gap = options.longest_gap
        self._overdue = _Overdue(options)
        self._donors = _Donors(options)
        self._loss = _Loss(options)
        self._standing: dict[AlertKind, Alert] = {}
        self.standing: tuple[Alert, ...] = ()  # replaced and never changed
        self._looked: float | None = None

    def look(self, status: RunStatus) -> tuple[list[Alert], list[Alert]]:
        """Alerts that begin with this look, and those that end with it. `status.now` tells the time."""
        seconds = 0.0 if self._looked is None else status.now - self._looked
        self._looked = status.now
        seconds = seconds if 0.0 <= seconds <= self._longest_gap else 0.0
        told: dict[AlertKind, str] = {
            "stalled": self._overdue.look(status, seconds),
            "no donor": self._donors.look(status, seconds),
            "diverged": self._loss.look(status),
        }
        begun, ended = [], []
        for kind, text in told.items():
            if text and kind not in self._standing:
                self._standing[kind] = alert = Alert(
                    id=f"{kind}-{status.now:.0f}", kind=kind, text=text, since=status.now
                )
                begun.append(alert)
            elif not text and kind in self._standing:
                ended.append(self._standing.pop(kind))
        self.standing = tuple(self._standing.values())
        return begun, ended


@dataclass(slots=True)
class _Overdue:
    """Time adds up only while the run stands, or nobody computes: a long epoch is none that stalls."""

    options: AlertOptions
    epoch: int = -1
    since: float = 0.0  # seconds of this epoch
    overdue: float = 0.0
    deserted: float = 0.0
    lengths: list[float] = field(default_factory=list)  # seconds of the last epochs
    computed: set[str] = field(default_factory=set)  # who did, in the last epoch in which anybody did
    computed_in: int = -1
    pausing: int = 0  # how many trainers say that they pause

    def look(self, status: RunStatus, seconds: float) -> str:
        if status.state in ("finished", "synchronizing", "stranded"):
            self.overdue = self.deserted = 0.0
            return ""
        if status.epoch != self.epoch:
            if 0 <= self.epoch == status.epoch - 1:
                self.lengths = [*self.lengths, self.since][-self.options.lengths :]
            self.epoch, self.since, self.overdue, self.deserted = status.epoch, 0.0, 0.0, 0.0
            return ""
        trainers = [peer for peer in status.peers if peer.role == "trainer" and peer.health not in ("left", "lost")]
        computing = [peer for peer in trainers if computes(peer)]
        paused = [peer for peer in trainers if peer.health == "paused"]
        self.pausing = len(paused)
        if not computing and any(peer.me and self.computed <= {peer.peer_id} for peer in paused):
            self.deserted = 0.0  # who trains alone knows that it pauses
            return ""
        self.since += seconds
        if computing:
            self._note(computing)
            self.overdue = self.overdue + seconds if status.state == "standing" else 0.0
        elif self.computed:  # otherwise nobody has begun yet
            self.deserted += seconds
        if self.overdue >= self.options.stands:
            return status.waits
        gone = self.computed.isdisjoint(peer.peer_id for peer in paused)
        return self._text(self.options.deserted if gone else self.options.all_paused)

    def _note(self, computing: Sequence[PeerStatus]) -> None:
        if self.computed_in != self.epoch:
            self.computed, self.computed_in = set(), self.epoch
        self.computed.update(peer.peer_id for peer in computing)
        self.deserted = 0.0

    def _text(self, patience: float) -> str:
        usual = statistics.median(self.lengths) if self.lengths else None
        if self.deserted >= patience and not self.pausing:
            return f"Nobody computes any more: epoch {self.epoch} has no trainer."
        if self.deserted >= patience:
            says = "trainer says that it pauses" if self.pausing == 1 else "trainers say that they pause"
            return f"Nobody computes any more: in epoch {self.epoch} {self.pausing} {says}, and no other is there."
        if usual is not None and self.since >= max(self.options.slow_least, self.options.slow_epochs * usual):
            return f"Epoch {self.epoch} has lasted {format_duration(self.since)}, far longer than the ones before."
        return ""


def _holds_state(peer: PeerStatus) -> bool:
    return peer.role in ("trainer", "monitor") and peer.health in ("in step", "behind", "paused", "leaving", "follows")


@dataclass(slots=True)
class _Donors:
    options: AlertOptions
    had: bool = False
    without: float = 0.0
    back: float = 0.0
    told: bool = False

    def look(self, status: RunStatus, seconds: float) -> str:
        me_without = status.state == "synchronizing"
        there = any(_holds_state(peer) and not (peer.me and me_without) for peer in status.peers)
        there = there and status.state != "stranded"
        self.had = self.had or there
        self.without, self.back = (0.0, self.back + seconds) if there else (self.without + seconds, 0.0)
        lost = (self.had or status.state == "stranded") and self.without >= self.options.donorless
        self.told = lost or (self.told and self.back < self.options.donor_back)
        if not self.told or status.state == "finished":
            return ""
        return (
            "Nobody who can be reached holds the state of the run: nobody can join, and what was learned may be lost."
        )


class _Loss:
    """Looks at the median of a few epochs, so that a single bad one is no news."""

    def __init__(self, options: AlertOptions) -> None:
        self._options = options
        self._epoch = -1
        self._recent: deque[float] = deque(maxlen=options.smoothed)
        self._steps: deque[float] = deque(maxlen=60)
        self._first: float | None = None
        self._best = math.inf
        self._odd = self._risen = self._fallen = 0  # epochs in a row
        self._told = ""

    def look(self, status: RunStatus) -> str:
        for loss in self._news(status):
            self._add(loss)
        return "" if status.state == "finished" else self._told

    def _news(self, status: RunStatus) -> Iterator[float]:
        """Losses of epochs that were not looked at yet. The last one waits: it may still change, as reports arrive."""
        losses: Sequence[float] = status.losses[:-1]
        if not losses or status.epoch <= self._epoch:
            return
        count = len(losses) if self._epoch < 0 else min(len(losses), status.epoch - self._epoch)
        self._epoch = status.epoch
        yield from losses[-count:]

    def _add(self, loss: float) -> None:
        if not math.isfinite(loss):
            self._odd += 1
            if self._odd >= self._options.not_a_number_for:
                self._told = "The loss is no number any more."
            return
        self._odd = 0
        if self._recent:
            self._steps.append(abs(loss - self._recent[-1]))
        self._recent.append(loss)
        if len(self._recent) == self._options.smoothed:
            self._judge(statistics.median(self._recent))

    def _judge(self, now: float) -> None:
        if self._first is None:
            self._first = now
        self._best = min(self._best, now)
        options, learned = self._options, self._first - self._best
        rise = max(
            options.risen_of_progress * learned,
            options.risen_of_loss * abs(self._best),
            options.risen_of_noise * statistics.median(self._steps),
        )
        self._risen = self._risen + 1 if now > self._best + rise else 0
        self._fallen = self._fallen + 1 if now < self._best + rise / 2 else 0
        if self._risen >= options.risen_for:
            self._told = f"The loss has risen from {self._best:.3g} to {now:.3g} and stays there."
        elif self._fallen >= options.fallen_for:
            self._told = ""
