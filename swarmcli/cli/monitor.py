"""`swarm monitor`: watch a run, keep its checkpoints, be the first contact of newcomers."""

from __future__ import annotations

from typing import Annotated

import typer

from swarmcli.cli import options

DEFAULT_PORT = 31330
DEFAULT_WEB_PORT = 8080


def monitor(
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
    web: Annotated[int, typer.Option(metavar="PORT", help="Of the dashboard; 0: any free one.")] = DEFAULT_WEB_PORT,
    web_host: options.WebHost = "127.0.0.1",
    leave_when_done: Annotated[
        bool, typer.Option("--leave-when-done", help="Leave when the run has finished, instead of at Ctrl-C.")
    ] = False,
    verbose: options.Verbose = False,
) -> None:
    """Follow the run without computing: serve the dashboard, keep checkpoints, hand out the state."""
    from swarmcli.cli.session import Session
    from swarmcli.recipe import load_recipe
    from swarmcli.roles.monitor import run_monitor

    choices = options.LocalChoices(name, host, port, announce, client_mode)
    loaded = load_recipe(recipe, [*overrides, *choices.overrides()])
    default = 0 if "port" in loaded.local.model_fields_set else DEFAULT_PORT
    with Session(
        "monitor", loaded, peer, home, port=default, verbose=verbose, web_port=web, web_host=web_host
    ) as session:
        watch = session.show()
        run_monitor(session.peer, watch, session.stop, resume=resume, leave_when_done=leave_when_done)
