"""How far the swarm is in its epoch: what peers report, when by that the epoch ends, and the tracker.

All times are seconds; moments are swarm time (`Clock.now()`).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import pydantic
from pydantic import BaseModel, ConfigDict, Field

from swarmcli.dht import OwnedSubkey
from swarmcli.dht.schema import SchemaValidator
from swarmcli.errors import SwarmError
from swarmcli.network.identity import Identity, PeerID
from swarmcli.network.loop_thread import loop_time, set_within
from swarmcli.network.task_owner import TaskOwner
from swarmcli.optim.config import RefreshOptions
from swarmcli.optim.peers.board import Board

if TYPE_CHECKING:
    from swarmcli.dht import DHTNode


FUTURE_TOLERANCE = 5.0  # seconds by which a report may be in the future: clocks are corrected, but not to the second
FAR_AHEAD = 16  # epochs beyond all others; a single report of more than that leads nobody on
LONGEST_DRAWN = 15.0  # seconds for which a report is drawn out; with news it comes every three, and is read every ten


class LocalTrainingProgress(BaseModel):
    """One peer's word about its own part of the epoch; the value of its subkey under `{prefix}_progress`."""

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

    epoch: int  # the highest of this peer and of listening ones
    samples_accumulated: int  # that the peers at that epoch report
    target_batch_size: int
    num_peers: int  # this one included
    num_clients: int  # those of them that nobody can dial
    eta_next_epoch: float  # swarm time at which the samples should suffice; infinite if nobody computes
    next_fetch_time: float  # swarm time at which to look again


def estimate_global_progress(
    others: Iterable[LocalTrainingProgress],
    local: LocalTrainingProgress,
    *,
    target_batch_size: int,
    now: float,
    options: RefreshOptions,
    latest_epoch: int | None = None,
) -> GlobalTrainingProgress:
    """Sums up the run from the others' reports and this peer's own count.

    A report of this peer among the others is older than `local` and ignored, as are stale reports and those from the
    future. The rates of all peers count towards the time that is left, even of those an epoch behind: they catch up.

    `latest_epoch`: the highest that others can have reached; reports of later ones add no samples and lead nobody on.
    None: only reports are known, see `borne_out`.
    """
    oldest, newest = now - options.metadata_expiration, now + FUTURE_TOLERANCE
    reports = [r for r in others if oldest <= r.time <= newest and r.peer_id != local.peer_id]
    everyone = [*reports, local]
    listening = [r.epoch for r in reports if not r.client_mode]
    latest = borne_out(local.epoch, listening) if latest_epoch is None else latest_epoch
    epoch = max([local.epoch, *(each for each in listening if each <= latest)])
    at_epoch = [r for r in everyone if r.epoch == epoch]
    accumulated = sum(r.samples_accumulated for r in at_epoch)
    estimated = sum(r.samples_accumulated + max(0.0, now - r.time) * r.samples_per_second for r in at_epoch)
    seconds_left = seconds_until(target_batch_size - estimated, sum(r.samples_per_second for r in everyone))
    period = options.default_refresh_period
    if reports:
        period = refresh_period(seconds_left, len(everyone), options)
    return GlobalTrainingProgress(
        epoch=epoch,
        samples_accumulated=accumulated,
        target_batch_size=target_batch_size,
        num_peers=len(everyone),
        num_clients=sum(r.client_mode for r in everyone),
        eta_next_epoch=now + seconds_left,
        next_fetch_time=now + period,
    )


def borne_out(own: int, reported: Iterable[int]) -> int:
    """The highest of these epochs that is not a lone claim far ahead of all others. If only one peer reports, its word,
    which nothing can be compared with, counts."""
    ranked = sorted(reported)
    if len(ranked) == 1:
        return max(own, *ranked)
    while ranked and ranked[-1] > max(own, *ranked[:-1], 0) + FAR_AHEAD:
        ranked.pop()
    return max([own, *ranked])


def expected_samples(
    report: LocalTrainingProgress, epoch: int, began: float, target_batch_size: int, now: float
) -> float:
    """How many samples of `epoch`, which began at `began`, the peer of this report should have by now.

    All who know a report expect the same, however long ago each has read it. A young report of an earlier epoch was
    made before a step that everyone took: its peer began this epoch with the others. A report is drawn out for no
    longer than the next one may take to come.
    """
    if report.epoch == epoch:
        samples, since = report.samples_accumulated, report.time
    elif report.epoch < epoch and now - report.time < LONGEST_DRAWN:
        samples, since = 0, began
    else:
        return 0.0
    return min(target_batch_size, samples + min(max(0.0, now - since), LONGEST_DRAWN) * report.samples_per_second)


def seconds_until(samples: float, samples_per_second: float) -> float:
    """How long `samples` more will take; infinite if nobody computes."""
    if samples <= 0:
        return 0.0
    return samples / samples_per_second if samples_per_second > 0 else math.inf


def refresh_period(seconds_left: float, peers: int, options: RefreshOptions) -> float:
    """Seconds until the next look: less than `seconds_left`, since peers that may yet join would shorten that."""
    expected = max(peers + options.expected_drift_peers, peers * (1 + options.expected_drift_rate))
    return min(max(seconds_left * peers / expected, options.min_refresh_period), options.max_refresh_period)


class PerformanceEMA:
    """Samples per second of this peer: an exponential average of seconds per sample, corrected for its start.

    Call `resume` after time in which the peer did not compute (averaging, downloading): that time does not count.
    """

    def __init__(self, alpha: float = 0.1) -> None:
        if not 0 < alpha <= 1:
            raise ValueError(f"performance_ema_alpha={alpha!r}: expected a number above 0 and at most 1")
        self._alpha = alpha
        self._seconds_per_sample = 0.0
        self._weight = 0.0  # the part of the average that is filled; dividing by it removes the zero at its start
        self._since: float | None = None

    @property
    def samples_per_second(self) -> float:
        """0 until two moments are known."""
        return self._weight / self._seconds_per_sample if self._seconds_per_sample > 0 else 0.0

    def resume(self, moment: float) -> None:
        """From this moment (loop time) on the peer computes."""
        self._since = moment

    def scale(self, factor: float) -> None:
        """From now on the peer computes `factor` times as quickly: the average need not learn that step by step."""
        self._seconds_per_sample /= factor

    def update(self, samples: int, moment: float) -> None:
        """The peer has computed `samples` between the last call and this moment (loop time)."""
        if self._since is not None and moment > self._since and samples > 0:
            self._seconds_per_sample += self._alpha * ((moment - self._since) / samples - self._seconds_per_sample)
            self._weight += self._alpha * (1 - self._weight)
        self._since = moment


logger = logging.getLogger(__name__)


class ProgressKeys(pydantic.BaseModel):
    """The schema of `{prefix}_progress` for the DHT's validators."""

    progress: dict[OwnedSubkey, LocalTrainingProgress]


class ProgressTrackerCore:
    """Tells others this peer's samples and estimates everyone's, in the background.

    All methods but `start`, `refresh` and `shutdown` return at once, with what is known at the moment. Reports go out
    at most once per `min_refresh_period`, while there is news at least once per `default_refresh_period`, and again
    after half of their expiration.
    """

    def __init__(
        self,
        node: DHTNode,
        prefix: str,
        target_batch_size: int,
        *,
        options: RefreshOptions | None = None,
        performance_ema_alpha: float = 0.1,
        client_mode: bool | None = None,
        status_loglevel: int = logging.DEBUG,
        identity: Identity | None = None,
        latest_epoch: Callable[[], int] | None = None,
    ) -> None:
        """`status_loglevel`: at which the swarm's progress goes to the log after each reading. `identity`: under which
        this peer reports; None: the node's own. `latest_epoch`: returns the highest epoch that others can have reached,
        if the caller knows more than reports say. Raises ValueError.
        """
        if target_batch_size <= 0:
            raise ValueError(f"target_batch_size={target_batch_size!r}: expected a positive number of samples")
        self.options = options or RefreshOptions()
        self.target_batch_size = target_batch_size
        self.performance_ema = PerformanceEMA(performance_ema_alpha)
        self._hidden = bool(client_mode)
        self._node = node
        self._clock = node.endpoint.clock
        self._prefix, self._status_loglevel, self._latest_epoch = prefix, status_loglevel, latest_epoch
        expiration = self.options.metadata_expiration
        self._board = Board(node, f"{prefix}_progress", LocalTrainingProgress, expiration, identity)
        self._own_id = bytes(self._board.owner)
        # The others' reports as last read: well formed, and signed by the peers that they are about.
        self.reports: tuple[LocalTrainingProgress, ...] = ()
        self._changed = asyncio.Event()  # there is something to report
        self._urgent = asyncio.Event()  # others act on it: another epoch, or enough samples
        self._moved = asyncio.Event()  # the epoch has changed: the others' reports may be old
        self._tasks = TaskOwner()
        self._reports = False  # whether this peer reports
        self._rests = False  # it computes nothing, and says so
        self._seen_epoch = 0, self._clock.now()  # the present epoch, and since when
        self._pauses = 0  # blocks of pause_updates that are open
        self.local_progress = self._describe(epoch=0, samples=0)
        self.global_progress = self._estimate()
        node.add_validators([SchemaValidator(ProgressKeys, prefix=prefix)])

    async def start(self, *, report: bool = True) -> None:
        """Begins to read the others' reports and, unless `report` is off, to write this peer's."""
        self.performance_ema.resume(loop_time())
        self._reports = report
        steps = (self._keep_reporting, self._keep_reading) if report else (self._keep_reading,)
        self._tasks.keep(self._node.endpoint.events, *steps)

    async def shutdown(self) -> None:
        """Ends the background work and withdraws this peer's record. Idempotent."""
        await self._tasks.close()
        with contextlib.suppress(SwarmError):  # a record that cannot be withdrawn expires by itself
            await self._board.withdraw()

    # what this peer does

    def report_local_progress(
        self, local_epoch: int, samples_accumulated: int, update_global_samples: bool = True
    ) -> None:
        """Takes note of this peer's samples towards the end of `local_epoch`, and updates its rate.

        With `update_global_samples` the estimate of everyone's progress takes them in at once.
        """
        gained = samples_accumulated - self.local_progress.samples_accumulated
        if local_epoch == self.local_progress.epoch and gained > 0:
            self.performance_ema.update(gained, loop_time())
        self.local_progress = self._describe(local_epoch, samples_accumulated)
        if update_global_samples:
            had_enough = self.accumulated_enough_samples
            self.global_progress = self._estimate()
            if self.accumulated_enough_samples and not had_enough:
                self._urgent.set()
        self._changed.set()

    @contextlib.contextmanager
    def pause_updates(self) -> Iterator[None]:
        """Inside the block, for a step, estimates do not change; its time does not count in this peer's rate."""
        self._pauses += 1
        try:
            yield
        finally:
            self._pauses -= 1
            self.performance_ema.resume(loop_time())

    def update_epoch(self, new_epoch: int | None = None) -> int:
        """Moves on to `new_epoch` (None: the next one) with no samples, and returns it. Raises RuntimeError outside of
        `pause_updates`."""
        if not self._pauses:
            raise RuntimeError("update_epoch changes what estimates are made of: call it inside pause_updates()")
        epoch = self.local_progress.epoch + 1 if new_epoch is None else new_epoch
        self.local_progress = self._describe(epoch, 0)
        self._seen_epoch = epoch, self._clock.now()
        self.global_progress = self._estimate()
        self._changed.set()
        self._urgent.set()
        self._moved.set()
        return epoch

    def spare(self, line: float) -> None:
        """Reads and writes less, for a line of `line` bytes per second; infinite: the line is quick."""
        self._board.line = line

    def rest(self, rests: bool) -> None:
        """From now on this peer computes nothing, and reports the rate 0 at once; or (False) it computes again, as
        quickly as before."""
        self._rests = rests
        self.performance_ema.resume(loop_time())
        self.report_local_progress(self.local_progress.epoch, self.local_progress.samples_accumulated)
        self._urgent.set()

    @property
    def client_mode(self) -> bool:
        """Whether this peer reports that nobody can dial it directly."""
        return self._hidden or self._node.client_mode

    # what is known

    @property
    def global_epoch(self) -> int:
        return self.global_progress.epoch

    @property
    def accumulated_enough_samples(self) -> bool:
        return self.global_progress.samples_accumulated >= self.target_batch_size

    @property
    def estimated_next_update_time(self) -> float:
        """Swarm time at which the epoch should end; now, if this peer is behind."""
        if self.global_epoch > self.local_progress.epoch:
            return self._clock.now()
        return self.global_progress.eta_next_epoch

    @property
    def ready_to_update_epoch(self) -> bool:
        """Whether this peer is behind, the samples suffice, or by the rates they should by now."""
        return (
            self.global_epoch > self.local_progress.epoch
            or self.accumulated_enough_samples
            or self._clock.now() >= self.estimated_next_update_time
        )

    def reported(self, epoch: int) -> dict[PeerID, float]:
        """Peer → its samples towards the end of this epoch, as last reported; this peer included."""
        everyone = (self.local_progress, *self.reports)
        return {PeerID(each.peer_id): float(each.samples_accumulated) for each in everyone if each.epoch == epoch}

    def expected(self) -> dict[PeerID, tuple[float, float]]:
        """Peer → its samples towards the end of the present epoch, as they should be at this moment, and its samples
        per second; this peer included if it reports. For people: rounds begin by counted samples."""
        epoch, now = self.global_epoch, self._clock.now()
        if self._seen_epoch[0] != epoch:
            self._seen_epoch = epoch, now
        reports = [*self.reports, self.local_progress] if self._reports else self.reports
        began = self._seen_epoch[1]
        return {
            PeerID(report.peer_id): (
                expected_samples(report, epoch, began, self.target_batch_size, now),
                report.samples_per_second,
            )
            for report in reports
        }

    @property
    def seconds_to_round(self) -> float:
        """Seconds that the others need to end this peer's epoch if it computes no more; infinite if no rate is known.
        From any thread."""
        if self.global_epoch > self.local_progress.epoch:
            return 0.0
        expected = self.expected()
        missing = self.target_batch_size - sum(samples for samples, _ in expected.values())
        return seconds_until(missing, sum(rate for peer, (_, rate) in expected.items() if peer != self._board.owner))

    @property
    def dropped_reports(self) -> int:
        """How many of the others' reports were malformed, or not signed by their peers."""
        return self._board.dropped

    # how it comes to be known

    async def refresh(self) -> GlobalTrainingProgress:
        """Reads the others' reports now. Raises SwarmError if the DHT cannot be read."""
        records = await self._board.refresh()
        self.reports = tuple(r for peer, r in records.items() if peer == r.peer_id and r.peer_id != self._own_id)
        if not self._pauses:
            self.global_progress, now = self._estimate(), self._clock.now()
            progress = self.global_progress
            logger.log(
                self._status_loglevel,
                "%s: %d of %d samples for epoch %d from %d peers; ends in %.2f s, next look in %.2f s",
                self._prefix,
                progress.samples_accumulated,
                progress.target_batch_size,
                progress.epoch,
                progress.num_peers,
                progress.eta_next_epoch - now,
                progress.next_fetch_time - now,
            )
        return self.global_progress

    def _describe(self, epoch: int, samples: int) -> LocalTrainingProgress:
        return LocalTrainingProgress(
            peer_id=self._own_id,
            epoch=epoch,
            samples_accumulated=samples,
            samples_per_second=0.0 if self._rests else self.performance_ema.samples_per_second,
            time=self._clock.now(),
            client_mode=self.client_mode,
        )

    def _estimate(self) -> GlobalTrainingProgress:
        others = self.reports
        return estimate_global_progress(
            others,
            self.local_progress,
            target_batch_size=self.target_batch_size,
            now=self._clock.now(),
            options=replace(self.options, metadata_expiration=self._board.lives),
            latest_epoch=self._latest_epoch() if others and self._latest_epoch is not None else None,
        )

    async def _keep_reporting(self) -> None:
        published: LocalTrainingProgress | None = None
        while True:
            # Cleared before the report is taken: what changes while the DHT stores it goes out with the next one.
            self._changed.clear()
            self._urgent.clear()
            report = self.local_progress
            if report is published:  # repeated, so it is true now; a new report has the time at which it was made
                report = report.model_copy(update={"time": self._clock.now()})
            published = self.local_progress
            try:
                await self._board.publish(report)
            except SwarmError as error:
                logger.warning("progress was not stored: %s", error)
            least = max(self.options.min_refresh_period, self._board.turn_in())
            await asyncio.sleep(least)  # whatever comes, this peer writes no more often
            await set_within(self._urgent, self._report_period - least)
            await set_within(self._changed, self._board.lives / 2 - self._report_period)

    @property
    def _report_period(self) -> float:
        """Seconds between two reports: as often as others read them. They add to a report what its rate makes of the
        time since, so until the epoch ends more reports would say little more."""
        left = self.global_progress.eta_next_epoch - self._clock.now()
        period = refresh_period(left, self.global_progress.num_peers, self.options)
        most = max(self.options.default_refresh_period, self.options.min_refresh_period)
        return max(min(period, most), self._board.renewal)

    async def _keep_reading(self) -> None:
        self._moved.clear()  # before reading: if the epoch ends meanwhile, this reads once more
        try:
            await self.refresh()
        except SwarmError as error:
            logger.warning("progress was not read: %s", error)
        await asyncio.sleep(max(self.options.min_refresh_period, self._board.look))
        await set_within(self._moved, self.global_progress.next_fetch_time - self._clock.now())
