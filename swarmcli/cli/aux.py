"""`swarm aux`: reduce for others."""

from __future__ import annotations

from swarmcli.cli import options


def aux(
    recipe: options.RecipePath,
    peer: options.Peers,
    overrides: options.Overrides,
    announce: options.Announce,
    name: options.Name = None,
    host: options.Host = None,
    port: options.Port = None,
    client_mode: options.ClientMode = False,
    home: options.HomePath = None,
    verbose: options.Verbose = False,
) -> None:
    """Help without computing gradients: add up the parts of others, on a processor alone."""
    from swarmcli.cli.session import Session
    from swarmcli.recipe import load_recipe
    from swarmcli.roles.auxiliary import run_auxiliary

    choices = options.LocalChoices(name, host, port, announce, client_mode)
    loaded = load_recipe(recipe, [*overrides, *choices.overrides()])
    with Session("auxiliary", loaded, peer, home, verbose=verbose) as session:
        run_auxiliary(session.peer, session.show(), session.stop)
