"""One frame of the live view: the epoch's progress, the loss, and the peers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from rich.console import Console, ConsoleOptions, Group, JustifyMethod, RenderableType, RenderResult
from rich.progress_bar import ProgressBar
from rich.table import Column, Table
from rich.text import Text

from coordinator_web.source import LivePeer, LiveStatus
from swarmcli.cli.console import printable
from swarmcli.cli.lines import format_time, number, plural, remaining
from swarmcli.journal import EpochRecord

MOST_PEERS = 12  # rows of the table; a line tells of the others
MOST_BARS = 32  # epochs in the little curve
LEAST_BAR = 4  # columns that a bar of progress needs to say anything
GIVE_WAY = ("drift", "role", "seen", "loss")  # columns of the table that a narrow terminal does without, in this order
UNKNOWN = "–"
BARS = "▁▂▃▄▅▆▇█"
STATES = {
    "waiting": "waiting for trainers",
    "training": "training",
    "averaging": "averaging",
    "synchronizing": "downloading the state",
    "stranded": "waiting: out of reach of the others",
    "finished": "finished",
    "stopping": "stopping",
}
STATE_STYLES = {
    "training": "green",
    "averaging": "cyan",
    "synchronizing": "yellow",
    "stranded": "bold red",
    "finished": "bold green",
}


class Frame:
    """A renderable. `losses` are those of the last epochs, oldest first."""

    def __init__(
        self, title: str, status: LiveStatus | None, epoch: EpochRecord | None, losses: Sequence[float]
    ) -> None:
        self._title = title
        self._status = status
        self._epoch = epoch
        self._losses = losses

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        status = self._status
        if status is None:
            yield Text(f"{self._title}: joining the run …", style="dim")
            return
        width = options.max_width
        figures = self._figures(status, width)
        alarm = [Text(printable(status.alarm, 600), style="bold red")] if status.alarm else []
        yield Group(_head(status), _progress(status, width), figures, *alarm, Text(), _peers(status, width))

    def _figures(self, status: LiveStatus, width: int) -> Text:
        """One line, whatever the width: a frame that changes its height jumps. The curve gets what is left."""
        loss = self._losses[-1] if self._losses else None
        head = Text("loss ", style="dim").append(number(loss), style="bold")
        tail = Text()
        if status.state != "finished":
            rate = total_rate(status)
            tail = Text(f"   {rate:,.1f}", style="bold").append(" samples/s", style="dim")
        if self._epoch is not None:
            took, averaging = format_time(self._epoch.seconds), format_time(self._epoch.averaging_seconds)
            tail.append(f"   last epoch {took}, {averaging} of it averaging", style="dim")
        bars = min(MOST_BARS, width - len(head) - len(tail) - 2)
        if len(self._losses) > 1 and bars > 1:
            head.append("  " + sparkline(self._losses[-bars:]), style="cyan")
        return _one_line(head.append_text(tail))


def _one_line(text: Text) -> Text:
    text.no_wrap, text.overflow = True, "ellipsis"
    return text


def _head(status: LiveStatus) -> Text:
    text = Text(printable(status.run_id, 60), style="bold")
    text.append(f"  {status.role} {printable(status.name or status.peer_id[:10], 40)}  ", style="dim")
    text.append(STATES[status.state], style=STATE_STYLES.get(status.state, "dim"))
    if status.mode:
        text.append(f"  {printable(status.mode, 60)}", style="dim")
    return _one_line(text)


def _progress(status: LiveStatus, width: int) -> RenderableType:
    """One line: the bar gives way first, then what is estimated. Of a run that has finished: where its model is."""
    if status.state == "finished":
        return Text(f"epoch {status.epoch}", style="bold").append(f"  {printable(status.result)}", style="not bold")
    of = "" if status.max_epochs is None else f" of {status.max_epochs}"
    eta = "" if status.eta_seconds is None else f"{remaining(status.eta_seconds)} left"
    if status.run_eta_seconds is not None:
        eta += f"{', ' if eta else ''}about {remaining(status.run_eta_seconds)} to the last epoch"
    epoch = Text(f"epoch {status.epoch}{of}", style="bold")
    counted = Text(f"{status.samples:,} of {plural(status.target, 'sample')}")
    left = width - len(epoch) - len(counted) - len(eta) - 4
    bar = ProgressBar(total=max(1, status.target), completed=min(status.samples, status.target), width=min(32, left))
    cells: list[RenderableType] = [epoch, *([bar] if left >= LEAST_BAR else []), counted, Text(eta, style="dim")]
    grid = Table.grid(*(Column(no_wrap=True, overflow="ellipsis") for _ in cells), padding=(0, 1))
    grid.add_row(*cells)
    return grid


def _peers(status: LiveStatus, width: int) -> Table:
    listed = sorted(
        status.peers, key=lambda peer: (peer.peer_id != status.peer_id, peer.role != "trainer", peer.peer_id)
    )
    rows = [_cells(peer, status) for peer in listed[:MOST_PEERS]]
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim", show_edge=False)
    columns = _columns(rows, width)
    for column in columns:
        justify: JustifyMethod = "left" if column in ("peer", "role") else "right"
        table.add_column(column, justify=justify, no_wrap=True, overflow="ellipsis")
    for peer, cells in zip(listed, rows, strict=False):
        style = "bold" if peer.peer_id == status.peer_id else ""
        table.add_row(*(cells[column] for column in columns), style=style)
    if len(listed) > MOST_PEERS:
        table.add_row(Text(f"and {len(listed) - MOST_PEERS} more", style="dim"))
    return table


def _columns(rows: Sequence[Mapping[str, Text]], width: int) -> list[str]:
    """Those that fit: a table that is squeezed shows nothing but ellipses. Drift only where it was measured."""
    widths = {name: max(len(name), *(row[name].cell_len for row in rows)) + 2 for name in rows[0]} if rows else {}
    if all(row["drift"].plain == UNKNOWN for row in rows):
        widths.pop("drift", None)
    for name in GIVE_WAY:
        if sum(widths.values()) > width:
            widths.pop(name, None)
    return list(widths)


def _cells(peer: LivePeer, status: LiveStatus) -> dict[str, Text]:
    me = peer.peer_id == status.peer_id
    computes = peer.role == "trainer"
    behind = peer.epoch < status.epoch - 1
    return {
        "peer": Text(printable(peer.name or peer.peer_id[:10], 24)),
        "role": Text(printable(peer.role, 12)),
        "epoch": Text(str(peer.epoch), style="yellow" if behind else ""),
        "samples/s": Text(f"{peer.samples_per_second:,.1f}" if computes and peer.answers else UNKNOWN),
        "loss": Text(number(peer.loss, 3) if computes else UNKNOWN),
        "drift": Text(UNKNOWN if peer.drift is None else f"{peer.drift:.0e}" if peer.drift else "0"),
        "seen": _seen(peer, me),
    }


def _seen(peer: LivePeer, me: bool) -> Text:
    if not peer.answers:
        return Text(f"not answering, {format_time(peer.seen_seconds_ago)}", style="red")
    if peer.apart:
        return Text(peer.apart, style="red")
    return Text("now" if me or peer.seen_seconds_ago < 5 else f"{format_time(peer.seen_seconds_ago)} ago")


def total_rate(status: LiveStatus) -> float:
    """Samples per second of all who compute what the peer that shows it does, and answer."""
    return math.fsum(peer.samples_per_second for peer in status.peers if peer.answers and not peer.apart)


def sparkline(values: Sequence[float]) -> str:
    """The values as bars of eight heights, the lowest as the lowest bar."""
    low, high = min(values), max(values)
    scale = (len(BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(BARS[round((value - low) * scale)] for value in values)
