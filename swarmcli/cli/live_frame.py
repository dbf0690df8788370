"""One frame of the live view: the epoch's progress, the loss, and the peers."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rich.console import Console, ConsoleOptions, Group, RenderResult
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from coordinator_web.source import LivePeer, LiveStatus
from swarmcli.cli.console import printable
from swarmcli.cli.lines import duration, number, plural, remaining
from swarmcli.journal import EpochRecord

MOST_PEERS = 12  # rows of the table; a line tells of the others
BARS = "▁▂▃▄▅▆▇█"
STATES = {
    "waiting": "waiting for trainers",
    "training": "training",
    "averaging": "averaging",
    "synchronizing": "downloading the state",
    "finished": "finished",
    "stopping": "stopping",
}
STATE_STYLES = {"training": "green", "averaging": "cyan", "synchronizing": "yellow", "finished": "bold green"}


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
        yield Group(_head(status), _progress(status), self._figures(status), Text(), _peers(status))

    def _figures(self, status: LiveStatus) -> Text:
        loss = self._losses[-1] if self._losses else mean_loss(status)
        text = Text("loss ", style="dim")
        text.append(number(loss), style="bold")
        if len(self._losses) > 1:
            text.append("  " + sparkline(self._losses[-32:]), style="cyan")
        rate = math.fsum(peer.samples_per_second for peer in status.peers)
        text.append(f"   {rate:,.1f}", style="bold").append(" samples/s", style="dim")
        if self._epoch is not None:
            took, averaging = duration(self._epoch.seconds), duration(self._epoch.averaging_seconds)
            text.append(f"   last epoch {took}, {averaging} of it averaging", style="dim")
        return text


def _head(status: LiveStatus) -> Text:
    text = Text(printable(status.run_id, 60), style="bold")
    text.append(f"  {status.role} {printable(status.name or status.peer_id[:10], 40)}  ", style="dim")
    text.append(STATES[status.state], style=STATE_STYLES.get(status.state, "dim"))
    return text


def _progress(status: LiveStatus) -> Table:
    grid = Table.grid(padding=(0, 1), expand=False)
    of = "" if status.max_epochs is None else f" of {status.max_epochs}"
    eta = "" if status.eta_seconds is None else f"{remaining(status.eta_seconds)} left"
    bar = ProgressBar(total=max(1, status.target), completed=min(status.samples, status.target), width=32)
    counted = f"{status.samples:,} of {plural(status.target, 'sample')}"
    grid.add_row(Text(f"epoch {status.epoch}{of}", style="bold"), bar, Text(counted), Text(eta, style="dim"))
    return grid


def _peers(status: LiveStatus) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim", show_edge=False)
    for column in ("peer", "role"):
        table.add_column(column, no_wrap=True, overflow="ellipsis")
    for column in ("epoch", "samples/s", "loss", "seen"):
        table.add_column(column, justify="right", no_wrap=True)
    listed = sorted(
        status.peers, key=lambda peer: (peer.peer_id != status.peer_id, peer.role != "trainer", peer.peer_id)
    )
    for peer in listed[:MOST_PEERS]:
        table.add_row(*_cells(peer, status), style="bold" if peer.peer_id == status.peer_id else "")
    if len(listed) > MOST_PEERS:
        table.add_row(Text(f"and {len(listed) - MOST_PEERS} more", style="dim"))
    return table


def _cells(peer: LivePeer, status: LiveStatus) -> list[Text]:
    me = peer.peer_id == status.peer_id
    computes = peer.role == "trainer"
    behind = peer.epoch < status.epoch - 1
    return [
        Text(printable(peer.name or peer.peer_id[:10], 24)),
        Text(printable(peer.role, 12)),
        Text(str(peer.epoch), style="yellow" if behind else ""),
        Text(f"{peer.samples_per_second:,.1f}" if computes else "–"),
        Text(number(peer.loss, 3) if computes else "–"),
        Text("now" if me or peer.seen_seconds_ago < 2 else f"{duration(peer.seen_seconds_ago)} ago"),
    ]


def sparkline(values: Sequence[float]) -> str:
    """The values as bars of eight heights, the lowest as the lowest bar."""
    low, high = min(values), max(values)
    scale = (len(BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(BARS[round((value - low) * scale)] for value in values)


def mean_loss(status: LiveStatus | None) -> float | None:
    """The mean of what peers report, weighted by their rates."""
    known = [(peer.loss, max(peer.samples_per_second, 1e-3)) for peer in status.peers] if status is not None else []
    weighted = [(loss, weight) for loss, weight in known if loss is not None and math.isfinite(loss)]
    total = math.fsum(weight for _, weight in weighted)
    return math.fsum(loss * weight for loss, weight in weighted) / total if weighted else None
