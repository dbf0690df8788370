"""`swarm checkpoints`: which there are on this computer, whether they are whole, and removing some of them."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.text import Text

from swarmcli.checkpoints.directory import CheckpointDirectory, Keep
from swarmcli.checkpoints.layout import BEST, LATEST, find_checkpoint
from swarmcli.checkpoints.looking import CheckpointInfo, listing, verify
from swarmcli.cli.console import out, plain_table
from swarmcli.cli.local import Json, Quiet
from swarmcli.cli.which import places_of
from swarmcli.errors import CheckpointError
from swarmcli.machine.places import places_of_runs
from swarmcli.words import format_size, plural, printable, roughly

Which = Annotated[
    str | None,
    typer.Argument(
        metavar="LINK|RECIPE|DIRECTORY|RUN",
        help="Of which run: a link, a recipe, the run's name, a checkpoint, or a directory that holds some at any "
        "depth. Default: your runs on this computer.",
    ),
]
NONE_HERE = (
    "there is no checkpoint yet in the runs that you joined by a link, those of peers that run now, or below ./runs or "
    "./*/runs; give the path of a run's directory"
)

app = typer.Typer(
    add_completion=False,
    rich_markup_mode="rich",
    help="Show the checkpoints on this computer, check that they are whole, and remove what need not stay.",
    epilog="The section checkpoint of the recipe says when they are written and which stay.",
    no_args_is_help=True,
)


@app.command("list")
def list_(path: Which = None, as_json: Json = False, quiet: Quiet = False) -> None:
    """Show which checkpoints there are, of which epoch and loss, and why they stay.

    \b
    swarm checkpoints list                 of your runs
    swarm checkpoints list my-run          of one of them
    swarm checkpoints list runs/stdlib-lm  below a directory
    swarm checkpoints list --json          for programs: a list, one object for each
    """
    found = looked_for(path)
    if as_json:
        typer.echo(json.dumps([_plain(info) for info in found]))
    elif found:
        show(found, time.time())
    elif not quiet:
        typer.echo(NONE_HERE if path is None else f"there is no checkpoint in {path}", err=True)


@app.command("verify")
def verify_(path: Which = None, as_json: Json = False, quiet: Quiet = False) -> None:
    """Read checkpoints from end to end, and say whether they are what was written. Ends with 1 if one is not.

    \b
    swarm checkpoints verify                                       all of your runs
    swarm checkpoints verify runs/stdlib-lm/monitor-1/checkpoints/latest
    """
    found = [(info, verify(info.path)) for info in _some(path)]
    if as_json:
        typer.echo(json.dumps([{**_plain(info), "problem": problem} for info, problem in found]))
    else:
        for info, problem in found:
            if problem or not quiet:
                typer.echo(printable(f"{'DAMAGED' if problem else 'whole'}  {info.path}", 4000))
            if problem:
                typer.echo(f"         {printable(problem, 4000)}")
    if any(problem for _, problem in found):
        raise typer.Exit(1)


@app.command()
def prune(
    path: Which = None,
    keep: Annotated[int | None, typer.Option(min=1, help="How many of the newest stay.")] = None,
    keep_every: Annotated[int | None, typer.Option(min=0, help="One checkpoint in so many epochs stays.")] = None,
    keep_best: Annotated[int | None, typer.Option(min=0, help="How many of those with the lowest loss stay.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would be removed.")] = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Remove the checkpoints that need not stay: by the rules of the run that wrote them, or by yours.

    \b
    swarm checkpoints prune --dry-run           what would go
    swarm checkpoints prune runs --keep 1       only the newest of each peer stays, and the best
    """
    chosen = {"newest": keep, "every": keep_every, "best": keep_best}
    removed: list[CheckpointInfo] = []
    for directory in sorted({info.path.parent for info in _some(path)}):
        rules = Keep(
            **{**asdict(CheckpointDirectory(directory).keep), **{k: v for k, v in chosen.items() if v is not None}}
        )
        removed += _pruned(directory, rules, dry_run=dry_run)
    if as_json:
        typer.echo(json.dumps([_plain(info) for info in removed]))
    elif not quiet:
        for info in removed:
            typer.echo(f"{'would go' if dry_run else 'removed'}  {info.path}")
        typer.echo(_gone_in_words(removed, dry_run=dry_run), err=True)


def _gone_in_words(removed: Sequence[CheckpointInfo], *, dry_run: bool) -> str:
    if not removed:
        return "nothing to remove: by these rules all checkpoints stay; --keep 1 keeps the newest of each peer"
    number = plural(len(removed), "checkpoint")
    return f"{number} {'would go' if dry_run else 'removed'}, {format_size(sum(info.bytes for info in removed))}"


def _pruned(directory: Path, rules: Keep, *, dry_run: bool) -> list[CheckpointInfo]:
    """Removes what a peer's directory may lose. What a killed peer left unfinished, its next start repairs."""
    checkpoints = CheckpointDirectory(directory, rules)
    before = {info.path: info for info in listing(directory) if info.path.parent == directory}
    gone = checkpoints.to_go() if dry_run else checkpoints.prune()
    return [before[place] for place in gone if place in before]


def _some(path: str | None) -> list[CheckpointInfo]:
    found = looked_for(path)
    if not found:
        raise CheckpointError(NONE_HERE if path is None else f"there is no checkpoint in {path}")
    return found


def looked_for(what: str | None) -> list[CheckpointInfo]:
    """Returns the checkpoints that are named, or this user's; of each peer the newest first. Raises CheckpointError if
    what is named has none, and what `places_of` raises."""
    if what is None:
        return [info for place in places_of_runs() for info in listing(place)]
    path = Path(what)
    if not path.exists() or path.suffix in (".yaml", ".yml"):
        places, run_id, _ = places_of(what)
        found = {info.path.resolve(): info for place in places if place.is_dir() for info in listing(place)}
        if of_run := [info for info in found.values() if info.run_id == run_id]:
            return of_run
        runs = ", ".join(sorted({info.run_id for info in found.values() if info.run_id})) or "none"
        raise CheckpointError(
            f"no checkpoint of the run {run_id} is on this computer; there are some of: {printable(runs, 500)}; give "
            "one of these, a checkpoint, or a directory that holds some"
        )
    one = find_checkpoint(path) if path.name in (LATEST, BEST) else path
    below = listing(one)
    return below or [info for info in listing(one.parent) if info.path == one]


def show(found: Sequence[CheckpointInfo], now: float) -> None:
    """Prints a heading for each directory, and a line for each checkpoint."""
    for directory in dict.fromkeys(info.path.parent for info in found):
        here = [info for info in found if info.path.parent == directory]
        run_id = next((info.run_id for info in here if info.run_id), "of no run that can be read")
        table = plain_table()
        for column in ("epoch", "written", "size", "loss"):
            table.add_column(column, justify="right", no_wrap=True)
        for column in ("stays as", "link"):
            table.add_column(column)
        for info in here:
            table.add_row(*_row(info, now))
        out.print(Text(printable(f"{run_id}: {directory}", 2000)), soft_wrap=True)
        out.print(table)


def _row(info: CheckpointInfo, now: float) -> tuple[str, ...]:
    loss = "" if info.loss is None else f"{info.loss:.4f}"
    links = [name for name, is_it in (("latest", info.latest), ("best", info.best)) if is_it]
    said = f"DAMAGED: {info.problem}" if info.problem else " ".join(links)
    stays = ", ".join(info.kept) or "no"
    return (
        str(info.epoch),
        f"{roughly(now - info.written)} ago",
        format_size(info.bytes),
        loss,
        stays,
        printable(said, 300),
    )


def _plain(info: CheckpointInfo) -> dict[str, Any]:
    return {**asdict(info), "path": str(info.path), "kept": list(info.kept)}
