"""The command `swarm`: its verbs, its exit codes, and errors as a person should read them."""

from __future__ import annotations

import io
import signal
import sys
from collections.abc import Callable
from functools import wraps
from importlib import import_module
from inspect import Parameter, signature
from typing import Annotated, Any, NamedTuple

import typer
from typer.core import TyperCommand, TyperGroup

from swarmcli import __version__, startup
from swarmcli.errors import SwarmError


class Verb(NamedTuple):
    """What `swarm --help` says of a verb, and where it is: the rest of it is imported when it is called."""

    where: str  # module:function in swarmcli.cli, or module:app for a verb with verbs of its own (a typer.Typer)
    panel: str
    help: str  # the first paragraph of its own help

    @property
    def name(self) -> str:
        module, _, function = self.where.partition(":")
        return module if function == "app" else function


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
        "contributions:certificate": "Write a certificate of what you gave, signed by the monitors of the run.",
    },
    "Look into runs and models": {
        "log:log": "Show what a peer went through: a summary, or the lists that are asked for.",
        "checkpoints:app": "Show the checkpoints on this computer, check that they are whole, and remove what need "
        "not stay.",
        "generate:generate": "Let a checkpoint's model write on: see what a run has learned.",
        "export:export": "Write what a peer saw of its run as tables, for spreadsheets and notebooks.",
        "validate:validate": "Check a recipe as `swarm join` would, without any network; or the recipe of a link, "
        "without reading data.",
        "netcheck:netcheck": "Find out whether others can dial this computer, what its router does, and how fast its "
        "link is.",
        "closed:members": "Show who takes part in a run and what each has given; to the owner of a closed run also "
        "by which invitation.",
    },
    "Own a closed run": {
        "closed:invite": "Make a link by which somebody joins a closed run.",
        "closed:revoke": "Take back invitations of a closed run: its members close all connections with those peers.",
        "closed:sign": "Sign a checkpoint with the run key: peers follow whoever comes with it, if it is further "
        "than they are.",
    },
}
VERBS = tuple(Verb(where, panel, text) for panel, verbs in _PANELS.items() for where, text in verbs.items())


class _TidyOptions:
    """Each option has a variable that stands for it, named by the option and not by our argument. Help shows a flag as
    it is typed (typer writes `<bool>` behind it, as if a value had to follow), and says once what the variables are."""

    def get_params(self, ctx: Any) -> list[Any]:
        params: list[Any] = super().get_params(ctx)  # type: ignore[misc]
        for param in params:
            if getattr(param, "is_flag", False):
                param.metavar = ""
            if param.param_type_name == "option":
                param.show_envvar = False
                param.envvar = _variable(ctx.auto_envvar_prefix, param)
        return params


def _variable(prefix: str | None, option: Any) -> str | None:
    """For example SWARM_JOIN_WEB_HOST."""
    flag = next((each for each in option.opts if each.startswith("--")), None)
    if prefix is None or flag is None or option.is_eager:
        return None
    return f"{prefix}_{flag.removeprefix('--')}".replace("-", "_").upper()


class _Command(_TidyOptions, TyperCommand):
    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:  # typer would end without a word
            from swarmcli.cli.ending import ExitCode

            typer.echo("swarm: interrupted", err=True)
            raise typer.Exit(ExitCode.INTERRUPTED) from None


class _Group(_TidyOptions, TyperGroup):
    """A verb with verbs of its own."""


class _Unloaded(TyperCommand):
    """A verb of which only the table is known: so `swarm --help` imports none of them, and a verb only itself."""

    def __init__(self, verb: Verb) -> None:
        super().__init__(verb.name, help=verb.help, rich_help_panel=verb.panel, rich_markup_mode="rich")
        self._where = verb.where

    def make_context(self, info_name: Any, args: Any, parent: Any = None, **extra: Any) -> Any:
        """Of the verb itself: all that is done with a verb but naming it begins here."""
        return self.load().make_context(info_name, args, parent, **extra)

    def load(self) -> Any:
        module, _, name = self._where.partition(":")
        found = getattr(import_module(f"swarmcli.cli.{module}"), name)
        app = found if isinstance(found, typer.Typer) else typer.Typer(rich_markup_mode="rich", add_completion=False)
        if app is not found:
            app.command(name=self.name)(found)
        return typer.main.get_command(_quietable(app))


QUIET = typer.Option("--quiet", "-q", help="Say nothing but what was asked for, warnings and errors.")


def _quietable(app: typer.Typer) -> typer.Typer:
    """Each verb in it takes --quiet too."""
    app.info.cls = _Group
    begin = app.registered_callback
    if begin is not None and begin.callback is not None and "quiet" not in signature(begin.callback).parameters:
        begin.callback = _with_quiet(begin.callback)
    for command in app.registered_commands:
        command.cls = _Command
        if command.callback is not None and "quiet" not in signature(command.callback).parameters:
            command.callback = _with_quiet(command.callback)
    for group in app.registered_groups:
        assert group.typer_instance is not None
        _quietable(group.typer_instance)
    return app


def _with_quiet(function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def verb(quiet: bool = False, **options: Any) -> Any:
        if quiet:
            from swarmcli.cli.console import err

            err.quiet = True
        return function(**options)

    own = signature(function, eval_str=True)
    added = Parameter("quiet", Parameter.KEYWORD_ONLY, default=False, annotation=Annotated[bool, QUIET])
    params = [*own.parameters.values(), added]
    verb.__signature__ = own.replace(parameters=params)  # type: ignore[attr-defined]
    verb.__annotations__ = {param.name: param.annotation for param in params}
    return verb


class _Verbs(_TidyOptions, TyperGroup):
    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        for verb in VERBS:
            self.add_command(_Unloaded(verb))


app = typer.Typer(
    name="swarm",
    cls=_Verbs,
    help="Train one neural network together on computers that strangers lend.",
    epilog="Every option is a variable of the environment too: SWARM_JOIN_NAME stands for --name of swarm join.",
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"], "auto_envvar_prefix": "SWARM"},
)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"swarm {__version__}")
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
    """What an error tells may be a stranger's words."""
    from swarmcli.words import printable

    for line in text.splitlines():
        typer.echo(printable(line, 4000), err=True)


def main() -> None:
    """Runs a verb; errors of this project end in a line on stderr and an exit code, others in a traceback."""
    from swarmcli.cli.ending import ExitCode, exit_code, is_full, words
    from swarmcli.cli.processes import end_with_parent_of_environment

    startup.begin()
    end_with_parent_of_environment()
    show_what_can_be_shown()
    try:
        app()
    except SwarmError as error:
        _say(f"swarm: {words(error)}")
        sys.exit(exit_code(error))
    except KeyboardInterrupt:
        sys.exit(ExitCode.INTERRUPTED)
    except Exception as error:
        if is_full(error):
            _say("swarm: the disk is full; make room where this computer keeps its files, then start the same again")
            sys.exit(ExitCode.FAILURE)
        import traceback

        _say(traceback.format_exc())
        typer.echo("swarm: this is a fault in swarm itself; please report it with the lines above", err=True)
        sys.exit(ExitCode.FAILURE)
    finally:
        # Libraries have work to do at the end of a process: one more Ctrl-C ends it there, without a traceback.
        signal.signal(signal.SIGINT, signal.SIG_DFL)


if __name__ == "__main__":
    main()
