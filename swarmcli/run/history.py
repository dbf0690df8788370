"""What the last epochs of a run were like, by this peer's own steps and by what others report of theirs."""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Iterable, Mapping
from typing import TypeVar

from swarmcli.events import EpochAdvanced, EpochReported, Event

RECENT_EPOCHS = 10  # by which the run's end is estimated, and over which the peers' shares are taken
LOSSES = 60  # epochs whose loss is kept
T = TypeVar("T")


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
        self._means: dict[int, float] = {}  # epoch → the mean of what was told, until more is
        self._grown: dict[str, float] | None = None  # peer → its part of the last epochs, until more is told

    def note(self, event: Event) -> None:
        match event:
            case EpochAdvanced():
                with self._lock:
                    self._advance(event)
            # Of epochs that are yet to come anybody can claim anything, so only the nearest of those are kept.
            case EpochReported(epoch=epoch) if self._reached - LOSSES < epoch <= self._reached + 2:
                with self._lock:
                    self._reports.setdefault(epoch, {})[event.peer] = event
                    self._means.pop(epoch, None)
                    self._grown = None

    def _advance(self, event: EpochAdvanced) -> None:
        self._reached = event.epoch
        if event.samples:  # otherwise its state was another peer's, and nobody knows how long it took
            self.last = event
            if event.seconds > 0:
                self.lengths.append(event.seconds)
        if event.loss is not None:
            self._own[event.epoch] = event.loss
        _forget(self._own, self._reached)
        _forget(self._reports, self._reached)
        _forget(self._means, self._reached)
        self._grown = None

    def losses(self) -> list[float]:
        """The swarm's, by epoch, up to the one that this peer has reached: the mean of what was reported, weighted by
        rates, and this peer's own where nobody has told anything."""
        with self._lock:
            for epoch, reports in self._reports.items():
                if epoch not in self._means:
                    self._means[epoch] = _mean(reports.values())
            told = {epoch: mean for epoch, mean in self._means.items() if epoch <= self._reached}
            return [loss for _, loss in sorted((self._own | told).items())][-LOSSES:]

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


def _forget(by_epoch: dict[int, T], reached: int) -> None:
    for epoch in [each for each in by_epoch if not reached - LOSSES < each <= reached + 2]:
        del by_epoch[epoch]


def _mean(reports: Iterable[EpochReported]) -> float:
    weighted = [(report.loss, max(report.samples_per_second, 1e-3)) for report in reports]
    return math.fsum(loss * weight for loss, weight in weighted) / math.fsum(weight for _, weight in weighted)


def _parts(amounts: Mapping[str, float]) -> dict[str, float]:
    total = math.fsum(amounts.values())
    return {peer: amount / total for peer, amount in amounts.items()} if 0.0 < total < math.inf else {}
