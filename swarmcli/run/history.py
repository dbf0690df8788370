"""The last epochs of a run, by this peer's own steps and by what others report of theirs."""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Iterable, Mapping
from itertools import accumulate
from typing import Any

from swarmcli.events import EpochAdvanced, EpochCredited, EpochLoss, EpochReported, Event

RECENT_EPOCHS = 10  # by which the run's end is estimated, and over which the peers' shares are taken
LOSSES = 60  # epochs whose loss is kept


class EpochHistory:
    """Hears events in their emitters' threads and is asked from others: a lock stands around both. A report costs the
    same however many there are; what was asked for before is told again until another report comes."""

    def __init__(self) -> None:
        self.last: EpochAdvanced | None = None  # of those that were stepped here
        self.lengths: deque[float] = deque(maxlen=RECENT_EPOCHS)  # seconds
        self._lock = threading.Lock()
        self._reached = -1  # this epoch
        self._own: dict[int, float] = {}  # epoch → this peer's loss
        self._reports: dict[int, dict[str, EpochReported]] = {}  # epoch → peer → what it told
        self._credited: dict[int, Mapping[str, float]] = {}  # epoch → peer → samples that its round has counted
        self._losses: dict[int, float] = {}  # epoch → what follows from that, until more is told
        self._news: set[int] = set()  # epochs of which more has been told since `news` was asked
        self._grown: dict[str, float] | None = None  # peer → its part of the last epochs, until more is told

    def note(self, event: Event) -> None:
        match event:
            case EpochAdvanced():
                with self._lock:
                    self._advance(event)
            # Anybody can claim anything of epochs that are yet to come, so only the nearest of those are kept.
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
        if event.samples:  # otherwise its state was another peer's, and nobody knows how long it took
            self.last = event
            if event.seconds > 0:
                self.lengths.append(event.seconds)
        if event.loss is not None:
            self._own[event.epoch] = event.loss
        for by_epoch in (self._own, self._reports, self._credited, self._losses):
            _forget(by_epoch, self._reached)
        self._grown = None

    def losses(self) -> list[float]:
        """The swarm's, by epoch, up to the one that this peer has reached; its own where nobody has told anything."""
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
        """Each peer's part, 0 to 1, of the samples that all of them computed over the last epochs.

        Counts of samples run since a peer's start, so what it computed is how much its count grew; a peer that reported
        once is not in the result. While nobody reported twice, `rates` (of those present) decide.
        """
        with self._lock:
            if self._grown is None:
                self._grown = self._parts_of_growth()
            return self._grown or _parts(rates)

    def _parts_of_growth(self) -> dict[str, float]:
        least: dict[str, int] = {}
        most: dict[str, int] = {}
        twice: set[str] = set()
        for epoch, reports in self._reports.items():
            if self._reached - RECENT_EPOCHS < epoch <= self._reached:
                for peer, report in reports.items():
                    if peer in least:
                        twice.add(peer)
                    least[peer] = min(least.get(peer, report.samples), report.samples)
                    most[peer] = max(most.get(peer, report.samples), report.samples)
        return _parts({peer: most[peer] - least[peer] for peer in least if peer in twice})


def _forget(by_epoch: dict[int, Any], reached: int) -> None:
    for epoch in [each for each in by_epoch if not reached - LOSSES < each <= reached + 2]:
        del by_epoch[epoch]


def _loss(reports: Iterable[EpochReported], credited: Mapping[str, float]) -> float:
    """The median of what those tell whose samples the round has counted, weighted by these; so what one of three and
    more claims moves it no further than to the next one's. Of two the mean. Where none of these has told anything, or
    nobody knows whom the round has counted, all count alike."""
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
