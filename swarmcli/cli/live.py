"""What a running peer shows: on a terminal a view that is redrawn in place, elsewhere a line for each thing."""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from types import TracebackType

from rich.console import Console
from rich.live import Live
from rich.text import Text

from coordinator_web.source import LiveStatus
from swarmcli.cli.lines import clock as time_of_day
from swarmcli.cli.lines import epoch_line, event_line, number, plural, remaining
from swarmcli.cli.live_frame import Frame, total_rate
from swarmcli.events import Event, Events
from swarmcli.journal import EpochRecord, EventRecord, Record, Recorder, ReportRecord

REDRAW_SECONDS = 0.25
PROGRESS_SECONDS = 30.0  # without a terminal: a line of progress after this long without any other
MAX_WAITING = 1000  # records that wait for a slow terminal; the oldest give way
LOSSES = 60  # epochs in the little curve
STYLES = {"warning": "yellow", "error": "red"}


class LiveView:
    """Shows a run while the block lasts.

    `status()` says how things stand; it is called from the view's own thread, which alone prints: a terminal that
    does not read (Ctrl-S, a full pipe) must not stop the training. None: not known yet. `title` stands there until
    it is known; `clock` gives wall-clock seconds.
    """

    def __init__(
        self,
        status: Callable[[], LiveStatus | None],
        events: Events,
        *,
        console: Console,
        title: str = "swarm",
        clock: Callable[[], float] = time.time,
        interval: float = REDRAW_SECONDS,
    ) -> None:
        self._status = status
        self._events = events
        self._console = console
        self._title = title
        self._clock = clock
        self._interval = interval
        self._recorder = Recorder()
        self._losses: dict[int, float] = {}  # epoch → this peer's own, where it computes
        self._reports: dict[int, dict[str, ReportRecord]] = {}  # epoch → peer → what it told, where it does not
        self._last_epoch: EpochRecord | None = None
        self._reached = 0  # this epoch
        self._heard: deque[Record] = deque(maxlen=MAX_WAITING)
        self._changed = threading.Condition()
        self._ending = False
        self._printed_at = clock()
        self._thread = threading.Thread(target=self._run, name="swarm-view", daemon=True)

    def __enter__(self) -> LiveView:
        self._unsubscribe = self._events.subscribe(self._hear)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._unsubscribe()
        with self._changed:
            self._ending = True
            self._changed.notify_all()
        self._thread.join(timeout=2.0)  # a terminal that takes nothing more must not hold up the end

    def _hear(self, event: Event) -> None:
        """Called by whoever emits, perhaps the loop's thread: notes the event and returns."""
        with self._changed:
            self._heard.extend(self._recorder.records(event, self._clock()))
            self._changed.notify_all()

    def _run(self) -> None:
        if self._console.is_terminal:
            self._redraw()
        else:
            self._print_lines()

    def _redraw(self) -> None:
        """Epochs show in the frame; other lines scroll away above it."""
        with Live(console=self._console, auto_refresh=False, redirect_stdout=False, redirect_stderr=False) as live:
            ending = False
            while not ending:
                ending, records = self._next(self._interval)
                for record in records:
                    if isinstance(record, EventRecord):
                        self._print(record.time, event_line(record), STYLES.get(record.level, ""))
                live.update(Frame(self._title, self._status(), self._last_epoch, self._curve()), refresh=True)

    def _print_lines(self) -> None:
        ending = False
        while not ending:
            ending, records = self._next(PROGRESS_SECONDS / 4)
            for record in records:
                line = epoch_line(record) if isinstance(record, EpochRecord) else event_line(record)
                self._print(record.time, line)
            if not ending and abs(self._clock() - self._printed_at) >= PROGRESS_SECONDS:
                self._print_progress()

    def _next(self, timeout: float) -> tuple[bool, list[EpochRecord | EventRecord]]:
        """Waits for something to show, for the end, or for the time to redraw."""
        with self._changed:
            self._changed.wait_for(lambda: self._ending or self._heard, timeout)
            records, ending = list(self._heard), self._ending
            self._heard.clear()
        shown: list[EpochRecord | EventRecord] = []
        for record in records:
            if isinstance(record, EpochRecord):
                if record.samples:  # otherwise its state was another peer's, and nobody knows how long it took
                    self._last_epoch = record
                self._reached = record.epoch
                if record.loss is not None:
                    self._losses[record.epoch] = record.loss
                shown.append(record)
            elif isinstance(record, ReportRecord):
                self._reports.setdefault(record.epoch, {})[record.peer] = record
            elif isinstance(record, EventRecord) and record.level != "detail":
                shown.append(record)
        return ending, shown

    def _curve(self) -> list[float]:
        """The losses of the last epochs; the others' where this peer computes nothing, as far as they have told.

        What somebody says of epochs that are yet to come is no news.
        """
        for history in (self._losses, self._reports):
            while len(history) > LOSSES:
                del history[min(history, key=lambda epoch: (epoch <= self._reached + 1, epoch))]
        told = {n: _mean(reports.values()) for n, reports in self._reports.items() if n <= self._reached + 1}
        return [loss for _, loss in sorted((told | self._losses).items())][-LOSSES:]

    def _print(self, moment: float, line: str, style: str = "") -> None:
        # A terminal would break a long line within a word; a pipe gets it whole.
        text = Text(f"{time_of_day(moment)}  {line}", style=style)
        self._console.print(text, soft_wrap=not self._console.is_terminal)
        self._printed_at = self._clock()

    def _print_progress(self) -> None:
        status = self._status()
        if status is None or status.state == "finished":  # that it has is told once
            return
        if status.alarm:
            self._print(self._clock(), f"error: {status.alarm}")
        if status.state == "stranded":  # how far the others are is no progress of this peer
            return
        rate = total_rate(status)
        eta = "" if status.eta_seconds is None else f", about {remaining(status.eta_seconds)} left"
        if status.run_eta_seconds is not None:
            eta += f", about {remaining(status.run_eta_seconds)} to the last epoch"
        counted = f"{status.samples:,} of {plural(status.target, 'sample')}"
        self._print(self._clock(), f"epoch {status.epoch}: {counted}{eta}, {number(rate, 1)} per second")


def _mean(reports: Iterable[ReportRecord]) -> float:
    """Weighted by the peers' rates."""
    weights = {report.peer: max(report.samples_per_second, 1e-3) for report in reports}
    return math.fsum(report.loss * weights[report.peer] for report in reports) / math.fsum(weights.values())
