"""The command `swarm`: its verbs, its exit codes, and errors as a person should read them."""

from __future__ import annotations

import io
import signal
import sys
import traceback
from collections.abc import Callable
from importlib import import_module
from typing import Annotated, Any, NamedTuple

import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command

from swarmcli import startup
from swarmcli.cli.ending import ExitCode, exit_code, plight, words
from swarmcli.cli.processes import end_with_parent_of_environment
from swarmcli.errors import SwarmError, UsageError
from swarmcli.words import printable

HELP = ["-h", "--help"]


class Verb(NamedTuple):
    """A verb as `swarm --help` shows it, and its module, which is imported when the verb is called."""

    where: str  # module:function in swarmcli.cli, or module:app for a verb with verbs of its own (a typer.Typer)
    panel: str
    help: str  # the first paragraph of its own help

    def load(self) -> Any:
        """The click command, with --quiet and a variable for each option."""
        module, _, name = self.where.partition(":")
        found = getattr(import_module(f"swarmcli.cli.{module}"), name)
        if isinstance(found, typer.Typer):
            return _finished(get_command(found), f"SWARM_{module}")
        return _finished(get_command(_one(found)), f"SWARM_{name}")


_PANELS = {
    "Begin and join runs": {
        "init:init": "Begin a run of your own: write a recipe with comments, and for a closed run its key.",
        "peers:join": "Train with the others: compute gradients, average them, step together.",
        "peers:aux": "Help without computing gradients: add up the parts of others, on a processor alone.",
        "peers:monitor": "Follow the run without computing: serve the dashboard, keep checkpoints, hand out the state.",
        "link:link": "Print the link by which others join a run of this machine.",
        "demo:demo": "Train with a monitor, three trainers and an auxiliary on this machine; one of them is killed "
        "on the way.",
    },
    "Your peers on this computer": {
        "status:status": "Show what your peers on this computer do, and how their runs go.",
        "control:pause": "Let your peers on this computer pause: they hand in what is computed, and leave the "
        "processor alone.",
        "control:resume": "Let your peers on this computer go on after a pause.",
        "control:stop": "Let your peers on this computer leave, once they have handed in what they have computed.",
        "service:app": "Have this computer help by itself: from when you log in, also after you log out, and again "
        "after a failure.",
        "limits:app": "Show and set how much of this computer your peers may take, and when.",
        "doctor.verb:doctor": "Look at all that a peer needs, and say for each thing that is wrong what helps.",
        "contributions:certificate": "Write a certificate of what you gave, signed by one who keeps count of the run.",
    },
    "Look into runs and models": {
        "log:log": "Show what a peer went through: a summary, or the lists that are asked for.",
        "checkpoints:app": "Show the checkpoints on this computer, check that they are whole, and remove what need "
        "not stay.",
        "generate:generate": "Let a checkpoint's model write on: see what a run has learned.",
        "export:export": "Write what a peer saw of its run as tables, for spreadsheets and notebooks.",
        "validate:validate": "Check a recipe as `swarm join` would, without any network; or the recipe of a link, "
        "without reading data.",
        "schema:schema": "Print the JSON schema of recipes, by which editors complete and check their keys.",
        "closed:members": "Show what each peer has given to a run; to the owner of a closed run also who takes "
        "part, by which invitation.",
    },
    "Own a closed run": {
        "closed:invite": "Make a link by which somebody joins a closed run.",
        "closed:revoke": "Take back invitations of a closed run: its members close all connections with those peers.",
        "closed:sign": "Sign a checkpoint with the run key: peers follow whoever comes with it, if it is further "
        "than they are.",
    },
}
VERBS = {
    where.removesuffix(":app").rpartition(":")[2]: Verb(where, panel, text)
    for panel, verbs in _PANELS.items()
    for where, text in verbs.items()
}


OLD_VERBS = {"netcheck": "swarm doctor [LINK|RECIPE] --network"}  # and what is written in their place


def _hush(wanted: bool) -> None:
    if wanted:
        from swarmcli.cli.console import err

        err.quiet = True


_Quiet = Annotated[
    bool,
    typer.Option(
        "--quiet",
        "-q",
        callback=_hush,
        expose_value=False,
        help="Say nothing but what was asked for, warnings and errors.",
    ),
]


def _quiet(quiet: _Quiet = False) -> None:
    """Has the option that each verb takes, as typer makes it."""


def _one(function: Callable[..., Any]) -> typer.Typer:
    app = typer.Typer(rich_markup_mode="rich", add_completion=False)
    app.command()(function)
    return app


def _finished(command: Any, prefix: str) -> Any:
    """Each verb takes --quiet, and has its options as people should see them."""
    verbs = getattr(command, "commands", {})
    for name, verb in verbs.items():
        _finished(verb, f"{prefix}_{name}")
    if (command.params or not verbs) and not any(param.name == "quiet" for param in command.params):
        command.params += get_command(_one(_quiet)).params
    _tidied(command.get_params(typer.Context(command, help_option_names=HELP)), prefix)
    return command


def _tidied(params: list[Any], prefix: str) -> list[Any]:
    """Each option has a variable that stands for it, named by the option, not by our argument (SWARM_JOIN_WEB_HOST);
    help says so once. It shows a flag as it is typed: typer writes `<bool>` behind it, as if a value had to follow."""
    for param in params:
        flag = next((name for name in param.opts if name.startswith("--")), None)
        if flag is not None and not param.is_eager:
            param.envvar = f"{prefix}_{flag.removeprefix('--')}".replace("-", "_").upper()
            param.show_envvar = False
        if getattr(param, "is_flag", False):
            param.metavar = ""
    return params


class _Verbs(TyperGroup):
    """Imports a verb when it is called ("Lazily loading subcommands" in click's documentation). Help needs the table
    alone."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        for name, verb in VERBS.items():
            self.add_command(TyperCommand(name, help=verb.help, rich_help_panel=verb.panel, rich_markup_mode="rich"))

    def get_params(self, ctx: Any) -> list[Any]:
        return _tidied(super().get_params(ctx), "SWARM")

    def resolve_command(self, ctx: Any, args: Any) -> Any:
        if args[0] in OLD_VERBS:
            raise UsageError(f"there is no `swarm {args[0]}` any more; write: {OLD_VERBS[args[0]]}")
        name, _, rest = super().resolve_command(ctx, args)
        return name, VERBS[name].load() if name else None, rest

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:  # typer would end without a word
            typer.echo("swarm: interrupted", err=True)
            raise typer.Exit(ExitCode.INTERRUPTED) from None


app = typer.Typer(
    name="swarm",
    cls=_Verbs,
    help="Train one neural network together on computers that strangers lend.",
    epilog="Every option is a variable of the environment too: SWARM_JOIN_NAME stands for --name of swarm join.",
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": HELP},
)


def _show_version(wanted: bool) -> None:
    if wanted:
        from swarmcli.version import build

        typer.echo(f"swarm {build()}")
        raise typer.Exit()


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Train one neural network together on computers that strangers lend."""


def show_what_can_be_shown() -> None:
    """A terminal or file that lacks a character gets a question mark in its place: Windows' old code pages have no bars
    and few letters, and a name must not end a command."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


def _say(text: str) -> None:
    """An error may repeat a stranger's words."""
    for line in text.splitlines():
        typer.echo(printable(line, 4000), err=True)


def main() -> None:
    """Runs a verb; errors of this project end in a line on stderr and an exit code, others in a traceback."""
    startup.begin()
    end_with_parent_of_environment()
    show_what_can_be_shown()
    try:
        startup.find_places()
        app()
    except SwarmError as error:
        _say(f"swarm: {words(error)}")
        sys.exit(exit_code(error))
    except KeyboardInterrupt:
        sys.exit(ExitCode.INTERRUPTED)
    except Exception as error:
        if said := plight(error):
            _say(f"swarm: {said}")
            sys.exit(ExitCode.FAILURE)
        _say(traceback.format_exc())
        typer.echo("swarm: this is a fault in swarm itself; please report it with the lines above", err=True)
        sys.exit(ExitCode.FAILURE)
    finally:
        # Libraries have work to do at the end of a process: one more Ctrl-C ends it there, without a traceback.
        signal.signal(signal.SIGINT, signal.SIG_DFL)


if __name__ == "__main__":
    main()
