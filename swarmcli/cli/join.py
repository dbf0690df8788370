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
    resume: options.Resume = None,
    nproc: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="Train with so many processes of this machine as one peer, for example one for each device.",
            show_default=False,
        ),
    ] = None,
    web: options.Web = None,
    web_host: options.WebHost = "127.0.0.1",
    verbose: options.Verbose = False,
) -> None:
    """Train with the others: compute gradients, average them, step together."""
    from swarmcli.cli.site.process import SiteProcess
    from swarmcli.recipe import load_recipe

    choices = options.LocalChoices(name, host, port, announce, client_mode, processes=nproc)
    settings = [*overrides, *choices.overrides()]
    process = SiteProcess.of_environment()
    if process is not None:
        from swarmcli.cli.site.join import JoinOptions, join_as_process

        join_as_process(process, JoinOptions(recipe, settings, peer, home, resume, web, web_host, verbose))
        return
    loaded = load_recipe(recipe, settings)
    if loaded.local.site.processes > 1:
        from swarmcli.cli.site.launcher import start_site

        raise typer.Exit(start_site(loaded.local.site.processes))

    from swarmcli.cli.session import Session
    from swarmcli.roles.trainer import run_trainer

    with Session("trainer", loaded, peer, home, verbose=verbose, web_port=web, web_host=web_host) as session:
        run_trainer(session.peer, session.show(), session.stop, resume=resume)
