"""`swarm join`, `aux` and `monitor`: their options, and how those about this machine override the recipe's `local:`
section."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from swarmcli.cli.ending import interrupted_soon
from swarmcli.cli.local import spread
from swarmcli.errors import UsageError

if TYPE_CHECKING:
    from swarmcli.cli.linking import RecipeToJoin
    from swarmcli.cli.session import Session
    from swarmcli.optim.config import Role
    from swarmcli.recipe import Recipe
    from swarmcli.recipe.schema import Setting
    from swarmcli.training.resumed import Resume

_OWN_PATH = re.compile(r"\s*(output_dir|local\.data_dir|local\.identity_path)\s*=\s*(?!~|null$|$|[\"'{[])(.+)")


def typed_here(settings: Sequence[str] | None) -> list[str]:
    """Makes paths of this computer that were typed absolute: they begin in the working directory, and those of the
    recipe beside it."""
    typed = ((word, _OWN_PATH.fullmatch(word)) for word in settings or ())
    return [f"{own[1]}={Path(own[2].strip()).absolute()}" if own else word for word, own in typed]


Overrides = Annotated[
    list[str],
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        callback=typed_here,
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
Host = Annotated[str | None, typer.Option(help="The interface to listen on.")]
Port = Annotated[int | None, typer.Option(help="The port to listen on; 0: any free one.")]
NoPortMapping = Annotated[
    bool,
    typer.Option(
        "--no-port-mapping",
        help="Never ask the router for a port. Default: it is asked if nobody can dial this machine.",
    ),
]
Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="Show what the network and the averaging do.")]


def _port_of_dashboard(given: str | int) -> int:
    if str(given).isdecimal():
        return int(given)
    raise typer.BadParameter(f"expected a port, 0 for any free one, not {given!r}; an interface is named by --web-host")


@dataclass(frozen=True, kw_only=True)
class PeerOptions:
    """Options of all three roles. None and empty leave what the recipe says about this machine."""

    recipe: Annotated[
        str, typer.Argument(metavar="LINK|RECIPE", help="A link to the run (swarm://…), or its recipe file.")
    ]
    peer: Peers
    overrides: Overrides
    announce: Annotated[
        list[str],
        typer.Option(
            metavar="ADDRESS",
            help="Where others can dial this peer, if you know it; it is checked.",
            default_factory=list,
            show_default=False,
        ),
    ]
    limit: Annotated[
        list[str],
        typer.Option(
            "--limit",
            metavar="KEY=VALUE",
            help="A limit, for example --limit processor=50% or --limit hours=22:00-08:00. May be repeated.",
            default_factory=list,
            show_default=False,
        ),
    ]
    name: Annotated[str | None, typer.Option(help="This peer's name on the dashboard.")] = None
    host: Host = None
    port: Port = None
    client_mode: Annotated[
        bool, typer.Option("--client-mode", help="Never listen: for a machine that cannot be dialed from outside.")
    ] = False
    no_port_mapping: NoPortMapping = False
    relay: Annotated[
        bool | None,
        typer.Option(
            "--relay/--no-relay",
            help="Pass on the connections of peers that nobody can dial. Default: monitors and auxiliaries do.",
        ),
    ] = None
    upload: Annotated[str | None, typer.Option(metavar="RATE", help="Send no more than this, for example 2MB/s.")] = (
        None
    )
    download: Annotated[
        str | None, typer.Option(metavar="RATE", help="Receive no more than this, for example 10Mbit/s.")
    ] = None
    home: Annotated[
        Path | None,
        typer.Option(
            "--home", help="This peer's own directory. Default: the first free one below the recipe's output_dir."
        ),
    ] = None
    yes: Annotated[
        bool,
        typer.Option("--yes", help="Agree to what a link will do on this computer, for scripts that nobody watches."),
    ] = False
    plain: Annotated[
        bool, typer.Option("--plain", help="Print lines instead of a screen that is redrawn; a pipe always gets lines.")
    ] = False
    verbose: Verbose = False

    def settings(self, processes: int | None = None) -> list[Setting]:
        """Returns all that this person has set, the weakest first: the configuration file, `--set`, options.
        `processes`: of a site on this machine.

        Raises RecipeError for limits that make no sense, and for a file that cannot be used.
        """
        from swarmcli.recipe.config import load_config, options_of

        options = self._local(processes) | self._limits()
        return [*options_of(load_config()).items(), *self.overrides, *options.items()]

    def _limits(self) -> dict[str, Any]:
        from swarmcli.recipe.limit_store import commanded

        rates = {"upload": self.upload, "download": self.download}
        words = [*self.limit, *(f"{key}={rate}" for key, rate in rates.items() if rate is not None)]
        return {f"local.limits.{key}": value for key, value in commanded(words).items()}

    def _local(self, processes: int | None) -> dict[str, Any]:
        """Returns the options about this machine, by the keys of a recipe."""
        chosen: dict[str, Any] = {
            "name": self.name,
            "host": self.host,
            "port": self.port,
            "announce_addresses": list(self.announce) or None,
            "client_mode": self.client_mode or None,
            "port_mapping": False if self.no_port_mapping else None,
            "relay": self.relay,
            **({"site": {}} if processes == 1 else {"site.processes": processes}),  # one process is no site
        }
        return {f"local.{key}": value for key, value in chosen.items() if value is not None}

    def agreed(self, role: Role, processes: int | None = None, *further: str) -> RecipeToJoin:
        """Returns the recipe with all that this person and `further` have set, once the person has agreed to it, and
        the contacts of its link. `processes`: of a site on this machine."""
        from swarmcli.cli.linking import recipe_named

        return recipe_named(self.recipe, role, [*self.settings(processes), *further], yes=self.yes)

    def session(
        self, role: Role, recipe: Recipe, contacts: Sequence[str], **more: Any
    ) -> AbstractContextManager[Session]:
        """`more`: arguments that only some verbs have for a session."""
        from swarmcli.cli.session import session_of

        return session_of(role, recipe, contacts, self.home, plain=self.plain, verbose=self.verbose, **more)


@dataclass(frozen=True, kw_only=True)
class PagedOptions(PeerOptions):
    """Options of roles that have a page and a state to begin from."""

    web_name: Annotated[
        list[str],
        typer.Option(
            "--web-name",
            metavar="NAME",
            help="A host name under which browsers may ask for the dashboard, beside addresses. May be repeated.",
            default_factory=list,
            show_default=False,
        ),
    ]
    resume: Annotated[
        str | None,
        typer.Option(
            metavar="PATH",
            help="Begin from a checkpoint (a directory, or 'latest': the newest in --home or output_dir), with its "
            "weights, statistics and epoch, and the settings of the recipe.",
        ),
    ] = None
    from_run: Annotated[
        str | None,
        typer.Option(
            metavar="RUN_ID",
            help="The run of the checkpoint of --resume, if it is not the recipe's: the recipe's begins from it.",
        ),
    ] = None
    begin_anew: Annotated[
        bool,
        typer.Option(
            "--begin-anew",
            help="Begin the run from its first epoch if nobody who holds a later one can be reached.",
        ),
    ] = False
    web: Annotated[
        int | None,
        typer.Option(
            metavar="PORT", parser=_port_of_dashboard, help="Serve the dashboard at this port; 0: any free one."
        ),
    ] = None
    web_host: Annotated[
        str,
        typer.Option(help="The interface of the dashboard. On one that others can reach, it asks for a token."),
    ] = "127.0.0.1"
    wheel: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Hand out this file, which `make wheel` builds, for newcomers to install."),
    ] = None

    def __post_init__(self) -> None:
        if self.resume is None and self.from_run is not None:
            raise UsageError(
                f"--from-run {self.from_run}: name the checkpoint as well, --resume PATH or --resume latest"
            )

    @property
    def begins_from(self) -> Resume | None:
        from swarmcli.training.resumed import Resume

        return None if self.resume is None else Resume(self.resume, self.from_run)

    def session(
        self, role: Role, recipe: Recipe, contacts: Sequence[str], **more: Any
    ) -> AbstractContextManager[Session]:
        from swarmcli.cli.page import PageOptions

        if (begins := self.begins_from) is not None:  # before anybody meets this peer, or is told how to join it
            from swarmcli.training.resumed import resumed_place

            resumed_place(recipe, begins, self.home or recipe.output_dir / recipe.run_id)
        page = PageOptions(self.web, self.web_host, self.web_name, self.wheel)
        return super().session(role, recipe, contacts, page=page, begins_anew=self.begin_anew, **more)


@dataclass(frozen=True, kw_only=True)
class JoinOptions(PagedOptions):
    nproc: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="Train with N processes of this machine as one peer, for example one for each device.",
        ),
    ] = None


@dataclass(frozen=True, kw_only=True)
class MonitorOptions(PagedOptions):
    web: Annotated[
        int, typer.Option(metavar="PORT", parser=_port_of_dashboard, help="The port of the dashboard; 0: any free one.")
    ] = 8080
    leave_when_done: Annotated[
        bool, typer.Option("--leave-when-done", help="Leave when the run has finished, instead of at Ctrl-C.")
    ] = False


@spread
@interrupted_soon()
def join(options: JoinOptions) -> None:
    """Train with the others: compute gradients, average them, step together.

    \b
    swarm join "swarm://…" --name Ada
    swarm join "swarm://…" --upload 2MB/s --limit hours=22:00-08:00
    swarm join recipe.yaml --peer tcp://203.0.113.7:31330
    """
    from swarmcli.cli.site.process import SiteProcess

    if (process := SiteProcess.of_environment()) is not None:
        from swarmcli.cli.site.join import join_as_process

        join_as_process(process, options)
        return
    named = options.agreed("trainer", options.nproc)
    if (processes := named.recipe.local.site.processes) > 1:
        from swarmcli.cli.site.launcher import start_site

        words = named.in_place_of(options.recipe, sys.argv[1:])
        raise typer.Exit(start_site(named.recipe, options.home, processes, words))

    from swarmcli.peer.lifetime import run_trainer

    with options.session("trainer", named.recipe, [*options.peer, *named.contacts]) as session:
        run_trainer(session.peer, session.watch, session.stop, resume=options.begins_from)


@spread
@interrupted_soon()
def aux(options: PeerOptions) -> None:
    """Help trainers: add up what they have computed; it needs no data and no graphics card.

    \b
    swarm aux "swarm://…"
    swarm aux recipe.yaml --port 31331
    """
    from swarmcli.peer.lifetime import run_auxiliary

    named = options.agreed("auxiliary")
    with options.session("auxiliary", named.recipe, [*options.peer, *named.contacts]) as session:
        run_auxiliary(session.peer, session.watch, session.stop)


@spread
@interrupted_soon()
def monitor(options: MonitorOptions) -> None:
    """Follow the run without computing: serve the dashboard, keep checkpoints, hand out the state.

    \b
    swarm monitor my-run/recipe.yaml
    swarm monitor my-run/recipe.yaml --port 0 --web 8081
    swarm monitor "swarm://…" --leave-when-done
    """
    from swarmcli.peer.lifetime import run_monitor

    named = options.agreed("monitor")
    port = 0 if "port" in named.recipe.local.model_fields_set else 31330
    contacts = [*options.peer, *named.contacts]
    with options.session("monitor", named.recipe, contacts, port=port) as session:
        run_monitor(
            session.peer,
            session.watch,
            session.stop,
            resume=options.begins_from,
            leave_when_done=options.leave_when_done,
        )
