"""The command `swarm`: its verbs, its exit codes, and errors as a person should read them."""

from __future__ import annotations

import os
import sys
import traceback
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from swarmcli import __version__
from swarmcli.cli.closed import init, invite, members, revoke
from swarmcli.cli.demo import demo
from swarmcli.cli.ending import ExitCode, exit_code, words
from swarmcli.cli.link import link
from swarmcli.cli.log import log
from swarmcli.cli.netcheck import netcheck
from swarmcli.cli.peers import aux, join, monitor
from swarmcli.cli.processes import end_with_parent_of_environment
from swarmcli.cli.sign import sign
from swarmcli.cli.validate import validate
from swarmcli.errors import SwarmError
from swarmcli.journal import printable


class _PlainFlags:
    """Help that shows a flag as it is typed: typer writes `<bool>` behind it, as if a value had to follow."""

    def get_params(self, ctx: Any) -> list[Any]:
        params: list[Any] = super().get_params(ctx)  # type: ignore[misc]
        for param in params:
            if getattr(param, "is_flag", False):
                param.metavar = ""
        return params


class _Verb(_PlainFlags, TyperCommand):
    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:  # typer would end without a word
            typer.echo("swarm: interrupted", err=True)
            raise typer.Exit(ExitCode.INTERRUPTED) from None


class _Verbs(_PlainFlags, TyperGroup):
    pass


app = typer.Typer(
    name="swarm",
    cls=_Verbs,
    help="Train one neural network together on computers that strangers lend.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)
for verb in (init, join, aux, monitor, link, demo, log, validate, netcheck, invite, revoke, members, sign):
    app.command(cls=_Verb)(verb)


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


def let_threads_sleep() -> None:
    """Threads of a team that wait for each other give their cores away soon. To be called before torch is imported.

    At the end of every operation OpenMP's threads turn in circles for 4 ms (300,000 turns in GNU's library) or 200 ms
    (LLVM's and Intel's) before they sleep, on cores that another peer, the loop's thread or other programs of the
    volunteer want: on a busy machine a step took five times as long as with 1,000 turns, which are what GNU's library
    takes by itself where it knows of more threads than cores. benchmarks/NOTES.md has the figures.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "1000")
        os.environ.setdefault("KMP_BLOCKTIME", "1")  # ms


def _say(text: str) -> None:
    """What an error tells may be a stranger's words."""
    for line in text.splitlines():
        typer.echo(printable(line, 4000), err=True)


def main() -> None:
    """Runs a verb; errors of this project end in a line on stderr and an exit code, others in a traceback."""
    end_with_parent_of_environment()
    let_threads_sleep()
    try:
        app()
    except SwarmError as error:
        _say(f"swarm: {words(error)}")
        sys.exit(exit_code(error))
    except KeyboardInterrupt:
        sys.exit(ExitCode.INTERRUPTED)
    except Exception:
        _say(traceback.format_exc())
        typer.echo("swarm: this is a fault in swarm itself; please report it with the lines above", err=True)
        sys.exit(ExitCode.FAILURE)


if __name__ == "__main__":
    main()
