"""`swarm log`: read a journal, while its run goes on or long after.

Finds the journal, chooses the run, prints its lists, and follows them if asked.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Annotated, Any

import typer
from rich.console import Console

from swarmcli.cli.console import clock, epoch_line, event_line, out, round_line
from swarmcli.cli.ending import ExitCode
from swarmcli.cli.log_tables import print_summary, print_table
from swarmcli.cli.which import Which, journal_of
from swarmcli.errors import JournalError, UsageError
from swarmcli.events import EpochAdvanced, Event, RoundFinished
from swarmcli.journal import JournalReader, Line, RunRecord, printable
from swarmcli.journal.describe import short

FOLLOWED = ("epochs", "rounds", "events")  # what is added row by row; a peer's row changes in place


@dataclass(frozen=True, slots=True)
class Selection:
    """`lists` empty: the summary. `last`: only the newest so many rows of each list."""

    lists: tuple[str, ...] = ()
    last: int | None = None
    as_json: bool = False


def show(
    which: str | None,
    selection: Selection,
    *,
    follow: bool = False,
    console: Console = out,
    now: Callable[[], float] = time.time,
) -> None:
    """Prints the journal that `which` names (`journal_of`).

    With `follow` it only ends by an exception, Ctrl-C's for one.
    Raises JournalError, UsageError where no journal, more than one, or one that cannot be read is named.
    """
    with JournalReader(journal_of(which)) as reader:
        runs = reader.runs()
        if not runs:
            raise JournalError(f"{reader.path} holds no run yet")
        run_id = runs[-1].run_id
        if follow:
            for record in followed(reader, run_id, selection, time.sleep):
                _print_line(console, record, selection.as_json)
        elif selection.lists:
            for name in selection.lists:
                if len(selection.lists) > 1 and not selection.as_json and not console.is_terminal:
                    console.print(f"# {name}")
                records = rows(reader, run_id, name, selection.last)
                if not selection.as_json:
                    known = reader.peers(run_id) if name == "rounds" else []
                    names = {short(peer.peer): printable(peer.name, 40) for peer in known if peer.name}
                    print_table(console, name, records, names)
                    continue
                for record in records:
                    _print_json(console, name, asdict(record))
        elif selection.as_json:
            _print_json(console, "runs", summary(reader, runs))
        else:
            print_summary(console, reader, runs, now())


def rows(reader: JournalReader, run_id: str, name: str, last: int | None) -> list[Any]:
    """The records of one list, oldest first."""
    match name:
        case "epochs":
            return reader.epochs(run_id, limit=last)
        case "rounds":
            return reader.rounds(run_id, limit=last)
        case "events":
            return reader.events(run_id, limit=last)
        case _:
            peers = reader.peers(run_id)
            return peers if last is None else peers[-last:]


def summary(reader: JournalReader, runs: list[RunRecord]) -> dict[str, Any]:
    """The last run and its sums, for programs."""
    run_id = runs[-1].run_id
    losses = [epoch.loss for epoch in reader.epochs(run_id) if epoch.loss is not None]
    last = reader.epochs(run_id, limit=1)
    return {
        **asdict(runs[-1]),
        "starts": sum(run.run_id == run_id for run in runs),
        "last_epoch": last[-1].epoch if last else None,
        "first_loss": losses[0] if losses else None,
        "last_loss": losses[-1] if losses else None,
        **asdict(reader.totals(run_id)),
    }


def followed(
    reader: JournalReader, run_id: str, selection: Selection, wait: Callable[[float], None]
) -> Iterator[Event]:
    """The last rows of the chosen lists, and then those that are added, in the order of their times, for ever."""
    lists = [name for name in selection.lists if name in FOLLOWED] or list(FOLLOWED)
    seen = dict.fromkeys(lists, 0)
    limit: int | None = selection.last or 10
    while True:
        fresh: list[EpochAdvanced | RoundFinished | Line] = []
        for name in lists:
            added = reader.added(run_id, name, after=seen[name], limit=limit)
            seen[name] = max((record.id for record in added), default=seen[name])
            fresh += added
        yield from sorted(fresh, key=lambda record: record.time)
        limit = None
        wait(0.5)  # seconds


def _print_line(console: Console, record: Event, as_json: bool) -> None:
    match record:
        case EpochAdvanced():
            name, text = "epochs", epoch_line(record)
        case RoundFinished():
            name, text = "rounds", round_line(record)
        case Line():
            name, text = "events", event_line(record)
        case _:
            return
    if as_json:
        _print_json(console, name, asdict(record))
    else:
        console.print(f"{clock(record.time)}  {text}", soft_wrap=not console.is_terminal)
        console.file.flush()


def _print_json(console: Console, table: str, values: Mapping[str, Any]) -> None:
    """One line; ASCII only, so that no terminal and no pipe can stumble over a name."""
    console.file.write(json.dumps({"table": table, **values}, default=list) + "\n")
    console.file.flush()


def log(
    which: Which = None,
    epochs: Annotated[bool, typer.Option("--epochs", help="List the epochs.")] = False,
    rounds: Annotated[
        bool, typer.Option("--rounds", help="List the rounds of averaging, and why some failed.")
    ] = False,
    events: Annotated[bool, typer.Option("--events", help="List what else happened.")] = False,
    peers: Annotated[bool, typer.Option("--peers", help="List the peers that were seen.")] = False,
    last: Annotated[int | None, typer.Option("--last", "-n", min=1, help="Only the last so many of each list.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object per line.")] = False,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on with what is added, until Ctrl-C.")] = False,
) -> None:
    """Show what a peer went through: a summary, or the lists that are asked for.

    \b
    swarm log my-run
    swarm log runs/my-run/trainer-1 --rounds -n 20
    swarm log my-run --events --follow
    """

    chosen = {"epochs": epochs, "rounds": rounds, "events": events, "peers": peers}
    selection = Selection(tuple(name for name, wanted in chosen.items() if wanted), last, as_json)
    try:
        show(which, selection, follow=follow)
    except (JournalError, UsageError) as error:
        typer.echo(f"swarm log: {error}", err=True)
        raise typer.Exit(ExitCode.USAGE) from error
    except KeyboardInterrupt as interrupt:
        raise typer.Exit(ExitCode.DONE if follow else ExitCode.INTERRUPTED) from interrupt
