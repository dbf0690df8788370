"""Where things are printed, and how they read.

What a program may read goes to stdout, everything for people to stderr.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from typing import TextIO

from rich.console import Console
from rich.table import Table
from rich.text import Text

from swarmcli.events import EpochAdvanced, RoundFinished, notices
from swarmcli.journal import Line, printable
from swarmcli.words import format_duration, format_size, plural

WIDE = 10_000  # columns
STYLES = {logging.WARNING: "yellow", logging.ERROR: "red", logging.CRITICAL: "bold red"}


def _console(stream: TextIO | None, *, stderr: bool) -> Console:
    """In a file or a pipe, lines and tables are as long as they are: nothing is cut or wrapped there."""
    narrow = (stream is not None and stream.isatty()) or "COLUMNS" in os.environ
    return Console(stderr=stderr, highlight=False, markup=False, emoji=False, width=None if narrow else WIDE)


out = _console(sys.stdout, stderr=False)  # for data
err = _console(sys.stderr, stderr=True)  # for people: progress, warnings, logs


@contextmanager
def aloud() -> Iterator[None]:
    """Within this block people see everything, even with --quiet, since they are asked something."""
    quiet, err.quiet = err.quiet, False
    try:
        yield
    finally:
        err.quiet = quiet


class _Harmless(logging.Formatter):
    """Log lines quote what strangers say, and log files are shown on terminals too."""

    def format(self, record: logging.LogRecord) -> str:
        record.levelname = record.levelname.lower()  # as in the view's lines
        return "\n".join(printable(line, 2000) for line in super().format(record).splitlines())


class ConsoleHandler(logging.Handler):
    """Prints log lines through the console that also draws the live view, so that neither tears the other."""

    def __init__(self, console: Console) -> None:
        super().__init__()
        self._console = console

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._console.print(Text(self.format(record), style=STYLES.get(record.levelno, "")), soft_wrap=True)
        except Exception:
            self.handleError(record)


def setup_logging(verbose: bool = False, who: str = "") -> None:
    """Sends this process's log to stderr: warnings, and with `verbose` all that swarm itself says. `who` names this
    process among several on one terminal; the one without a name shows notices as events, so its log omits them. Only
    `verbose` names the module that speaks, for whoever looks for a fault."""
    handler = ConsoleHandler(err) if sys.stderr.isatty() and not err.quiet else logging.StreamHandler()
    who = f"[{who}] " if who else ""
    level = "%(levelname)s %(name)s" if verbose else "%(levelname)s"
    handler.setFormatter(_Harmless(f"%(asctime)s {who}{level}: %(message)s", "%H:%M:%S"))
    handler.addFilter(lambda record: bool(who) or record.name != notices.name)
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    logging.getLogger("swarmcli").setLevel(logging.DEBUG if verbose else logging.WARNING)


def plain_table() -> Table:
    """A table without lines, with dim headings; the caller adds the columns."""
    return Table(box=None, padding=(0, 2, 0, 0), header_style="dim", show_edge=False)


def clock(time: float) -> str:
    """Returns the time of day on this machine, for wall-clock seconds."""
    return datetime.fromtimestamp(time).strftime("%H:%M:%S")


def day(time: float) -> str:
    return datetime.fromtimestamp(time).strftime("%Y-%m-%d %H:%M:%S")


def number(value: float | None, digits: int = 4) -> str:
    return "–" if value is None else f"{value:.{digits}f}"


def epoch_line(record: EpochAdvanced) -> str:
    parts = [f"epoch {record.epoch}"]
    if record.loss is not None:
        parts.append(f"loss {number(record.loss)}")
    if record.samples:
        parts.append(f"{plural(record.samples, 'sample')} of {plural(record.peers, 'peer')}")
        parts.append(f"{format_duration(record.seconds)}, {format_duration(record.averaging_seconds)} of it averaging")
    else:
        parts.append("taken over from another peer")
    return "  ".join(parts)


def round_line(record: RoundFinished) -> str:
    """A member that contributed nothing is no failure: an auxiliary only reduces."""
    where = f" at epoch {record.epoch}" if record.epoch >= 0 else ""
    peers = plural(len(record.members), "peer")
    if len(record.contributors) != len(record.members):
        peers = f"{len(record.contributors)} contributed, {plural(len(record.members), 'member')}"
    moved = f"{format_size(record.bytes_sent)} sent, {format_size(record.bytes_received)} received"
    why = f": {printable(record.reason)}" if record.reason else ""
    return f"round{where} {record.outcome}{why}  {peers}  {format_duration(record.duration)}  {moved}"


def event_line(record: Line) -> str:
    mark = f"{record.level}: " if record.level in ("warning", "error") else ""
    return mark + printable(record.text)
