"""`swarm limits`: how much of this computer your peers may take, and when; shown and changed, also while they run."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Annotated, Any

import typer

from swarmcli.cli.local import AskedPeers, WhichPeers, described, spread
from swarmcli.errors import ControlError
from swarmcli.machine import client
from swarmcli.machine.registry import LocalPeer, LocalPeers
from swarmcli.recipe.limit_store import DEFAULT, LimitStore, commanded, keep_limits, limits_file, read_changes
from swarmcli.recipe.limits import FORMER, KEYS, Limits
from swarmcli.words import printable

app = typer.Typer(
    add_completion=False,
    rich_markup_mode="rich",
    help="Show and set how much of this computer your peers may take, and when.",
    epilog="swarm limits show --all tells what each limit does.",
    no_args_is_help=True,
)


@dataclass(frozen=True, kw_only=True)
class ShowOptions(AskedPeers):
    every: Annotated[bool, typer.Option("--all", help="Also those that are not set, and what each does.")] = False


@dataclass(frozen=True, kw_only=True)
class ChangeOptions(WhichPeers):
    now_only: Annotated[
        bool, typer.Option("--now-only", help="Only for the peers that run now; later ones begin as before.")
    ] = False


@dataclass(frozen=True, kw_only=True)
class SetOptions(ChangeOptions):
    values: Annotated[list[str], typer.Argument(metavar="KEY=VALUE...", help="For example upload=2MB/s.")]


@dataclass(frozen=True, kw_only=True)
class ResetOptions(ChangeOptions):
    keys: Annotated[list[str] | None, typer.Argument(metavar="[KEY...]", help="All, if none is named.")] = None


@app.command()
@spread
def show(options: ShowOptions) -> None:
    """Show the limits of your running peers, or of those that you will start.

    \b
    swarm limits show         those that are set, and where
    swarm limits show --all   every limit, and what it means
    """
    found = _asked(LocalPeers(), options)
    if options.as_json:
        typer.echo(json.dumps(found))
        return
    for each in found:
        typer.echo(f"{each['who']}:")
        if "error" in each:
            typer.echo(f"  {each['error']}")
        else:
            typer.echo("\n".join(f"  {line}" for line in lines_of(each["limits"], every=options.every)))


@app.command("set")
@spread
def set_(options: SetOptions) -> None:
    """Set limits: for your running peers at once, and for those that you will start.

    \b
    swarm limits set upload=2MB/s processor=50%
    swarm limits set hours="22:00-08:00, sat-sun"
    swarm limits set on_battery=no temperature=80 only_when_idle=10min
    swarm limits set upload=none --now-only
    """
    change(commanded(_whole(options.values), "swarm limits set"), options)


def _whole(words: list[str]) -> list[str]:
    """Returns the words with `MB/s` after `upload=2` as a part of it: values are shown with that space."""
    found: list[str] = []
    for word in words:
        if found and "=" not in word and word not in KEYS:
            found[-1] += f" {word}"
        else:
            found.append(word)
    return found


@app.command()
@spread
def reset(options: ResetOptions) -> None:
    """Forget limits that you have set: what the command line or the recipe says holds again.

    \b
    swarm limits reset upload hours
    swarm limits reset
    """
    changes = dict.fromkeys(options.keys or (*KEYS, *FORMER), DEFAULT)
    read_changes(changes, "swarm limits reset")
    change(changes, options)


def change(changes: dict[str, str], options: ChangeOptions) -> None:
    """Changes limits in the user's file, unless `now_only`, and at the running peers that are meant. Ends the command
    with 1 if one of them did not do it."""
    registry, now_only = LocalPeers(), options.now_only
    peers = options.peers_of(registry) if options.are_named or now_only or registry.peers() else []
    told, failed = [_in_words(changes)], False
    if not now_only:
        keep_limits(read_changes(changes, "swarm limits"))
        told.append(f"written to {limits_file()}")
    for each in peers:
        try:
            answer = client.patch(each, "limits", {"changes": changes, "keep": not now_only}, registry=registry)
            told.append(f"holds at once for {described(each)}")
            if seat := (answer or {}).get("seat"):
                told.append(printable(f"{described(each)}: {seat}", 600))
        except ControlError as error:
            failed = True
            typer.echo(f"swarm: {described(each)}: {error}", err=True)
    for line in [] if options.quiet else told:
        typer.echo(line, err=True)
    if failed:
        raise typer.Exit(1)


def _in_words(changes: dict[str, str]) -> str:
    forgotten = [key for key, value in changes.items() if value == DEFAULT]
    if set(forgotten) >= set(KEYS):
        return "all limits that you had set are forgotten"
    return ", ".join(f"{key}: {value}" for key, value in changes.items() if value != DEFAULT) or (
        f"forgotten: {', '.join(forgotten)}"
    )


def _asked(registry: LocalPeers, options: WhichPeers) -> list[dict[str, Any]]:
    """Returns the limits of each running peer that is meant or, if none runs, of the next one."""
    if not registry.peers() and not options.are_named:
        store = LimitStore()
        for note in store.notes:
            typer.echo(note, err=True)
        return [{"who": "peers that you start now", "limits": store.shown()}]
    return [{"who": described(peer), **_limits_of(registry, peer)} for peer in options.peers_of(registry)]


def _limits_of(registry: LocalPeers, peer: LocalPeer) -> dict[str, Any]:
    try:
        found = client.get(peer, "limits", registry=registry)
        return {"limits": dict(found["limits"])}
    except (ControlError, KeyError, TypeError, ValueError) as error:
        return {"error": str(error) if isinstance(error, ControlError) else "its answer cannot be understood"}


def lines_of(limits: dict[str, Any], *, every: bool) -> list[str]:
    """Returns a line for each limit that somebody has set; `every`: for each limit, and what it means."""
    lines = []
    for key, field in Limits.model_fields.items():
        one = limits.get(key) or {}
        if one.get("from") or every:
            origin = f"  ({one['from']})" if one.get("from") else ""
            lines.append(printable(f"{key:<15} {one.get('text', 'none')}{origin}", 400))
            lines += [f"    {field.description}"] if every else []
    return lines or [
        "no limits; for example `swarm limits set upload=2MB/s` sets one, `swarm limits show --all` names all"
    ]
