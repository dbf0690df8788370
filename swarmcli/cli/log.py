"""`swarm log`: reads a journal, while its run goes on or long after.

Finds the journal, chooses the run, prints a summary of it or a line for each thing that happened, in the order of their
times, and goes on with new rows if asked.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import asdict
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from swarmcli.cli.console import day, epoch_line, event_line, out, round_line
from swarmcli.cli.log_summary import print_summary
from swarmcli.cli.which import Which, journal_of
from swarmcli.errors import JournalError
from swarmcli.events import EpochAdvanced, Event, PeerSeen, RoundFinished
from swarmcli.journal import JournalReader, Line, printable
from swarmcli.journal.describe import short, with_names

GROWING = ("epochs", "rounds", "events")  # lists to which rows are added; a peer's row changes in place
FIRST_SHOWN = 10  # rows of each list that are shown before new ones
LOOK_SECONDS = 0.5  # seconds between two looks for new rows
STYLES = {"failed": "red", "undecided": "yellow", "detail": "dim", "warning": "yellow", "error": "red"}


def show(
    which: str | None,
    lists: Sequence[str] = (),
    last: int | None = None,
    *,
    as_json: bool = False,
    follow: bool = False,
    console: Console = out,
    now: Callable[[], float] = time.time,
) -> None:
    """Prints the journal that `which` names (`journal_of`): of each list the `last` rows, or all; without `lists` a
    summary.

    With `follow` it ends only by an exception, such as Ctrl-C's. Raises JournalError or UsageError if no journal, more
    than one, or one that cannot be read is named.
    """
    with JournalReader(journal_of(which)) as reader:
        runs = reader.runs()
        if not runs:
            raise JournalError(f"{reader.path} holds no run yet")
        run_id = runs[-1].run_id
        if follow:
            named = [name for name in lists if name in GROWING] or GROWING
            for record in followed(reader, run_id, named, last or FIRST_SHOWN, time.sleep):
                _print(console, record, {} if as_json else _names(reader, run_id), as_json=as_json)
        elif lists:
            records, _ = _added(reader, run_id, dict.fromkeys(lists, 0), last)
            names = _names(reader, run_id)
            for record in records:
                _print(console, record, names, as_json=as_json)
            if not (records or as_json):
                console.print(f"no {' or '.join(lists)} yet")
        elif as_json:
            _print_json(console, "runs", asdict(runs[-1]) | asdict(reader.totals(run_id)))
        else:
            print_summary(console, reader, runs, now())


def _added(
    reader: JournalReader, run_id: str, seen: Mapping[str, int], limit: int | None
) -> tuple[list[Event], dict[str, int]]:
    """Returns the rows of each list after the one whose id was last seen, at most so many of the last ones, by time;
    and the ids that are the last now."""
    rows: list[Event] = []
    ids: dict[str, int] = {}
    for name, after in seen.items():
        if name == "peers":
            found: Sequence[Event] = reader.peers(run_id)[-limit if limit else 0 :]
        elif name == "epochs" and not after:
            found = reader.epochs(run_id, limit=limit)  # each epoch once, even if it was reached more than once
        else:
            found = reader.added(run_id, name, after=after, limit=limit)
        ids[name] = max((record.id for record in found), default=after)
        rows += found
    return sorted(rows, key=lambda record: record.time), ids


def followed(
    reader: JournalReader, run_id: str, lists: Sequence[str], last: int, wait: Callable[[float], None]
) -> Iterator[Event]:
    """Yields the last rows of the lists, and then new ones, for ever."""
    seen: dict[str, int] = dict.fromkeys(lists, 0)
    limit: int | None = last
    while True:
        rows, seen = _added(reader, run_id, seen, limit)
        yield from rows
        limit = None
        wait(LOOK_SECONDS)


def _names(reader: JournalReader, run_id: str) -> dict[str, str]:
    """Returns the names that peers have given themselves, by their short ids. A peer without one reports its id."""
    return {
        short(peer.peer): printable(peer.name, 40)
        for peer in reader.peers(run_id)
        if peer.name and not peer.peer.startswith(peer.name)
    }


def _print(console: Console, record: Event, names: Mapping[str, str], *, as_json: bool) -> None:
    style = ""
    match record:
        case EpochAdvanced():
            name, text = "epochs", epoch_line(record)
            if record.gradient_norm is not None and record.update_norm is not None:
                text += f"  gradient {record.gradient_norm:.3g}, update {record.update_norm:.3g}"
        case RoundFinished():
            left_out = "; ".join(f"without {short(peer)}: {reason}" for peer, reason in record.left_out.items())
            name, text = "rounds", with_names(f"{round_line(record)}  {printable(left_out)}".rstrip(), names)
            style = STYLES.get(record.outcome, "")
        case Line():
            name, text, style = "events", event_line(record), STYLES.get(record.level, "")
        case PeerSeen():
            gone = f", {record.gone}" if record.gone else ""
            rate = f"{record.samples_per_second:,.1f} samples/s, " if record.samples_per_second else ""
            called = names.get(short(record.peer), "")
            text = (
                f"{called} {short(record.peer)}, {printable(record.role, 20)}, epoch {record.epoch}, {rate}"
                f"first seen {day(record.first_seen)}{gone}"
            )
            name, text = "peers", text.strip()
        case _:
            return
    if as_json:
        _print_json(console, name, asdict(record))
    else:
        console.print(Text(f"{day(record.time)}  {text}", style=style))
        console.file.flush()


def _print_json(console: Console, table: str, values: Mapping[str, Any]) -> None:
    """Prints one line, ASCII only, which every terminal and pipe can take."""
    console.file.write(json.dumps({"table": table, **values}, default=list) + "\n")
    console.file.flush()


def log(
    which: Which = None,
    epochs: Annotated[bool, typer.Option("--epochs", help="List the epochs.")] = False,
    rounds: Annotated[
        bool, typer.Option("--rounds", help="List the rounds of averaging, and why some failed.")
    ] = False,
    events: Annotated[bool, typer.Option("--events", help="List all other events.")] = False,
    peers: Annotated[bool, typer.Option("--peers", help="List the peers, as they were seen last.")] = False,
    last: Annotated[
        int | None, typer.Option("--last", "-n", min=1, help="How many of each list, the latest ones.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object per line.")] = False,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on printing what is added, until Ctrl-C.")] = False,
) -> None:
    """Show what a peer went through: a summary, or the lists that are asked for.

    \b
    swarm log my-run
    swarm log runs/my-run/trainer-1 --rounds -n 20
    swarm log my-run --events --follow
    """

    wanted = {"epochs": epochs, "rounds": rounds, "events": events, "peers": peers}
    with suppress(KeyboardInterrupt) if follow else nullcontext():  # the usual end of following
        show(which, [name for name in wanted if wanted[name]], last, as_json=as_json, follow=follow)
