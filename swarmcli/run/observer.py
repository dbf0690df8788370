"""A thread that looks at the run every few seconds: for the history that the dashboard draws, and for alerts."""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable, Iterable
from types import TracebackType

from swarmcli.events import EpochLoss, Events, Noticed, RunObserved
from swarmcli.run import views
from swarmcli.run.alerts import Alerts
from swarmcli.run.values import Alert, RunStatus
from swarmcli.run.webhook import Webhook

logger = logging.getLogger(__name__)


class Observer:
    """A context manager: it looks while the block lasts."""

    def __init__(
        self,
        look: Callable[[], RunStatus],
        events: Events,
        alerts: Alerts,
        webhook: str | None = None,
        news: Callable[[], Iterable[EpochLoss]] = tuple,
    ) -> None:
        """`look`: that of a DashboardSource, which shows `alerts`. `webhook`: where alerts are posted; None: nowhere.
        `news`: that of a RunWatch."""
        self._look, self._news = look, news
        self._events = events
        self._webhook = Webhook(webhook, self._warn) if webhook else None
        self._alerts = alerts
        self._leaving = threading.Event()
        self._thread = threading.Thread(target=self._run, name="swarm-observer", daemon=True)

    def observe(self) -> None:
        """Looks once."""
        self._tell_news()
        status = self._look()
        counts = views.count(status.peers)
        loss = status.losses[-1] if status.losses and math.isfinite(status.losses[-1]) else None
        self._events.emit(RunObserved(status.epoch, counts.alive, counts.trainers, status.samples_per_second, loss))
        begun, ended = self._alerts.look(status)
        for alert in begun:
            self._warn(alert.text)
            if self._webhook is not None:
                self._webhook.post(message_of(alert, status))
        for alert in ended:
            self._events.emit(Noticed("info", f"This is over: {alert.text.partition('. ')[0]}"))

    def _tell_news(self) -> None:
        for told in self._news():
            self._events.emit(told)

    def _warn(self, text: str) -> None:
        self._events.emit(Noticed("warning", text))

    def _run(self) -> None:
        while not self._leaving.wait(4.0):  # the finest scale of the history
            try:
                self.observe()
            except Exception:
                logger.exception("the run could not be looked at")  # the next look may do better

    def __enter__(self) -> Observer:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._leaving.set()
        self._thread.join()
        self._tell_news()
        if self._webhook is not None:
            self._webhook.close()


def message_of(alert: Alert, status: RunStatus) -> dict[str, object]:
    """Returns what a webhook gets; `text` is what Slack and its like show."""
    return {
        "id": alert.id,
        "kind": alert.kind,
        "text": f"{status.run_id}: {alert.text}",
        "since": alert.since,
        "run_id": status.run_id,
        "epoch": status.epoch,
        "told_by": status.name,
    }
