"""Where things are printed: what a program may read goes to stdout, everything for people to stderr."""

from __future__ import annotations

import logging
import sys
import unicodedata

from rich.console import Console
from rich.text import Text

from swarmcli.events import notices

MAX_TEXT = 300  # characters shown of a text that a stranger may have chosen
STYLES = {logging.WARNING: "yellow", logging.ERROR: "red", logging.CRITICAL: "bold red"}


out = Console(highlight=False, markup=False, emoji=False)  # for data
err = Console(stderr=True, highlight=False, markup=False, emoji=False)  # for people: progress, warnings, logs


def printable(text: str, limit: int = MAX_TEXT) -> str:
    """The text in one line, without what could steer a terminal or turn the direction of reading: names and reasons
    come from strangers."""
    kept = "".join(
        " " if each in "\r\n\t" else each for each in text[: limit + 1] if each in "\r\n\t" or _harmless(each)
    )
    return kept if len(kept) <= limit else kept[: limit - 1] + "…"


def _harmless(character: str) -> bool:
    return unicodedata.category(character) not in ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp")


class ConsoleHandler(logging.Handler):
    """Log lines through the console that also draws the live view, so that neither tears the other."""

    def __init__(self, console: Console) -> None:
        super().__init__()
        self._console = console

    def emit(self, record: logging.LogRecord) -> None:
        try:
            lines = [printable(line, 2000) for line in self.format(record).splitlines()]
            self._console.print(Text("\n".join(lines), style=STYLES.get(record.levelno, "")), soft_wrap=True)
        except Exception:
            self.handleError(record)


def setup_logging(verbose: bool = False, who: str = "") -> None:
    """Sends this process's log to stderr: warnings, and with `verbose` all that swarm itself says. `who` says which of
    several processes on one terminal speaks; the one without a name shows notices as events, so the log omits them."""
    handler = ConsoleHandler(err) if sys.stderr.isatty() else logging.StreamHandler()
    who = f"[{who}] " if who else ""
    handler.setFormatter(logging.Formatter(f"%(asctime)s {who}%(levelname)s %(name)s: %(message)s", "%H:%M:%S"))
    handler.addFilter(lambda record: bool(who) or record.name != notices.name)
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    logging.getLogger("swarmcli").setLevel(logging.DEBUG if verbose else logging.WARNING)
