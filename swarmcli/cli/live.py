"""The view of a running peer: on a terminal redrawn in place, elsewhere a line for each thing that happens."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import TracebackType

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, Group, JustifyMethod, RenderableType, RenderResult
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Column, Table
from rich.text import Text

from swarmcli.cli.console import clock as time_of_day
from swarmcli.cli.console import epoch_line, event_line, number, plain_table
from swarmcli.events import EpochAdvanced, Event, Events
from swarmcli.journal import Line, Recorder, printable
from swarmcli.run.values import Me, PeerStatus, RunStatus
from swarmcli.words import format_duration, format_size, plural, roughly

MOST_PEERS = 12  # rows of the table; a line tells of the others
LEAST_PEERS = 3  # rows of the table at least, on a terminal that is not high
EVENTS, FEW_EVENTS, ROOMY = (
    6,
    4,
    24,
)  # rows for the latest events, below the peers; on a terminal with fewer rows than ROOMY
PROGRESS = 30.0  # seconds without another line, after which one tells of progress, where there is no terminal
GIVE_WAY = ("drift", "role", "seen", "loss")  # columns that a narrow terminal leaves out, in this order
UNKNOWN = "–"
BARS = "▁▂▃▄▅▆▇█"
TONES = {"good": "green", "calm": "dim", "warn": "bold yellow", "bad": "bold red"}


class Frame:
    """A renderable: the run, what this peer gives to it, its peers, and the latest events."""

    def __init__(self, status: RunStatus, me: Me | None = None, said: Sequence[Line] = ()) -> None:
        """`me`: what concerns the user of this peer; None: not known."""
        self._status = status
        self._me = me
        self._said = said

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        status, me = self._status, self._me
        width, plain = options.max_width, options.ascii_only
        above: list[RenderableType] = [
            _head(status, me),
            _progress(status, me, width),
            _figures(status, width, curve=not plain),
        ]
        if me is not None:
            above += [_mine(status.role, me, width)] if me.samples or me.totals.rounds_committed else []
        above += [_one_line(Text(f"model {printable(status.evaluated, 200)}", style="dim"))] if status.evaluated else []
        above += [_one_line(Text(printable(status.reach, 300), style="dim"))] if status.reach else []
        above += [Text(printable(status.alarm, 600), style="bold red")] if status.alarm else []
        told = [text[0].upper() + text[1:] for text in (status.seat, status.waits) if text]
        above += [Text(printable(text, 600), style="yellow") for text in told]
        rows = EVENTS if options.size.height >= ROOMY else FEW_EVENTS
        below = _latest(console, self._said, width, rows)
        high = sum(len(each.wrap(console, width)) if isinstance(each, Text) else 1 for each in above)
        room = options.size.height - high - len(below) - 4  # blank line, heading, "and … more", the cursor's line
        most = max(LEAST_PEERS, min(MOST_PEERS, room))
        yield Group(*above, Text(), _peers(status, width, most), *below)


def _fitting(parts: Iterable[str], room: int, between: str = "   ") -> str:
    """Joins the parts that fit whole, in their order; the first one always."""
    first, *rest = [part for part in parts if part] or [""]
    for part in rest:
        if cell_len(longer := first + between + part) > room:
            break
        first = longer
    return first


def _mine(role: str, me: Me, width: int) -> Text:
    """Says in one line what this peer has given."""
    if role == "trainer":
        parts = [f"{me.share:.0%} of the last epochs" if me.share is not None else ""]
        parts += [f"{me.samples:,} in all"]
    else:
        parts = [f"{format_size(me.totals.bytes_sent)} sent to others"]
    parts += [plural(me.totals.rounds_committed, "round")]
    parts += [format_duration(3600 * me.hours) if me.hours >= 1 / 60 else ""]
    parts += [f"place {me.rank} of {me.ranked} {me.told_by}".rstrip() if me.rank is not None and me.ranked > 1 else ""]
    return _one_line(Text("mine ", style="dim").append(_fitting(parts, width - 5), style="not dim"))


def _latest(console: Console, said: Sequence[Line], width: int, rows: int) -> list[RenderableType]:
    """Returns as many of the latest events as fit whole. The height is always the same: a frame that changes its height
    jumps."""
    shown: list[Text] = []
    for each in reversed(said):
        lines = _event(console, each, width)
        if len(shown) + len(lines) > rows:
            break
        shown = [*lines, *shown]
    return [Text(), *[Text()] * (rows - len(shown)), *shown] if shown else []


def _event(console: Console, said: Line, width: int) -> list[Text]:
    """Returns one line or two."""
    # Terminals echo Ctrl-C as ^C after the last line. Without room for it there, the cursor would be a line lower than
    # the view believes, and a line of the frame before would stay.
    began = f"{time_of_day(said.time)}  "
    room = max(1, width - len(began) - 2)
    first, *rest = Text(event_line(said), style="dim").wrap(console, room) or [Text()]
    lines = [Text(began, style="dim").append_text(first)]
    if rest:
        second = Text(" ".join(line.plain.strip() for line in rest), style="dim")
        second.truncate(room, overflow="ellipsis")
        lines.append(Text(" " * len(began)).append_text(second))
    return [_one_line(line) for line in lines]


def _figures(status: RunStatus, width: int, *, curve: bool) -> Text:
    """Returns one line, whatever the width: a frame that changes its height jumps. The curve gets the room that is
    left."""
    losses = status.losses
    head = Text("loss ", style="dim").append(number(losses[-1] if losses else None), style="bold")
    tail = Text()
    if not status.rests:
        tail = Text(f"   {status.samples_per_second:,.1f}", style="bold").append(" samples/s", style="dim")
    if status.last_epoch is not None:
        took, averaging = (
            format_duration(status.last_epoch.seconds),
            format_duration(status.last_epoch.averaging_seconds),
        )
        last = [f"   last epoch {took}", f"{averaging} of it averaging"]
        tail.append(_fitting(last, width - len(head) - len(tail), ", "), style="dim")
    bars = min(32, width - len(head) - len(tail) - 2)  # one for each epoch
    if curve and len(losses) > 1 and bars > 1:
        head.append("  " + sparkline(losses[-bars:]), style="cyan")
    return _one_line(head.append_text(tail))


def _one_line(text: Text) -> Text:
    text.no_wrap, text.overflow = True, "ellipsis"
    return text


def _head(status: RunStatus, me: Me | None) -> Text:
    text = Text(printable(status.run_id, 60), style="bold")
    text.append(f"  {status.role} {printable(status.name or status.peer_id[:10], 40)}  ", style="dim")
    if me is not None and _rests(me):  # what its user asked for is more important than what the run does
        text.append(printable(me.sentence, 200), style="bold yellow")
        return _one_line(text)
    text.append(status.state_in_words, style=TONES[status.tone])
    return _one_line(text)


def _rests(me: Me | None) -> bool:
    """Whether this peer does nothing, since its user or a limit wants that: then it does not even look for the run."""
    return me is not None and me.activity.state != "running"


def _progress(status: RunStatus, me: Me | None, width: int) -> RenderableType:
    """Returns one line: if it is narrow, the bar is left out first, then the estimate. After the end of the run: where
    its model is."""
    if status.state == "finished":
        return Text(f"epoch {status.epoch}", style="bold").append(f"  {printable(status.result)}", style="not bold")
    if status.state == "synchronizing":
        return _one_line(Text(printable(status.where if _rests(me) and not status.download else status.left, 200)))
    etas = [] if status.eta_seconds is None else [f"{roughly(status.eta_seconds)} to the next epoch"]
    if status.run_eta_seconds is not None:
        etas.append(f"about {roughly(status.run_eta_seconds)} to the last")
    epoch = Text(status.where, style="bold")
    counted = Text(f"{status.samples:,} of {plural(status.target, 'sample')}")
    room = width - len(epoch) - len(counted) - 2
    eta = _fitting([each for each in etas if cell_len(each) <= room], room, ", ")
    left = width - len(epoch) - len(counted) - len(eta) - 4
    bar = ProgressBar(total=max(1, status.target), completed=min(status.samples, status.target), width=min(32, left))
    shown = [bar] if left >= 4 else []  # a shorter one says nothing
    cells: list[RenderableType] = [epoch, *shown, counted, Text(eta, style="dim")]
    grid = Table.grid(*(Column(no_wrap=True, overflow="ellipsis") for _ in cells), padding=(0, 1))
    grid.add_row(*cells)
    return grid


def _peers(status: RunStatus, width: int, most: int) -> Table:
    here = [peer for peer in status.peers if peer.health not in ("left", "lost")]
    listed = sorted(here, key=lambda peer: (not peer.me, peer.role != "trainer", peer.peer_id))
    rows = [_cells(peer, status) for peer in listed[:most]]
    table = plain_table()
    columns = _columns(rows, width)
    for column in columns:
        justify: JustifyMethod = "left" if column in ("peer", "role") else "right"
        table.add_column(column, justify=justify, no_wrap=True, overflow="ellipsis")
    for peer, cells in zip(listed, rows, strict=False):
        table.add_row(*(cells[column] for column in columns), style="bold" if peer.me else "")
    if len(listed) > most:
        table.add_row(Text(f"and {len(listed) - most} more", style="dim"))
    return table


def _columns(rows: Sequence[Mapping[str, Text]], width: int) -> list[str]:
    """Returns the columns that fit: a table that is squeezed shows only ellipses. Drift only if it was measured."""
    widths = {name: max(len(name), *(row[name].cell_len for row in rows)) + 2 for name in rows[0]} if rows else {}
    if all(row["drift"].plain == UNKNOWN for row in rows):
        widths.pop("drift", None)
    for name in GIVE_WAY:
        if sum(widths.values()) > width:
            widths.pop(name, None)
    return list(widths)


def _cells(peer: PeerStatus, status: RunStatus) -> dict[str, Text]:
    computes, answers = peer.role == "trainer", peer.health not in ("not answering", "line too slow", "catching up")
    return {
        "peer": Text(printable(peer.name or peer.peer_id[:10], 24)),
        "role": Text(printable(peer.role, 12)),
        "epoch": Text(str(peer.epoch), style="yellow" if peer.health == "behind" else ""),
        "samples/s": Text(f"{peer.samples_per_second:,.1f}" if computes and answers else UNKNOWN),
        "loss": Text(number(peer.loss, 3) if computes and peer.health != "line too slow" else UNKNOWN),
        "drift": Text(UNKNOWN if peer.drift is None else f"{peer.drift:.0e}" if peer.drift else "0"),
        "seen": _seen(peer, status.now),
    }


def _seen(peer: PeerStatus, now: float) -> Text:
    ago = now - peer.last_seen
    if peer.health == "not answering":
        return Text(f"not answering, {format_duration(ago)}", style="red")
    if peer.health in ("paused", "leaving", "line too slow", "catching up"):
        return Text(peer.health, style="dim")
    if not peer.counts:
        return Text(peer.health, style="red")
    return Text("now" if peer.me or ago < 5 else f"{format_duration(ago)} ago")


def sparkline(values: Sequence[float]) -> str:
    """Returns the values as bars of eight heights, the lowest value as the lowest bar."""
    low, high = min(values), max(values)
    scale = (len(BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(BARS[round((value - low) * scale)] for value in values)


STYLES = {"warning": "yellow", "error": "red"}


class LiveView:
    """Shows a run while the block lasts.

    `look()` returns the run's status; the view's own thread calls it, and alone prints: a terminal that does not read
    (Ctrl-S, a full pipe) must not stop the training. `clock` gives wall-clock seconds.
    """

    def __init__(
        self,
        look: Callable[[], RunStatus],
        events: Events,
        *,
        console: Console,
        me: Callable[[RunStatus], Me | None] = lambda status: None,
        plain: bool = False,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`me(status)` says what concerns this peer's user. `plain`: lines, even on a terminal."""
        self._look = look
        self._me = me
        self._plain = plain or not console.is_terminal or console.is_dumb_terminal
        self._said: deque[Line] = deque(maxlen=EVENTS)
        self._events = events
        self._console = console
        self._clock = clock
        # not the journal's, which began earlier: the view also tells of peers that came before it
        self._recorder = Recorder()
        self._heard: deque[EpochAdvanced | Line] = deque(maxlen=1000)  # for a slow terminal; the oldest are dropped
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
            self._heard.extend(self._recorder.losses())
            self._ending = True
            self._changed.notify_all()
        self._thread.join(timeout=2.0)  # a terminal that takes no more must not hold up the end

    def say(self, text: str) -> None:
        """Shows one line. Lines that are printed beside the view, just when its height changes, are overwritten."""
        with self._changed:
            self._heard.append(Line("info", "notice", "", text, time=self._clock()))
            self._changed.notify_all()

    def _hear(self, event: Event) -> None:
        """Runs in the emitter's thread, perhaps the loop's: notes the event and returns."""
        with self._changed:
            for each in self._recorder.kept(event, self._clock()):
                if isinstance(each, EpochAdvanced) or (isinstance(each, Line) and each.level != "detail"):
                    self._heard.append(each)
            self._changed.notify_all()

    def _run(self) -> None:
        if self._plain:
            self._print_lines()
        else:
            self._redraw()

    def _redraw(self) -> None:
        """Epochs and news are in the frame; warnings stay above it, also when the view is gone."""
        with Live(console=self._console, auto_refresh=False, redirect_stdout=False, redirect_stderr=False) as live:
            ending = False
            while not ending:
                ending, heard = self._next(timeout=0.25)
                for each in heard:
                    if isinstance(each, Line) and each.level in STYLES:
                        self._print(each.time, event_line(each), STYLES[each.level])
                    elif isinstance(each, Line):
                        self._said.append(each)
                status = self._look()
                live.update(Frame(status, self._me(status), list(self._said)), refresh=True)

    def _print_lines(self) -> None:
        ending = False
        while not ending:
            ending, heard = self._next(timeout=PROGRESS / 4)
            for each in heard:
                self._print(each.time, epoch_line(each) if isinstance(each, EpochAdvanced) else event_line(each))
            if not ending and abs(self._clock() - self._printed_at) >= PROGRESS:
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
        if status.state == "finished":  # the end was told already
            return
        if status.alarm:
            self._print(self._clock(), f"error: {printable(status.alarm, 600)}")
        for text in filter(None, (status.seat, status.waits)):
            self._print(self._clock(), f"warning: {printable(text, 600)}")
        if status.rests:  # how far the others are is not this peer's progress
            if not status.alarm and not status.waits:
                me = self._me(status)
                rests = me.sentence if me is not None and _rests(me) else ""
                self._print(self._clock(), printable(rests or status.download or status.state_in_words, 200))
            return
        eta = "" if status.eta_seconds is None else f", about {roughly(status.eta_seconds)} to the next epoch"
        if status.run_eta_seconds is not None:
            eta += f", about {roughly(status.run_eta_seconds)} to the last"
        counted = f"{status.samples:,} of {plural(status.target, 'sample')}"
        rate = number(status.samples_per_second, 1)
        self._print(self._clock(), f"epoch {status.epoch}: {counted}{eta}, {rate} per second")
