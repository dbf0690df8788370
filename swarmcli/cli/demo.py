"""`swarm demo`: a whole swarm on this machine, from the first peer to the last epoch."""

from __future__ import annotations

import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from swarmcli.cli.demo_run import ActorReport, DemoPlan, DemoRun, Expectation, expectations
from swarmcli.cli.peers import Overrides
from swarmcli.errors import SwarmError
from swarmcli.recipe import load_recipe
from swarmcli.recipe.templates import SHIPPED
from swarmcli.words import format_duration, format_size

if TYPE_CHECKING:
    from rich.console import Console


MARK = ".swarm-demo"  # in a directory that a demo made, and that the next may remove
RECIPE = SHIPPED / "stdlib-lm.yaml"


def demo(
    overrides: Overrides,
    recipe: Annotated[Path | None, typer.Argument(metavar="[RECIPE]", help="Default: one that needs no data.")] = None,
    directory: Annotated[Path, typer.Option(help="Where the actors leave journals and logs.")] = Path("demo-run"),
    web: Annotated[int, typer.Option(metavar="PORT", help="Of the dashboard; 0: any free one.")] = 0,
    limit: Annotated[float, typer.Option(metavar="SECONDS", help="Give up after this time.")] = 300.0,
) -> None:
    """Train with a monitor, three trainers and an auxiliary on this machine; one of them is killed on the way.

    \b
    swarm demo
    swarm demo recipes/powersgd.yaml --web 8080
    """
    from rich.console import Console

    path = recipe or RECIPE
    loaded = load_recipe(path, overrides)
    if not loaded.max_epochs or loaded.max_epochs < 8:
        raise SwarmError(f"{path}: a demo needs max_epochs of 8 or more, to have a middle; add --set max_epochs=40")
    plan = DemoPlan.for_epochs(loaded.max_epochs)
    prepare(directory)
    console, began = Console(highlight=False, soft_wrap=True), time.monotonic()

    def say(text: str) -> None:
        console.print(f"[dim]{time.monotonic() - began:5.0f} s[/dim]  {text}", markup=True)

    run = DemoRun(
        path.resolve(), loaded.run_id, plan, directory.resolve(), say,
        overrides=overrides, limit_seconds=limit, web_port=web,
    )  # fmt: skip
    actors = run.perform()
    verdict = expectations(actors, plan)
    show(console, actors, verdict, time.monotonic() - began)
    console.print(f"journals, logs and checkpoints are in {directory}; swarm log {directory}/trainer-1 shows one")
    if not all(check.holds for check in verdict):
        raise typer.Exit(1)


def prepare(directory: Path) -> None:
    """Makes the directory anew. Only what an earlier demo made is removed."""
    if directory.exists():
        if not (directory / MARK).exists() and any(directory.iterdir()):
            raise SwarmError(f"{directory} holds something that no demo made; name another with --directory")
        shutil.rmtree(directory)
    directory.mkdir(parents=True)
    (directory / MARK).touch()


def show(console: Console, actors: Sequence[ActorReport], verdict: Sequence[Expectation], seconds: float) -> None:
    """Prints as a table what happened, and what was expected."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold")
    for heading in ("peer", "epochs", "samples", "loss", "rounds", "failed", "sent", "received", "fate"):
        left = heading in ("peer", "fate")
        table.add_column(heading, justify="left" if left else "right", no_wrap=True)
    for actor in actors:
        table.add_row(*_row(actor))
    console.print()
    console.print(table)
    console.print()
    for check in verdict:
        mark = "[green]✓[/green]" if check.holds else "[red]✗[/red]"
        console.print(f"{mark} {check.claim}  [dim]{check.detail}[/dim]")
    console.print(f"\nthe demo took {format_duration(seconds)}")


def _row(actor: ActorReport) -> tuple[str, ...]:
    sent, received = actor.bytes_moved
    losses = actor.losses
    committed = sum(r.outcome == "committed" for r in actor.rounds)
    return (
        actor.name,
        str(len(actor.epochs)),
        str(actor.samples),
        f"{losses[0]:.2f} → {losses[-1]:.2f}" if losses else "–",
        str(committed),
        str(len(actor.rounds) - committed),
        format_size(sent),
        format_size(received),
        actor.fate,
    )
