"""Finds which run a person means, and which of this user's peers in it: by a link, a recipe, a directory, the run's
name, or nothing. Every verb that looks into runs of this computer calls this."""

from __future__ import annotations

import re
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from swarmcli.errors import AddressError, JournalError, UsageError
from swarmcli.journal import JOURNAL_NAME, JournalReader
from swarmcli.machine.places import files_of_homes, places_of_runs
from swarmcli.machine.registry import LocalPeers
from swarmcli.peer.home import LINK, addresses_in, read_link, remembered

if TYPE_CHECKING:
    from swarmcli.recipe import Link  # imported only if a link or a recipe is named, so most verbs answer at once

MOST_NAMED = 8  # homes that an error names if several are meant
IN_HOMES = (JOURNAL_NAME, "identity.key")  # one of them lies in each home, unless its user has moved it
OF_ROLES = re.compile(r"(trainer|auxiliary|monitor)-\d+")  # homes that peers of one run make beside each other

Which = Annotated[
    str | None,
    typer.Argument(
        metavar="LINK|RECIPE|DIRECTORY|RUN",
        help="Which run, or which peer of it: a link, a recipe, a peer's directory or one above it, or the run's name. "
        "Default: the only run below this directory, else your only one; of several, the one that runs.",
    ),
]


def places_of(what: str | None) -> tuple[list[Path], str, str]:
    """Returns directories below which the homes that are meant may be; the run that they are of; and its fingerprint if
    a link names it ("": any). Raises UsageError for what is not there, AddressError and RecipeError."""
    homes = running_homes()
    known = [*(home.parent if OF_ROLES.fullmatch(home.name) else home for home in homes), *places_of_runs()]
    if what is None:
        return [Path.cwd(), *known], "", ""
    if "://" in what:
        from swarmcli.peer.linked import LinkedRun
        from swarmcli.recipe import parse_link

        link = parse_link(what)
        return [LinkedRun(link).path, *known], link.run_id, link.fingerprint
    path = Path(what)
    if path.is_file():
        from swarmcli.recipe import load_recipe

        recipe = load_recipe(what)
        return [recipe.output_dir / recipe.run_id, *known], recipe.run_id, ""
    if path.exists():
        return [path], "", ""
    if len(path.parts) > 1 or path.suffix in (".yaml", ".yml"):
        raise UsageError(f"{what} does not exist; name a recipe, a peer's directory or one above it, or a run")
    return known, what, ""


def homes_of(what: str | None, *holding: str) -> list[Path]:
    """Returns the homes of this user's peers that are meant and hold one of these files: those of running peers first,
    then monitors', which see most, then the one written last. Raises UsageError if there is none."""
    places, run_id, fingerprint = places_of(what)
    running = running_homes()
    written: dict[Path, float] = {}
    left = (file for place in places for name in holding for file in files_of_homes(place, name))
    for file in filter(_is_a_peers, left):
        home = file.parent.resolve()
        written[home] = max(written.get(home, 0.0), file.stat().st_mtime)
    found = [home for home in written if not run_id or _is_of(home, run_id, fingerprint)]
    if not found:
        of_run = f" of the run {run_id}" if run_id else ""
        where = f"in or below {Path(what).absolute()}" if what is not None and not run_id else "on this computer"
        lacking = " or ".join(
            {LINK: "has given out a link", JOURNAL_NAME: "has left a journal"}[name] for name in holding
        )
        raise UsageError(
            f"no peer{of_run} {where} {lacking}; name a recipe or the peer's directory, or begin a run "
            "with `swarm join RECIPE` or `swarm monitor RECIPE`"
        )
    return sorted(found, key=lambda home: (home not in running, not home.name.startswith("monitor"), -written[home]))


def _is_a_peers(file: Path) -> bool:
    """Whether a file of this name lies in a home: other programs call files `link`, too."""
    home = file.parent
    return file.name != LINK or link_of(home) is not None or any((home / each).exists() for each in IN_HOMES)


def home_of(what: str | None, *holding: str) -> Path:
    """Returns the one home that is meant. If a person names nothing, homes below the working directory come before
    others; then those of peers that run before the others. Of several homes of one run, the first of `homes_of`. Raises
    UsageError if there is none, or if they are of several runs."""
    found = homes_of(what, *holding)
    if what is None:
        found = [home for home in found if home.is_relative_to(Path.cwd().resolve())] or found
    running = running_homes()
    found = [home for home in found if home in running] or found
    runs = {run: home for home in reversed(found) for run in runs_of(home)[:1]}
    if what in runs:
        return runs[what]  # the directory of that name has several runs, and one of them has the name too
    if len(runs) > 1 and (what is None or Path(what).is_dir()):
        named = "".join(f"\n  {home}  {run}" for run, home in list(runs.items())[:MOST_NAMED])
        more = f"\n  and {len(runs) - MOST_NAMED} more" if len(runs) > MOST_NAMED else ""
        raise UsageError(
            f"peers of {len(runs)} runs are known here; name a run or one of these directories:{named}{more}"
        )
    return found[0]


def only(homes: list[Path], option: str) -> Path:
    """Returns the only one or, of several, the only one whose peer runs. Raises UsageError that names the option which
    says which."""
    running = running_homes()
    homes = [home for home in homes if home in running] or homes
    if len(homes) > 1:
        named = "".join(f"\n  {home}" for home in homes[:MOST_NAMED])
        raise UsageError(f"{len(homes)} peers are known on this computer; say which with {option}:{named}")
    return homes[0]


def journal_of(which: str | None) -> Path:
    """Returns the journal that is meant: a file, or that of a home. Raises UsageError."""
    if which is not None and Path(which).is_file() and not Path(which).suffix.startswith(".y"):
        return Path(which)
    return home_of(which, JOURNAL_NAME) / JOURNAL_NAME


def _is_of(home: Path, run_id: str, fingerprint: str) -> bool:
    own = link_of(home) if fingerprint else None
    return (own is None or own.fingerprint == fingerprint) and run_id in runs_of(home)


def runs_of(home: Path) -> list[str]:
    """Returns the runs in which the peer of a home took part, the latest first."""
    with suppress(JournalError), JournalReader(home / JOURNAL_NAME) as reader:
        if found := [run.run_id for run in reversed(reader.runs())]:
            return list(dict.fromkeys(found))
    link = link_of(home)
    return [link.run_id] if link is not None else []


def link_of(home: Path) -> Link | None:
    """Returns the last link that the peer of a home gave out; None: none that can be read."""
    with suppress(OSError, ValueError, AddressError):
        return read_link(home)[0]
    return None


def contacts_of(home: Path) -> list[str]:
    """Returns the addresses at which to ask about the run of a home: its own peer's while that runs, and those of peers
    that it knew when it left."""
    link, own = link_of(home), list[str]()
    if home.resolve() in running_homes():
        own = [*(link.addresses if link is not None else ()), *addresses_in(home / "peer.json", "addresses")]
    return list(dict.fromkeys([*own, *remembered(home)]))


def running_homes() -> set[Path]:
    """Returns the homes of this user's running peers, resolved."""
    return {Path(peer.home).resolve() for peer in LocalPeers().peers()}
