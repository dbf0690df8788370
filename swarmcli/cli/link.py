"""`swarm link`: the link of a run that a peer of this machine takes part in, or took part in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from swarmcli.cli.console import err, out
from swarmcli.errors import AddressError, UsageError
from swarmcli.machine.places import data_directory, files_of_homes, places_of_runs
from swarmcli.machine.registry import LocalPeers
from swarmcli.peer.home import LINK, read_link, remembered
from swarmcli.peer.linked import LinkedRun
from swarmcli.recipe import Link, is_link, load_recipe, parse_link
from swarmcli.recipe.link import command_of, reach_in_words


def link(
    what: Annotated[
        str | None,
        typer.Argument(
            metavar="LINK|RECIPE|DIRECTORY|RUN",
            help="Which run: a recipe, a peer's directory or one above it, a link, or its name. Default: all of this "
            "machine.",
        ),
    ] = None,
    copyable: Annotated[
        bool, typer.Option("--copyable", help="Print the link alone, for a clipboard or a pipe.")
    ] = False,
) -> None:
    """Print the link by which others join a run of this machine.

    \b
    swarm link                    those of all runs
    swarm link my-run/recipe.yaml
    swarm link --copyable         for a clipboard or a pipe
    """
    found = links_of(what)
    if copyable:
        only(found)
    for home, each in found.items():
        if copyable:
            out.print(str(each), soft_wrap=True)
            continue
        out.print(command_of(each), soft_wrap=True)
        state = "" if is_running(home) else "not running now: others can join when it is started again"
        _, access = read_link(home)
        err.print("  ".join(filter(None, [str(home), reach_in_words(each), access, state])), soft_wrap=True)


def links_of(what: str | None) -> dict[Path, Link]:
    """Home → its link, one home for each run: of those that run now, or else of all, the one whose link is newest.

    Raises UsageError when there is none."""
    places = places_of(what)
    files = [file for below in places.directories for file in link_files(below)]
    newest: dict[tuple[str, str], tuple[Path, Link]] = {}
    for file in sorted(files, key=lambda file: (is_running(file.parent), file.stat().st_mtime)):
        try:
            each, _ = read_link(file.parent)
        except (OSError, ValueError, AddressError):
            continue
        if places.run_id in ("", each.run_id) and places.fingerprint in ("", each.fingerprint):
            newest[each.run_id, each.fingerprint] = file.parent, each
    if not newest:
        run = f" of the run {places.run_id}" if places.run_id else ""
        where = "on this machine" if run or what is None else f"in or below {what}"
        raise UsageError(
            f"no peer{run} {where} has given out a link; begin a run with `swarm join RECIPE` or "
            "`swarm monitor RECIPE`, or name the recipe, or the peer's directory"
        )
    return dict(newest.values())


def only(found: dict[Path, Link]) -> tuple[Path, Link]:
    """Raises UsageError where that is not one."""
    if len(found) > 1:
        named = "".join(f"\n  {home}  {each.run_id}" for home, each in found.items())
        raise UsageError(f"peers of {len(found)} runs are known here; say which with one of these directories:{named}")
    return next(iter(found.items()))


def contacts_of(home: Path, link: Link) -> list[str]:
    """Returns the addresses to ask about the run of a home: of its own peer, and of those that it knew when it left,
    since it may run no more."""
    return list(dict.fromkeys([*link.addresses, *remembered(home)]))


def is_running(home: Path) -> bool:
    return (home / "peer.json").exists()


@dataclass(frozen=True, slots=True)
class Places:
    """Directories below which homes may lie, and the run whose links are wanted there; "": any."""

    directories: Sequence[Path]
    run_id: str = ""
    fingerprint: str = ""


def places_of(what: str | None) -> Places:
    """Where to look. Peers that run now are looked at wherever their homes are, unless a directory is named."""
    living = [Path(peer.home) for peer in LocalPeers().living()]
    if what is None:
        return Places([data_directory(), *living])
    if is_link(what):
        link = parse_link(what)
        return Places([LinkedRun(link).path, *living], link.run_id, link.fingerprint)
    if Path(what).is_file():
        recipe = load_recipe(what)
        return Places([recipe.output_dir / recipe.run_id, *living], recipe.run_id)
    return Places([Path(what)]) if Path(what).exists() else Places(places_of_runs(), what)


def link_files(directory: Path) -> list[Path]:
    return files_of_homes(directory, LINK)
