"""`swarm join`, `aux` and `monitor`: their arguments, and how those about this machine become overrides of the recipe's
`local:` section."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from json import dumps
from pathlib import Path
from typing import Annotated, Any

import typer

RecipePath = Annotated[
    str,
    typer.Argument(
        metavar="LINK|RECIPE",
        help="A link to the run (swarm://…), or its recipe file.",
        show_default=False,
    ),
]
Yes = Annotated[
    bool, typer.Option("--yes", help="Agree to what a link will do on this computer, for scripts that nobody watches.")
]
Overrides = Annotated[
    list[str],
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Override a key of the recipe, for example --set local.threads=2.",
        default_factory=list,
        show_default=False,
    ),
]
Peers = Annotated[
    list[str],
    typer.Option(
        "--peer",
        metavar="ADDRESS",
        help="A first contact: tcp://host:port or tcp://host:port/<peer id>. May be given more than once.",
        default_factory=list,
        show_default=False,
    ),
]
Name = Annotated[str | None, typer.Option(help="How this peer is called on the dashboard.", show_default=False)]
Host = Annotated[str | None, typer.Option(help="The interface to listen on.", show_default=False)]
Port = Annotated[int | None, typer.Option(help="The port to listen on; 0: any free one.", show_default=False)]
Announce = Annotated[
    list[str],
    typer.Option(
        metavar="ADDRESS",
        help="Where others can dial this peer, if you know it; it is checked.",
        default_factory=list,
        show_default=False,
    ),
]
ClientMode = Annotated[
    bool, typer.Option("--client-mode", help="Never listen: for a machine that cannot be dialed from outside.")
]
NoPortMapping = Annotated[
    bool, typer.Option("--no-port-mapping", help="Do not ask the router for a port where nobody can dial this machine.")
]
Relays = Annotated[
    bool | None,
    typer.Option(
        "--relay/--no-relay",
        help="Pass on the connections of peers that nobody can dial. Default: monitors and auxiliaries do.",
        show_default=False,
    ),
]
HomePath = Annotated[
    Path | None,
    typer.Option(
        "--home",
        help="This peer's own directory. Default: the first free one below the recipe's output_dir.",
        show_default=False,
    ),
]


def _port_of_dashboard(given: str | int) -> int:
    if str(given).isdecimal():
        return int(given)
    raise typer.BadParameter(f"expected a port, 0 for any free one, not {given!r}; an interface is named by --web-host")


Web = Annotated[
    int | None,
    typer.Option(metavar="PORT", parser=_port_of_dashboard, help="Serve the dashboard here.", show_default=False),
]
WebHost = Annotated[
    str, typer.Option(help="The interface of the dashboard; on another than this machine's own it asks for a token.")
]
WebNames = Annotated[
    list[str],
    typer.Option(
        "--web-name",
        metavar="NAME",
        help="A host name under which browsers may ask for the dashboard, beside addresses. May be repeated.",
        default_factory=list,
        show_default=False,
    ),
]
Resume = Annotated[
    str | None,
    typer.Option(
        metavar="PATH",
        help="Begin from a checkpoint (a directory, or 'latest' for the newest below output_dir).",
        show_default=False,
    ),
]
Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="Show what the network and the averaging do.")]


@dataclass(frozen=True, slots=True)
class LocalChoices:
    """What the command line says about this machine; None and empty leave the recipe's word."""

    name: str | None = None
    host: str | None = None
    port: int | None = None
    announce_addresses: Sequence[str] = ()
    client_mode: bool = False
    no_port_mapping: bool = False
    relay: bool | None = None
    processes: int | None = None

    def overrides(self) -> list[str]:
        """The same as `--set local.…` would say it."""
        chosen: dict[str, Any] = {
            "name": self.name,
            "host": self.host,
            "port": self.port,
            "announce_addresses": list(self.announce_addresses) or None,
            "client_mode": self.client_mode or None,
            "port_mapping": False if self.no_port_mapping else None,
            "relay": self.relay,
            **({"site": {}} if self.processes == 1 else {"site.processes": self.processes}),  # one process: no site
        }
        return [f"local.{key}={dumps(value, ensure_ascii=False)}" for key, value in chosen.items() if value is not None]


def join(
    recipe: RecipePath,
    peer: Peers,
    overrides: Overrides,
    announce: Announce,
    web_name: WebNames,
    name: Name = None,
    host: Host = None,
    port: Port = None,
    client_mode: ClientMode = False,
    no_port_mapping: NoPortMapping = False,
    relay: Relays = None,
    home: HomePath = None,
    resume: Resume = None,
    nproc: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="Train with so many processes of this machine as one peer, for example one for each device.",
            show_default=False,
        ),
    ] = None,
    web: Web = None,
    web_host: WebHost = "127.0.0.1",
    yes: Yes = False,
    verbose: Verbose = False,
) -> None:
    """Train with the others: compute gradients, average them, step together."""
    from swarmcli.cli.linking import recipe_named
    from swarmcli.cli.site.process import SiteProcess
    from swarmcli.recipe import load_recipe

    choices = LocalChoices(name, host, port, announce, client_mode, no_port_mapping, relay, nproc)
    settings = [*overrides, *choices.overrides()]
    process = SiteProcess.of_environment()
    named = recipe_named(recipe, "trainer", settings, yes=yes)
    contacts = [*peer, *named.contacts]
    if process is not None:
        from swarmcli.cli.site.join import JoinOptions, join_as_process

        options = JoinOptions(named.recipe, settings, contacts, home, resume, web, web_host, web_name, verbose)
        join_as_process(process, options)
        return
    loaded = load_recipe(named.recipe, settings)
    if loaded.local.site.processes > 1:
        from swarmcli.cli.site.launcher import start_site

        raise typer.Exit(start_site(loaded.local.site.processes, named.in_place_of(recipe, sys.argv[1:])))

    from swarmcli.cli.session import Session
    from swarmcli.roles.run import run_trainer

    with Session(
        "trainer", loaded, contacts, home, verbose=verbose, web_port=web, web_host=web_host, web_names=web_name
    ) as session:
        run_trainer(session.peer, session.show(), session.stop, resume=resume)


def aux(
    recipe: RecipePath,
    peer: Peers,
    overrides: Overrides,
    announce: Announce,
    name: Name = None,
    host: Host = None,
    port: Port = None,
    client_mode: ClientMode = False,
    no_port_mapping: NoPortMapping = False,
    relay: Relays = None,
    home: HomePath = None,
    yes: Yes = False,
    verbose: Verbose = False,
) -> None:
    """Help without computing gradients: add up the parts of others, on a processor alone."""
    from swarmcli.cli.linking import recipe_named
    from swarmcli.cli.session import Session
    from swarmcli.recipe import load_recipe
    from swarmcli.roles.run import run_auxiliary

    choices = LocalChoices(name, host, port, announce, client_mode, no_port_mapping, relay)
    settings = [*overrides, *choices.overrides()]
    named = recipe_named(recipe, "auxiliary", settings, yes=yes)
    loaded = load_recipe(named.recipe, settings)
    with Session("auxiliary", loaded, [*peer, *named.contacts], home, verbose=verbose) as session:
        run_auxiliary(session.peer, session.show(), session.stop)


DEFAULT_PORT = 31330
DEFAULT_WEB_PORT = 8080


def monitor(
    recipe: RecipePath,
    peer: Peers,
    overrides: Overrides,
    announce: Announce,
    web_name: WebNames,
    name: Name = None,
    host: Host = None,
    port: Port = None,
    client_mode: ClientMode = False,
    no_port_mapping: NoPortMapping = False,
    relay: Relays = None,
    home: HomePath = None,
    resume: Resume = None,
    web: Annotated[
        int, typer.Option(metavar="PORT", parser=_port_of_dashboard, help="Of the dashboard; 0: any free one.")
    ] = DEFAULT_WEB_PORT,
    web_host: WebHost = "127.0.0.1",
    leave_when_done: Annotated[
        bool, typer.Option("--leave-when-done", help="Leave when the run has finished, instead of at Ctrl-C.")
    ] = False,
    yes: Yes = False,
    verbose: Verbose = False,
) -> None:
    """Follow the run without computing: serve the dashboard, keep checkpoints, hand out the state."""
    from swarmcli.cli.linking import recipe_named
    from swarmcli.cli.session import Session
    from swarmcli.recipe import load_recipe
    from swarmcli.roles.run import run_monitor

    choices = LocalChoices(name, host, port, announce, client_mode, no_port_mapping, relay)
    settings = [*overrides, *choices.overrides()]
    named = recipe_named(recipe, "monitor", settings, yes=yes)
    loaded = load_recipe(named.recipe, settings)
    contacts = [*peer, *named.contacts]
    default = 0 if "port" in loaded.local.model_fields_set else DEFAULT_PORT
    with Session(
        "monitor",
        loaded,
        contacts,
        home,
        port=default,
        verbose=verbose,
        web_port=web,
        web_host=web_host,
        web_names=web_name,
    ) as session:
        watch = session.show()
        run_monitor(session.peer, watch, session.stop, resume=resume, leave_when_done=leave_when_done)
