"""One frame of the live view: the epoch's progress, the loss, and the peers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.console import Console, ConsoleOptions, Group, JustifyMethod, RenderableType, RenderResult
from rich.progress_bar import ProgressBar
from rich.table import Column, Table
from rich.text import Text

from coordinator_web.source import PeerStatus, RunStatus
from swarmcli.cli.console import printable
from swarmcli.cli.lines import format_time, number, plural, remaining

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
}
STATE_STYLES = {
    "training": "green",
    "averaging": "cyan",
    "synchronizing": "yellow",
    "stranded": "bold red",
    "finished": "bold green",
}


class Frame:
    """A renderable."""

    def __init__(self, status: RunStatus) -> None:
        self._status = status

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        status = self._status
        width = options.max_width
        figures = _figures(status, width)
        alarm = [Text(printable(status.alarm, 600), style="bold red")] if status.alarm else []
        yield Group(_head(status), _progress(status, width), figures, *alarm, Text(), _peers(status, width))


def _figures(status: RunStatus, width: int) -> Text:
    """One line, whatever the width: a frame that changes its height jumps. The curve gets what is left."""
    losses = status.losses
    head = Text("loss ", style="dim").append(number(losses[-1] if losses else None), style="bold")
    tail = Text()
    if status.state != "finished":
        tail = Text(f"   {status.samples_per_second:,.1f}", style="bold").append(" samples/s", style="dim")
    if status.last_epoch is not None:
        took, averaging = format_time(status.last_epoch.seconds), format_time(status.last_epoch.averaging_seconds)
        tail.append(f"   last epoch {took}, {averaging} of it averaging", style="dim")
    bars = min(MOST_BARS, width - len(head) - len(tail) - 2)
    if len(losses) > 1 and bars > 1:
        head.append("  " + sparkline(losses[-bars:]), style="cyan")
    return _one_line(head.append_text(tail))


def _one_line(text: Text) -> Text:
    text.no_wrap, text.overflow = True, "ellipsis"
    return text


def _head(status: RunStatus) -> Text:
    text = Text(printable(status.run_id, 60), style="bold")
    text.append(f"  {status.role} {printable(status.name or status.peer_id[:10], 40)}  ", style="dim")
    text.append(STATES[status.state], style=STATE_STYLES.get(status.state, "dim"))
    if status.mode:
        text.append(f"  {printable(status.mode, 60)}", style="dim")
    return _one_line(text)


def _progress(status: RunStatus, width: int) -> RenderableType:
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


def _peers(status: RunStatus, width: int) -> Table:
    listed = sorted(status.peers, key=lambda peer: (not peer.me, peer.role != "trainer", peer.peer_id))
    rows = [_cells(peer, status) for peer in listed[:MOST_PEERS]]
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim", show_edge=False)
    columns = _columns(rows, width)
    for column in columns:
        justify: JustifyMethod = "left" if column in ("peer", "role") else "right"
        table.add_column(column, justify=justify, no_wrap=True, overflow="ellipsis")
    for peer, cells in zip(listed, rows, strict=False):
        table.add_row(*(cells[column] for column in columns), style="bold" if peer.me else "")
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


def _cells(peer: PeerStatus, status: RunStatus) -> dict[str, Text]:
    computes, answers = peer.role == "trainer", peer.health != "not answering"
    return {
        "peer": Text(printable(peer.name or peer.peer_id[:10], 24)),
        "role": Text(printable(peer.role, 12)),
        "epoch": Text(str(peer.epoch), style="yellow" if peer.health == "behind" else ""),
        "samples/s": Text(f"{peer.samples_per_second:,.1f}" if computes and answers else UNKNOWN),
        "loss": Text(number(peer.loss, 3) if computes else UNKNOWN),
        "drift": Text(UNKNOWN if peer.drift is None else f"{peer.drift:.0e}" if peer.drift else "0"),
        "seen": _seen(peer, status.now),
    }


def _seen(peer: PeerStatus, now: float) -> Text:
    ago = now - peer.last_seen
    if peer.health == "not answering":
        return Text(f"not answering, {format_time(ago)}", style="red")
    if not peer.counts:
        return Text(peer.health, style="red")
    return Text("now" if peer.me or ago < 5 else f"{format_time(ago)} ago")


def sparkline(values: Sequence[float]) -> str:
    """The values as bars of eight heights, the lowest as the lowest bar."""
    low, high = min(values), max(values)
    scale = (len(BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(BARS[round((value - low) * scale)] for value in values)
