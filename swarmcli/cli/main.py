"""The command `swarm`: its verbs, its exit codes, and errors as a person should read them."""

from __future__ import annotations

import io
import signal
import sys
import traceback
from collections.abc import Callable
from importlib import import_module
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command

from swarmcli import startup
from swarmcli.cli.ending import ExitCode, exit_code, plight, words
from swarmcli.cli.processes import end_with_parent_of_environment
from swarmcli.cli.verbs import OLD_VERBS, VERBS, help_text
from swarmcli.errors import SwarmError, UsageError
from swarmcli.words import printable

HELP = ["-h", "--help"]


def load(name: str) -> Any:
    """Returns the click command of a verb, with --quiet and a variable for each option."""
    module, _, function = VERBS[name].where.partition(":")
    found = getattr(import_module(f"swarmcli.cli.{module}"), function)
    if isinstance(found, typer.Typer):
        return _finished(get_command(found), f"SWARM_{module}")
    return _finished(get_command(_one(found)), f"SWARM_{function}")


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
    """Has the option that each verb takes, so that typer makes it."""


def _one(function: Callable[..., Any]) -> typer.Typer:
    app = typer.Typer(rich_markup_mode="rich", add_completion=False)
    app.command()(function)
    return app


def _finished(command: Any, prefix: str) -> Any:
    """Gives each verb --quiet, and its help and options the form that people should see."""
    # typer keeps the line ends of a docstring, which are ragged in a narrower terminal; lines after \b stay lines.
    paragraphs = (command.help or "").split("\n\n")
    command.help = "\n\n".join(each if each.startswith("\b") else each.replace("\n", " ") for each in paragraphs)
    verbs = getattr(command, "commands", {})
    for name, verb in verbs.items():
        _finished(verb, f"{prefix}_{name}")
    if (command.params or not verbs) and not any(param.name == "quiet" for param in command.params):
        command.params += get_command(_one(_quiet)).params
    _tidied(command.get_params(typer.Context(command, help_option_names=HELP)), prefix)
    return command


def _tidied(params: list[Any], prefix: str) -> list[Any]:
    """Gives each option the variable that stands for it, named after the option, not after our argument
    (SWARM_JOIN_WEB_HOST); help says so once. Shows a flag as it is typed: typer writes `<bool>` after it, as if a value
    had to follow."""
    for param in params:
        flag = next((name for name in param.opts if name.startswith("--")), None)
        if flag is not None and not param.is_eager:
            param.envvar = f"{prefix}_{flag.removeprefix('--')}".replace("-", "_").upper()
            param.show_envvar = False
        if getattr(param, "is_flag", False):
            param.metavar = ""
    return params


class _Verbs(TyperGroup):
    """Imports a verb when it is called ("Lazily loading subcommands" in click's documentation). Help needs only the
    table."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        for name, verb in VERBS.items():
            self.add_command(TyperCommand(name, help=verb.help))

    def format_help(self, ctx: Any, formatter: Any) -> None:
        formatter.write(help_text())

    def get_params(self, ctx: Any) -> list[Any]:
        return _tidied(super().get_params(ctx), "SWARM")

    def parse_args(self, ctx: Any, args: Any) -> Any:
        return super().parse_args(ctx, args or HELP[1:])

    def resolve_command(self, ctx: Any, args: Any) -> Any:
        if args[0] in OLD_VERBS:
            raise UsageError(f"there is no `swarm {args[0]}` any more; write: {OLD_VERBS[args[0]]}")
        name, _, rest = super().resolve_command(ctx, args)
        return name, load(name) if name else None, rest

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:  # typer would end without a word
            typer.echo("swarm: interrupted", err=True)
            raise typer.Exit(ExitCode.INTERRUPTED) from None


app = typer.Typer(
    name="swarm",
    cls=_Verbs,
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
    """Writes a question mark for each character that a terminal or file lacks: Windows' old code pages have no bars and
    few letters, and a name must not end a command."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


def _say(text: str) -> None:
    """Prints an error, which may repeat a stranger's words."""
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
        # Libraries have work to do at the end of a process: another Ctrl-C then ends it without a traceback.
        signal.signal(signal.SIGINT, signal.SIG_DFL)


if __name__ == "__main__":
    main()
