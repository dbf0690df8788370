"""`swarm join`: train."""

from __future__ import annotations

from typing import Annotated

import typer

from swarmcli.cli import options


def join(
    recipe: options.RecipePath,
    peer: options.Peers,
    overrides: options.Overrides,
    announce: options.Announce,
    name: options.Name = None,
    host: options.Host = None,
    port: options.Port = None,
    client_mode: options.ClientMode = False,
    home: options.HomePath = None,
    resume: Annotated[
        str | None,
        typer.Option(
            metavar="PATH",
            help="Begin from a checkpoint (a directory, or 'latest' for the newest below output_dir).",
            show_default=False,
        ),
    ] = None,
    web: options.Web = None,
    web_host: options.WebHost = "127.0.0.1",
    verbose: options.Verbose = False,
) -> None:
    """Train with the others: compute gradients, average them, step together."""
    from swarmcli.cli.session import Session
    from swarmcli.roles.trainer import run_trainer

    choices = options.LocalChoices(name, host, port, announce, client_mode)
    with Session("trainer", recipe, [*overrides, *choices.overrides()], peer, home, verbose=verbose) as session:
        run_trainer(session.peer, session.show(web, web_host), session.stop, resume=resume)
