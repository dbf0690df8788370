"""What a journal keeps as single lines: what the live view prints and `swarm log --follow` shows."""

from __future__ import annotations

from datetime import datetime

from swarmcli.cli.console import printable
from swarmcli.events import EpochAdvanced, RoundFinished
from swarmcli.journal import Line, megabytes


def clock(time: float) -> str:
    """The time of day on this machine, of wall-clock seconds."""
    return datetime.fromtimestamp(time).strftime("%H:%M:%S")


def day(time: float) -> str:
    return datetime.fromtimestamp(time).strftime("%Y-%m-%d %H:%M:%S")


def format_time(seconds: float) -> str:
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    if seconds < 99.5:
        return f"{seconds:.0f} s"
    if seconds < 5970:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h"


def remaining(seconds: float) -> str:
    """Nobody needs an estimate to the tenth of a second."""
    return f"{max(1.0, seconds):.0f} s" if seconds < 99.5 else format_time(seconds)


def number(value: float | None, digits: int = 4) -> str:
    return "–" if value is None else f"{value:.{digits}f}"


def plural(count: int, one: str, many: str = "") -> str:
    return f"{count:,} {one if count == 1 else many or one + 's'}"


def epoch_line(record: EpochAdvanced) -> str:
    parts = [f"epoch {record.epoch}"]
    if record.loss is not None:
        parts.append(f"loss {number(record.loss)}")
    if record.samples:
        parts.append(f"{plural(record.samples, 'sample')} of {plural(record.peers, 'peer')}")
        parts.append(f"{format_time(record.seconds)}, {format_time(record.averaging_seconds)} of it averaging")
    else:
        parts.append("taken over from another peer")
    return "  ".join(parts)


def _all_contributed(record: RoundFinished) -> bool:
    return len(record.contributors) == len(record.members)


def peers_of(record: RoundFinished) -> str:
    """A member that contributed nothing is no failure: an auxiliary only reduces."""
    if _all_contributed(record):
        return str(len(record.members))
    return f"{len(record.contributors)} contributed, {plural(len(record.members), 'member')}"


def round_line(record: RoundFinished) -> str:
    where = f" of epoch {record.epoch}" if record.epoch >= 0 else ""
    peers = plural(len(record.members), "peer") if _all_contributed(record) else peers_of(record)
    moved = f"{megabytes(record.bytes_sent)} sent, {megabytes(record.bytes_received)} received"
    why = f": {printable(record.reason)}" if record.reason else ""
    return f"round{where} {record.outcome}{why}  {peers}  {format_time(record.took)}  {moved}"


def event_line(record: Line) -> str:
    mark = f"{record.level}: " if record.level in ("warning", "error") else ""
    return mark + printable(record.text)
