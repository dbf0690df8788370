"""ProgressTracker: how far the swarm has come in this epoch, for programs without coroutines."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, TypeVar

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from swarmcli.averaging.shell import CoreRunner
from swarmcli.network.identity import Identity
from swarmcli.optim.config import RefreshOptions
from swarmcli.optim.peers import progress

if TYPE_CHECKING:
    from swarmcli.dht import DHT

_SHUTDOWN_TIMEOUT = 5.0  # seconds, most of them for withdrawing the record
T = TypeVar("T")


class ProgressTracker:
    """The tracker for programs without coroutines: it reports and estimates on the DHT's loop thread.

    ProgressTrackerCore and RefreshOptions explain the names. Periods and expirations are seconds.

    status_loglevel  level of `logging` at which the swarm's progress goes to the log after each reading
    private_key      Ed25519 identity under which this peer reports, instead of the DHT's: so several trackers of one
                     process count as several peers, and one that moves to another machine keeps its record
    daemon           False: the process stays alive after its main thread has ended, until `shutdown` is called

    Raises ValueError or TypeError, which names the argument, for one that makes no sense.
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
        status_loglevel: int = logging.DEBUG,
        private_key: Ed25519PrivateKey | Identity | None = None,
        daemon: bool = True,
        start: bool,
    ) -> None:
        if isinstance(status_loglevel, bool) or not isinstance(status_loglevel, int) or status_loglevel < 0:
            expected = "expected a level of the logging module, such as logging.INFO"
            raise ValueError(f"status_loglevel={status_loglevel!r}: {expected}")
        options = RefreshOptions(
            min_refresh_period,
            max_refresh_period,
            default_refresh_period,
            expected_drift_peers,
            expected_drift_rate,
            metadata_expiration,
        )
        self._dht = dht
        self._core = progress.ProgressTrackerCore(
            dht.node,
            prefix,
            target_batch_size,
            options=options,
            performance_ema_alpha=performance_ema_alpha,
            client_mode=client_mode,
            status_loglevel=status_loglevel,
            identity=_identity(private_key),
        )
        self._runner: CoreRunner[progress.ProgressTrackerCore] = CoreRunner(
            f"the tracker of {prefix!r}", _SHUTDOWN_TIMEOUT, daemon=daemon
        )
        if start:
            self.run_in_background()

    def run_in_background(self) -> None:
        """Begins to report and to read. Raises RuntimeError if it runs already or has been shut down."""

        async def started() -> progress.ProgressTrackerCore:
            await self._core.start()
            return self._core

        self._runner.start(started, wait=True, timeout=None)

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
    def local_progress(self) -> progress.LocalTrainingProgress:
        return self._core.local_progress

    @property
    def global_progress(self) -> progress.GlobalTrainingProgress:
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
    def dropped_reports(self) -> int:
        return self._core.dropped_reports

    @property
    def performance_ema(self) -> progress.PerformanceEMA:
        return self._core.performance_ema

    def is_alive(self) -> bool:
        """Whether it reports and reads."""
        return self._runner.is_alive and self._dht.is_alive()

    def shutdown(self) -> None:
        """Ends reporting and reading, and withdraws this peer's record. Idempotent."""
        self._runner.shutdown()

    def _call(self, action: Callable[[], T]) -> T:
        async def on_loop() -> T:
            return action()

        return self._dht.run_coroutine(on_loop())


def _identity(private_key: Ed25519PrivateKey | Identity | None) -> Identity | None:
    if private_key is None or isinstance(private_key, Identity):
        return private_key
    if not isinstance(private_key, Ed25519PrivateKey):
        raise TypeError(f"private_key: expected an Ed25519 private key, got {type(private_key).__name__}")
    return Identity(private_key)
