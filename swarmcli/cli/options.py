"""Arguments that several verbs share, and how they become overrides of a recipe's `local:` section."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from json import dumps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from swarmcli.recipe import Recipe
    from swarmcli.roles.home import Home

RecipePath = Annotated[Path, typer.Argument(metavar="RECIPE", help="The recipe file of the run.", show_default=False)]
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
        help="An address to tell others instead of the found ones.",
        default_factory=list,
        show_default=False,
    ),
]
ClientMode = Annotated[
    bool, typer.Option("--client-mode", help="Never listen: for a machine that cannot be dialed from outside.")
]
HomePath = Annotated[
    Path | None,
    typer.Option(
        "--home",
        help="This peer's own directory. Default: the first free one below the recipe's output_dir.",
        show_default=False,
    ),
]
Web = Annotated[int | None, typer.Option(metavar="PORT", help="Serve the dashboard here.", show_default=False)]
WebHost = Annotated[str, typer.Option(help="The interface of the dashboard.")]
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
    processes: int | None = None

    def overrides(self) -> list[str]:
        """The same as `--set local.…` would say it."""
        chosen: dict[str, Any] = {
            "name": self.name,
            "host": self.host,
            "port": self.port,
            "announce_addresses": list(self.announce_addresses) or None,
            "client_mode": self.client_mode or None,
            **({"site": {}} if self.processes == 1 else {"site.processes": self.processes}),  # one process: no site
        }
        return [f"local.{key}={dumps(value, ensure_ascii=False)}" for key, value in chosen.items() if value is not None]


def claim_home(recipe: Recipe, role: str, path: Path | None) -> Home:
    """The directory that was asked for, or the first free one of this role."""
    from swarmcli.roles.home import Home

    return Home.at(path) if path else Home.claim(recipe.output_dir / recipe.run_id, role)
