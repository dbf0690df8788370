"""What a check finds, what it may know, and how checks are run: each bounded in time, none able to end the others."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

from swarmcli.errors import SwarmError
from swarmcli.machine.registry import LocalPeers

if TYPE_CHECKING:
    from swarmcli.recipe import Link, Recipe

Outcome = Literal["OK", "WARN", "FAIL", "SKIP"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One line. `fix` says what helps, where `outcome` is not OK."""

    check: str
    outcome: Outcome
    text: str
    fix: str = ""


@dataclass
class Context:
    """What a person named, and what earlier checks have found out for later ones."""

    target: str = ""  # a link or the path of a recipe, as it was typed; "": this computer alone
    overrides: Sequence[str] = ()  # KEY=VALUE
    peers: Sequence[str] = ()  # addresses of first contacts beside those of the target
    network: bool = False  # whether what takes a minute and much of the link may be done
    registry: LocalPeers = field(default_factory=LocalPeers)
    link: Link | None = None
    recipe: Recipe | None = None
    downloaded: bool = True  # False: the recipe is a link's that this computer has not joined, so its data are not here
    reached: bool = False  # whether a first contact of the run has answered, with all that joining needs
    homes: Sequence[Path] = ()  # of this user's peers, as far as they are known


class Check(NamedTuple):
    """`look` may take `seconds`."""

    name: str
    look: Callable[[Context], Iterable[Finding]]
    seconds: float = 30.0
    doing: str = ""  # in words, for who waits; "": that it looks at what `name` says


def bounded(check: Check, context: Context) -> Iterator[Finding]:
    """A check that raises has failed, and one that takes too long too; the next ones go on.

    It runs in a thread that nobody waits for at the end: a hanging driver, name server or network disk cannot be
    interrupted.
    """
    found: queue.SimpleQueue[Finding | None] = queue.SimpleQueue()
    given_up = threading.Event()

    def run() -> None:
        try:
            for finding in check.look(context):
                found.put(finding)
        except Exception as error:
            found.put(of_error(check.name, error, fix="please report this with `swarm doctor --report`"))
        finally:
            found.put(None)

    threading.Thread(target=run, name=f"doctor {check.name}", daemon=True).start()

    def give_up() -> None:
        given_up.set()
        found.put(None)

    timer = threading.Timer(check.seconds, give_up)
    timer.daemon = True
    timer.start()
    while (finding := found.get()) is not None:
        yield finding
    timer.cancel()
    if given_up.is_set():
        yield Finding(
            check.name,
            "FAIL",
            f"no answer within {check.seconds:g} s",
            "a device, disk or name server hangs, or this computer is very busy; try again, and restart it if it stays",
        )


NO_FIX = "docs/troubleshooting.md goes through what helps, by what you see"


def of_error(
    check: str, error: Exception, *, fix: str = "", outcome: Outcome = "FAIL", otherwise: str = NO_FIX
) -> Finding:
    """Errors of this project end with what helps, behind a semicolon or in a last line; `fix` says something better,
    `otherwise` stands in where an error says nothing."""
    said = str(error).strip() or type(error).__name__
    if fix:
        what = said if isinstance(error, SwarmError) else f"{type(error).__name__}: {said}"
        return Finding(check, outcome, _line(what), fix)
    head, _, tail = said.rpartition("\n") if "\n" in said else said.partition("; ")
    return Finding(check, outcome, _line(head), _line(tail) or otherwise)


def _line(text: str) -> str:
    return ", ".join(" ".join(line.split()) for line in text.splitlines() if line.strip())
