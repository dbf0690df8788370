"""The arithmetic of progress: from what peers report to when the epoch ends. Pure functions, no clock, no network.

All times are seconds; moments are swarm time (`Clock.now()`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from pydantic import BaseModel, ConfigDict, Field

LONGEST_DRAWN = 15.0  # seconds; reports come every three while there is news, and are read every ten
FUTURE_TOLERANCE = 5.0  # seconds: clocks are corrected, but not to the last second


class LocalTrainingProgress(BaseModel):
    """What one peer says about its own share of the epoch; the value of its subkey under `{prefix}_progress`."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    peer_id: bytes = Field(min_length=32, max_length=32)
    epoch: int = Field(ge=0, lt=1 << 48)
    samples_accumulated: int = Field(ge=0, lt=1 << 48)
    samples_per_second: float = Field(ge=0.0, lt=1e12, allow_inf_nan=False)
    time: float = Field(ge=0.0, allow_inf_nan=False)
    client_mode: bool


@dataclass(frozen=True, slots=True)
class GlobalTrainingProgress:
    """Where the swarm stands, as far as this peer knows."""

    epoch: int  # the highest among listening peers and this one
    samples_accumulated: int  # reported by the peers at that epoch
    target_batch_size: int
    num_peers: int  # this one included
    num_clients: int  # of which cannot be dialed
    eta_next_epoch: float  # swarm time at which the samples are expected to suffice; infinite if nobody computes
    next_fetch_time: float  # swarm time at which to look again


@dataclass(frozen=True, slots=True)
class RefreshOptions:
    """How often the progress keys are read. Between the bounds, more often the sooner the epoch ends."""

    min_refresh_period: float = 0.5
    max_refresh_period: float = 10.0
    default_refresh_period: float = 3.0  # while nobody else is there
    expected_drift_peers: float = 3.0  # so many may join before the epoch ends
    expected_drift_rate: float = 0.2  # or this fraction of those that are there
    metadata_expiration: float = 60.0  # reports live so long, and are repeated at half of it

    def __post_init__(self) -> None:
        for name in ("min_refresh_period", "max_refresh_period", "default_refresh_period", "metadata_expiration"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name}={getattr(self, name)!r}: expected a positive number of seconds")
        if self.min_refresh_period > self.max_refresh_period:
            raise ValueError(
                f"min_refresh_period={self.min_refresh_period} is above max_refresh_period={self.max_refresh_period}"
            )
        if self.expected_drift_peers < 0 or self.expected_drift_rate < 0:
            raise ValueError("expected_drift_peers and expected_drift_rate: expected numbers that are not negative")


def estimate_global_progress(
    others: Iterable[LocalTrainingProgress],
    local: LocalTrainingProgress,
    *,
    target_batch_size: int,
    now: float,
    options: RefreshOptions,
    latest_epoch: int | None = None,
    overdue: int = 0,
) -> GlobalTrainingProgress:
    """Sums up the run from the others' reports and this peer's live counts.

    A report of this peer itself among the others is older than `local` and ignored, as are stale and future-dated
    reports. Rates of all peers count towards the time that remains, also of those a step behind: they will catch up.

    `latest_epoch` is the highest that others are believed to have reached; reports from beyond it, which nothing
    bears out, add no samples and lead nobody on. None: everyone is believed. `overdue` counts the readings since the
    epoch should have ended by such estimates.
    """
    oldest, newest = now - options.metadata_expiration, now + FUTURE_TOLERANCE
    reports = [r for r in others if oldest <= r.time <= newest and r.peer_id != local.peer_id]
    everyone = [*reports, local]
    believed = [r.epoch for r in reports if not r.client_mode and (latest_epoch is None or r.epoch <= latest_epoch)]
    epoch = max([local.epoch, *believed])
    at_epoch = [r for r in everyone if r.epoch == epoch]
    accumulated = sum(r.samples_accumulated for r in at_epoch)
    estimated = sum(r.samples_accumulated + max(0.0, now - r.time) * r.samples_per_second for r in at_epoch)
    seconds_left = seconds_until(target_batch_size - estimated, sum(r.samples_per_second for r in everyone))
    period = options.default_refresh_period
    if reports:
        period = refresh_period(seconds_left, len(everyone), options, overdue)
    return GlobalTrainingProgress(
        epoch=epoch,
        samples_accumulated=accumulated,
        target_batch_size=target_batch_size,
        num_peers=len(everyone),
        num_clients=sum(r.client_mode for r in everyone),
        eta_next_epoch=now + seconds_left,
        next_fetch_time=now + period,
    )


def expected_samples(
    report: LocalTrainingProgress, epoch: int, began: float, target_batch_size: int, now: float
) -> float:
    """How many samples of `epoch`, which began at `began`, this peer should have by now.

    All who know a report expect the same, however long ago each has read it. A report of the epoch before was made
    ahead of the step that everyone took together. No report is drawn out for longer than they take to come.
    """
    if report.epoch == epoch:
        samples, since = report.samples_accumulated, report.time
    elif report.epoch == epoch - 1:
        samples, since = 0, began
    else:
        return 0.0
    return min(target_batch_size, samples + min(max(0.0, now - since), LONGEST_DRAWN) * report.samples_per_second)


def seconds_until(samples: float, samples_per_second: float) -> float:
    """How long `samples` more will take; infinite if nobody computes."""
    if samples <= 0:
        return 0.0
    return samples / samples_per_second if samples_per_second > 0 else math.inf


def refresh_period(seconds_left: float, peers: int, options: RefreshOptions, overdue: int = 0) -> float:
    """Shorter than the time that remains, since peers that may yet join would shorten that.

    Reports that promise an end which does not come (a round takes long, or somebody lies) are read less and less
    often: the shortest period doubles with every reading that was overdue.
    """
    expected = max(peers + options.expected_drift_peers, peers * (1 + options.expected_drift_rate))
    shortest = options.min_refresh_period * 2.0 ** min(overdue, 32)
    return min(max(seconds_left * peers / expected, shortest), options.max_refresh_period)


class PerformanceEMA:
    """Samples per second of this peer: an exponential average of seconds per sample, corrected for its start.

    Time in which the peer did not compute (averaging, downloading) is left out by calling `resume` after it.
    """

    def __init__(self, alpha: float = 0.1) -> None:
        if not 0 < alpha <= 1:
            raise ValueError(f"performance_ema_alpha={alpha!r}: expected a number above 0 and at most 1")
        self._alpha = alpha
        self._seconds_per_sample = 0.0
        self._weight = 0.0  # how much of the average is filled; divides out the zero that it starts from
        self._since: float | None = None

    @property
    def samples_per_second(self) -> float:
        """0 until two moments are known."""
        return self._weight / self._seconds_per_sample if self._seconds_per_sample > 0 else 0.0

    def resume(self, moment: float) -> None:
        """From this moment (loop time) on the peer computes."""
        self._since = moment

    def update(self, samples: int, moment: float) -> None:
        """`samples` were done between the last call and this moment (loop time)."""
        if self._since is not None and moment > self._since and samples > 0:
            self._seconds_per_sample += self._alpha * ((moment - self._since) / samples - self._seconds_per_sample)
            self._weight += self._alpha * (1 - self._weight)
        self._since = moment
