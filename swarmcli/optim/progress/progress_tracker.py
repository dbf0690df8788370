"""ProgressTracker: how far the swarm has come in this epoch, for programs without coroutines."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, TypeVar, cast

from swarmcli.optim.progress.progress import (
    GlobalTrainingProgress,
    LocalTrainingProgress,
    PerformanceEMA,
    RefreshOptions,
)
from swarmcli.optim.progress.tracker import ProgressTrackerCore

if TYPE_CHECKING:
    from swarmcli.dht import DHT

T = TypeVar("T")


class ProgressTracker:
    """The tracker for programs without coroutines: reports and estimates on the DHT's loop thread.

    See ProgressTrackerCore for what each name means. `shutdown` withdraws this peer's record.
    """

    def __init__(
        self,
        dht: DHT,
        prefix: str,
        target_batch_size: int,
        *,
        client_mode: bool | None = None,
        min_refresh_period: float = 0.5,
        max_refresh_period: float = 10.0,
        default_refresh_period: float = 3.0,
        expected_drift_peers: float = 3.0,
        expected_drift_rate: float = 0.2,
        performance_ema_alpha: float = 0.1,
        metadata_expiration: float = 60.0,
        start: bool,
    ) -> None:
        options = RefreshOptions(
            min_refresh_period,
            max_refresh_period,
            default_refresh_period,
            expected_drift_peers,
            expected_drift_rate,
            metadata_expiration,
        )
        self._dht = dht
        self._core = ProgressTrackerCore(
            dht.node,
            prefix,
            target_batch_size,
            options=options,
            performance_ema_alpha=performance_ema_alpha,
            client_mode=client_mode,
        )
        self._running = False
        if start:
            self.run_in_background()

    def run_in_background(self) -> None:
        """Begins to report and to read. Raises RuntimeError if it runs already."""
        if self._running:
            raise RuntimeError("this tracker has been started already")
        self._running = True
        self._dht.run_coroutine(self._core.start())

    def report_local_progress(
        self, local_epoch: int, samples_accumulated: int, update_global_samples: bool = True
    ) -> None:
        """See ProgressTrackerCore."""
        core = self._core
        self._call(lambda: core.report_local_progress(local_epoch, samples_accumulated, update_global_samples))

    @contextlib.contextmanager
    def pause_updates(self) -> Iterator[None]:
        """See ProgressTrackerCore."""
        pause = self._core.pause_updates()
        self._call(pause.__enter__)
        try:
            yield
        finally:
            self._call(lambda: pause.__exit__(None, None, None))

    def update_epoch(self, new_epoch: int | None = None) -> int:
        """See ProgressTrackerCore; only inside `pause_updates`."""
        return self._call(lambda: self._core.update_epoch(new_epoch))

    @property
    def local_progress(self) -> LocalTrainingProgress:
        return self._core.local_progress

    @property
    def global_progress(self) -> GlobalTrainingProgress:
        return self._core.global_progress

    @property
    def global_epoch(self) -> int:
        return self._core.global_epoch

    @property
    def accumulated_enough_samples(self) -> bool:
        return self._core.accumulated_enough_samples

    @property
    def estimated_next_update_time(self) -> float:
        return self._core.estimated_next_update_time

    @property
    def ready_to_update_epoch(self) -> bool:
        return self._core.ready_to_update_epoch

    @property
    def performance_ema(self) -> PerformanceEMA:
        return self._core.performance_ema

    def shutdown(self) -> None:
        """Ends reports and reads and withdraws this peer's record. Idempotent."""
        if self._running:
            self._running = False
            self._dht.run_coroutine(self._core.shutdown())

    def _call(self, action: Callable[[], T]) -> T:
        async def on_loop() -> T:
            return action()

        return cast(T, self._dht.run_coroutine(on_loop()))
