"""`swarm link`: the link of a run that a peer of this machine takes part in, or took part in."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from swarmcli.cli.console import err, out
from swarmcli.cli.which import Which, homes_of, link_of, running_homes
from swarmcli.errors import UsageError
from swarmcli.peer.home import LINK, read_link
from swarmcli.recipe import Link
from swarmcli.recipe.link import command_of, reach_in_words
from swarmcli.recipe.offered import with_data


def link(
    what: Which = None,
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
    found, running = links_of(what), running_homes()
    if copyable and len(found) > 1:
        named = "".join(f"\n  {home}  {each.run_id}" for home, each in found.items())
        raise UsageError(f"peers of {len(found)} runs are known here; say which with one of these directories:{named}")
    for home, each in found.items():
        if copyable:
            out.print(str(each), soft_wrap=True)
            continue
        needs = read_link(home)[1]
        out.print(with_data(command_of(each), needs), soft_wrap=True)
        state = "" if home in running else "not running now: others can join when it is started again"
        err.print("  ".join(filter(None, [str(home), reach_in_words(each), needs, state])))


def links_of(what: str | None) -> dict[Path, Link]:
    """Returns home → its link, for each run the home that comes first. Raises UsageError when there is none."""
    first: dict[tuple[str, str], tuple[Path, Link]] = {}
    for home in homes_of(what, LINK):
        if (each := link_of(home)) is not None:
            first.setdefault((each.run_id, each.fingerprint), (home, each))
    if not first:
        raise UsageError("the link that a peer has left here cannot be read; start it again, and it gives out another")
    return dict(first.values())
