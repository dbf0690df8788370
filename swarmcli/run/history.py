"""The last epochs of a run, from this peer's own steps and from what others report."""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Any

from swarmcli.events import EpochAdvanced, EpochCredited, EpochLoss, EpochReported, Event

RECENT_EPOCHS = 10  # from which the run's end is estimated, and the peers' shares are taken
LOSSES = 60  # epochs whose loss is kept


class EpochHistory:
    """Emitters' threads call `note`, others ask: a lock guards both. A report costs the same however many there are;
    answers are kept until another report comes."""

    def __init__(self) -> None:
        self.last: EpochAdvanced | None = None  # the last epoch that was stepped here
        self.lengths: deque[float] = deque(maxlen=RECENT_EPOCHS)  # seconds
        self._lock = threading.Lock()
        self._reached = -1  # the epoch that this peer has reached
        self._own: dict[int, float] = {}  # epoch → this peer's loss
        self._reports: dict[int, dict[str, EpochReported]] = {}  # epoch → peer → what it told
        self._credited: dict[int, Mapping[str, float]] = {}  # epoch → peer → samples that its round has counted
        self._losses: dict[int, float] = {}  # epoch → the loss that follows from these, until more is told
        self._news: set[int] = set()  # epochs of which more has been told since `news` was asked
        self._grown: dict[str, float] | None = None  # peer → its share of the last epochs, until more is told

    def note(self, event: Event) -> None:
        match event:
            case EpochAdvanced():
                with self._lock:
                    self._advance(event)
            # Anybody can claim anything about epochs to come, so only the nearest two of those are kept.
            case EpochReported(epoch=epoch) if self._reached - LOSSES < epoch <= self._reached + 2:
                with self._lock:
                    self._reports.setdefault(epoch, {})[event.peer] = event
                    self._hear_of(epoch)
                    self._grown = None
            case EpochCredited(epoch=epoch):
                with self._lock:
                    self._credited[epoch] = event.samples
                    self._hear_of(epoch)

    def _hear_of(self, epoch: int) -> None:
        self._losses.pop(epoch, None)
        self._news.add(epoch)

    def _advance(self, event: EpochAdvanced) -> None:
        self._reached = event.epoch
        if event.samples:  # otherwise the state came from another peer, and nobody knows how long the epoch took
            self.last = event
            if event.seconds > 0:
                self.lengths.append(event.seconds)
        if event.loss is not None:
            self._own[event.epoch] = event.loss
        for by_epoch in (self._own, self._reports, self._credited, self._losses):
            _forget(by_epoch, self._reached)
        self._grown = None

    def losses(self) -> list[float]:
        """Returns the swarm's losses by epoch, up to the one that this peer has reached; its own where no peer has
        reported."""
        with self._lock:
            return [loss for _, loss in sorted((self._own | self._reckoned()).items())][-LOSSES:]

    def news(self) -> list[EpochLoss]:
        """Returns the epochs that this peer has reached whose loss has changed since the last call."""
        with self._lock:
            reckoned = self._reckoned()
            new = sorted(self._news & reckoned.keys())
            self._news = {epoch for epoch in self._news if epoch > self._reached}
            return [EpochLoss(epoch, reckoned[epoch], len(self._reports[epoch])) for epoch in new]

    def _reckoned(self) -> dict[int, float]:
        for epoch, reports in self._reports.items():
            if epoch not in self._losses:
                self._losses[epoch] = _loss(reports.values(), self._credited.get(epoch, {}))
        return {epoch: loss for epoch, loss in self._losses.items() if epoch <= self._reached}

    def shares(self, rates: Mapping[str, float]) -> dict[str, float]:
        """Returns each peer's share, 0 to 1, of the samples that all computed over the last epochs.

        A report counts samples since the peer's start, so what a peer computed is how much its count grew. One that has
        reported once gets one epoch at its rate: this peer hears of its own epochs first, and would else have all of
        them. While nobody has reported twice, `rates` (of peers that are there) decide.
        """
        with self._lock:
            if self._grown is None:
                self._grown = self._parts_of_growth()
            return self._grown or _parts(rates)

    def _parts_of_growth(self) -> dict[str, float]:
        told: dict[str, list[EpochReported]] = {}
        for epoch, reports in self._reports.items():
            if self._reached - RECENT_EPOCHS < epoch <= self._reached:
                for peer, report in reports.items():
                    told.setdefault(peer, []).append(report)
        if all(len(reports) == 1 for reports in told.values()):
            return {}
        last = self.lengths[-1] if self.lengths else 0.0
        return _parts({peer: _computed(reports, last) for peer, reports in told.items()})


def _computed(reports: Sequence[EpochReported], last: float) -> float:
    """The samples that one peer computed between these reports; `last`: seconds of the last epoch."""
    counts = [report.samples for report in reports]
    return max(counts) - min(counts) if len(counts) > 1 else min(counts[0], reports[0].samples_per_second * last)


def _forget(by_epoch: dict[int, Any], reached: int) -> None:
    for epoch in [each for each in by_epoch if not reached - LOSSES < each <= reached + 2]:
        del by_epoch[epoch]


def _loss(reports: Iterable[EpochReported], credited: Mapping[str, float]) -> float:
    """The median of what peers tell whose samples the round has counted, weighted by their samples; so what one of
    three or more claims moves it no further than to a neighbor's value. Of two, the mean. If none of these peers has
    told anything, or it is not known whom the round has counted, all count alike."""
    told = [(each.loss, credited.get(each.peer, 0.0)) for each in reports]
    told = [each for each in told if each[1] > 0] or [(loss, 1.0) for loss, _ in told]
    whole = math.fsum(weight for _, weight in told)
    if len(told) < 3:
        return math.fsum(loss * weight for loss, weight in told) / whole
    told.sort(key=lambda each: (math.isnan(each[0]), each[0]))
    reached = accumulate(weight for _, weight in told)
    return next(loss for (loss, _), part in zip(told, reached, strict=True) if part >= whole / 2)


def _parts(amounts: Mapping[str, float]) -> dict[str, float]:
    total = math.fsum(amounts.values())
    return {peer: amount / total for peer, amount in amounts.items()} if 0.0 < total < math.inf else {}
