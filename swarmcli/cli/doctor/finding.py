"""Findings of checks, what checks may know, and how they are run: none is able to end the others."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

from swarmcli.cli.ending import plight
from swarmcli.errors import AddressError, MembershipError, SwarmError

if TYPE_CHECKING:
    from swarmcli.recipe import Link, Recipe

NAMES = {AddressError: "link", MembershipError: "invitation"}  # of what an error says, whichever check finds it
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
    """The target that a person named, and what earlier checks have found out for later ones."""

    target: str = ""  # a link or the path of a recipe, as it was typed; "": this computer alone
    overrides: Sequence[str] = ()  # KEY=VALUE
    peers: Sequence[str] = ()  # addresses of first contacts beside those of the target
    network: bool = False  # whether what takes a minute and much of the link may be done
    link: Link | None = None
    recipe: Recipe | None = None
    reached: bool = False  # whether a first contact of the run has answered, with all that joining needs


class Check(NamedTuple):
    name: str  # of what it finds where it fails as a whole
    look: Callable[[Context], Iterable[Finding]]
    seconds: float = 0.0  # after which it is given up, where torch or a network may hang; 0: it hangs on neither
    doing: str = ""  # in words, for who waits; "": that it looks at what `name` says


def findings(check: Check, context: Context) -> Iterator[Finding]:
    """A check that raises has failed, and one that takes too long too; the next ones go on."""
    if not check.seconds:
        yield from _told(check, context)
        return
    found: queue.SimpleQueue[Finding | None] = queue.SimpleQueue()

    def run() -> None:
        for finding in _told(check, context):
            found.put(finding)
        found.put(None)

    # Nobody waits for this thread at the end: a driver or a name server that hangs cannot be interrupted.
    threading.Thread(target=run, name=f"doctor {check.name}", daemon=True).start()
    deadline = time.monotonic() + check.seconds
    try:
        while (finding := found.get(timeout=max(0.0, deadline - time.monotonic()))) is not None:
            yield finding
    except queue.Empty:
        text = f"no answer within {check.seconds:g} s"
        fix = "a device or name server hangs, or this computer is very busy; try again, and restart it if it stays"
        yield Finding(check.name, "FAIL", text, fix)


def _told(check: Check, context: Context) -> Iterator[Finding]:
    try:
        yield from check.look(context)
    except SwarmError as error:
        yield from of_error(next((name for kind, name in NAMES.items() if isinstance(error, kind)), check.name), error)
    except Exception as error:
        said = plight(error) or f"{type(error).__name__}: {error}; please report this with the output of `swarm doctor`"
        yield from of_error(check.name, SwarmError(said))


def of_error(check: str, error: SwarmError) -> Iterator[Finding]:
    """Errors of this project end with what helps, after a semicolon or in a last line. One that names several problems
    has a line for each, none of them further in."""
    said = str(error).strip() or type(error).__name__
    for problem in [said] if "\n  " in said else said.splitlines():
        parts = problem.rpartition("\n") if "\n" in problem else problem.partition("; ")
        text, _, fix = (", ".join(" ".join(line.split()) for line in part.splitlines()) for part in parts)
        yield Finding(check, "FAIL", text, fix or "ask the owner of the run, and send this output along")
