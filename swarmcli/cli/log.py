"""`swarm log`: read a journal, while its run goes on or long after."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

USAGE = 2  # the exit code for a journal that is not there or cannot be read
INTERRUPTED = 130


def log(
    path: Annotated[
        Path | None,
        typer.Argument(
            metavar="PATH", help="A journal, or a directory that holds one. Default: here.", show_default=False
        ),
    ] = None,
    epochs: Annotated[bool, typer.Option("--epochs", help="List the epochs.")] = False,
    rounds: Annotated[
        bool, typer.Option("--rounds", help="List the rounds of averaging, and why some failed.")
    ] = False,
    events: Annotated[bool, typer.Option("--events", help="List what else happened.")] = False,
    peers: Annotated[bool, typer.Option("--peers", help="List the peers that were seen.")] = False,
    last: Annotated[
        int | None, typer.Option("--last", "-n", min=1, help="Only the last so many of each list.", show_default=False)
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object per line.")] = False,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on with what is added, until Ctrl-C.")] = False,
) -> None:
    """Show what a peer went through: a summary, or the lists that are asked for."""
    from swarmcli.cli.console import err
    from swarmcli.cli.log_show import Selection, show
    from swarmcli.errors import JournalError

    chosen = {"epochs": epochs, "rounds": rounds, "events": events, "peers": peers}
    selection = Selection(tuple(name for name, wanted in chosen.items() if wanted), last, as_json)
    try:
        show(path, selection, follow=follow)
    except JournalError as error:
        err.print(f"swarm log: {error}", soft_wrap=True)
        raise typer.Exit(USAGE) from error
    except KeyboardInterrupt as interrupt:
        raise typer.Exit(INTERRUPTED if not follow else 0) from interrupt
