"""What a running peer shows: on a terminal a view that is redrawn in place, elsewhere a line for each thing."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from types import TracebackType

from rich.console import Console
from rich.live import Live
from rich.text import Text

from coordinator_web.source import RunStatus
from swarmcli.cli.lines import clock as time_of_day
from swarmcli.cli.lines import epoch_line, event_line, number, plural, remaining
from swarmcli.cli.live_frame import Frame
from swarmcli.events import EpochAdvanced, Event, Events
from swarmcli.journal import Line, Recorder

REDRAW_SECONDS = 0.25
PROGRESS_SECONDS = 30.0  # without a terminal: a line of progress after this long without any other
MAX_WAITING = 1000  # lines that wait for a slow terminal; the oldest give way
STYLES = {"warning": "yellow", "error": "red"}


class LiveView:
    """Shows a run while the block lasts.

    `look()` says how things stand; it is called from the view's own thread, which alone prints: a terminal that
    does not read (Ctrl-S, a full pipe) must not stop the training. `clock` gives wall-clock seconds.
    """

    def __init__(
        self,
        look: Callable[[], RunStatus],
        events: Events,
        *,
        console: Console,
        clock: Callable[[], float] = time.time,
        interval: float = REDRAW_SECONDS,
    ) -> None:
        self._look = look
        self._events = events
        self._console = console
        self._clock = clock
        self._interval = interval
        self._recorder = Recorder()
        self._heard: deque[EpochAdvanced | Line] = deque(maxlen=MAX_WAITING)
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
            for each in self._recorder.kept(event, self._clock()):
                if isinstance(each, EpochAdvanced) or (isinstance(each, Line) and each.level != "detail"):
                    self._heard.append(each)
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
                ending, heard = self._next(self._interval)
                for each in heard:
                    if isinstance(each, Line):
                        self._print(each.time, event_line(each), STYLES.get(each.level, ""))
                live.update(Frame(self._look()), refresh=True)

    def _print_lines(self) -> None:
        ending = False
        while not ending:
            ending, heard = self._next(PROGRESS_SECONDS / 4)
            for each in heard:
                self._print(each.time, epoch_line(each) if isinstance(each, EpochAdvanced) else event_line(each))
            if not ending and abs(self._clock() - self._printed_at) >= PROGRESS_SECONDS:
                self._print_progress()

    def _next(self, timeout: float) -> tuple[bool, list[EpochAdvanced | Line]]:
        """Waits for something to show, for the end, or for the time to redraw."""
        with self._changed:
            self._changed.wait_for(lambda: self._ending or self._heard, timeout)
            heard = list(self._heard)
            self._heard.clear()
            return self._ending, heard

    def _print(self, moment: float, line: str, style: str = "") -> None:
        # A terminal would break a long line within a word; a pipe gets it whole.
        text = Text(f"{time_of_day(moment)}  {line}", style=style)
        self._console.print(text, soft_wrap=not self._console.is_terminal)
        self._printed_at = self._clock()

    def _print_progress(self) -> None:
        status = self._look()
        if status.state == "finished":  # that it has is told once
            return
        if status.alarm:
            self._print(self._clock(), f"error: {status.alarm}")
        if status.state == "stranded":  # how far the others are is no progress of this peer
            return
        eta = "" if status.eta_seconds is None else f", about {remaining(status.eta_seconds)} left"
        if status.run_eta_seconds is not None:
            eta += f", about {remaining(status.run_eta_seconds)} to the last epoch"
        counted = f"{status.samples:,} of {plural(status.target, 'sample')}"
        rate = number(status.samples_per_second, 1)
        self._print(self._clock(), f"epoch {status.epoch}: {counted}{eta}, {rate} per second")
