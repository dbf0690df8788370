"""Turns what a person typed, a recipe's path or a link, into a recipe on this computer that somebody has agreed to."""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from swarmcli.cli.console import aloud, err
from swarmcli.cli.ending import ExitCode
from swarmcli.errors import MembershipError, RecipeError, SwarmError, UsageError
from swarmcli.machine.places import files_of_homes
from swarmcli.peer.home import LINK
from swarmcli.peer.linked import LinkedRun
from swarmcli.peer.offering import fetch_recipe
from swarmcli.recipe import (
    Recipe,
    differing_keys,
    digest_of,
    fingerprint_of,
    is_link,
    load_recipe,
    parse_link,
    parse_recipe,
)
from swarmcli.recipe.limit_store import LimitStore
from swarmcli.recipe.offered import UNKNOWN, RunEstimate, check_data_here, data_lacking
from swarmcli.recipe.schema import Setting
from swarmcli.recipe.ticket import Ticket
from swarmcli.words import format_moment, format_size

if TYPE_CHECKING:
    from swarmcli.optim.config import Role  # its module imports torch: what was mistyped is told before that


@dataclass(frozen=True, slots=True)
class RecipeToJoin:
    """The recipe to join with, and the contacts that came with it."""

    path: Path
    recipe: Recipe  # with what this person has set
    contacts: Sequence[str] = ()

    def in_place_of(self, given: str, arguments: Sequence[str]) -> list[str]:
        """Returns a command line with this recipe in place of the link, for processes that are not to ask again."""
        words = [str(self.path) if word == given else word for word in arguments]
        return [*words, *(part for address in self.contacts for part in ("--peer", address))]


def recipe_named(given: str, role: Role, settings: Sequence[Setting], *, yes: bool) -> RecipeToJoin:
    """Fetches, checks, shows and keeps a link's recipe; reads one at a path.

    Asks at most once, and not at all about a recipe that was agreed to before. Ends the command when the answer is no;
    then nothing was kept. Raises RecipeError.
    """
    if not is_link(given):
        recipe = load_recipe(given, settings)
        if role == "trainer" and (gone := data_lacking(recipe, recipe.datasets)):  # told before it meets anybody
            raise RecipeError(f"{recipe.origin('datasets')}: {gone}, or correct the recipe")
        return RecipeToJoin(Path(given), recipe)
    link = parse_link(given)
    run = LinkedRun(link)
    with ExitStack() as undo:
        undo.callback(run.forget)
        text, recipe, going = recipe_of(run, settings)
        if not run.has_agreed(role, text):
            check_at_once(role, recipe, yes=yes)  # the sheet takes a while
            with nullcontext() if yes else aloud():
                show_sheet(run, role, recipe, going)
                from swarmcli.cli.consent import ask  # it imports torch: `show_sheet` says that it takes a while

                agreed = yes or ask(role)
            if not agreed:
                err.print("not joined; this computer has kept nothing of it")
                raise typer.Exit(ExitCode.FAILURE)
            run.keep(role, text)
        undo.pop_all()
    if role == "trainer":  # the data may have gone since somebody agreed
        check_data_here(recipe)
    if link.ticket is not None:
        run.keep_invitation(link.ticket)
    return RecipeToJoin(run.recipe, recipe, link.addresses)


def check_at_once(role: Role, recipe: Recipe, *, yes: bool) -> None:
    """Raises UsageError if nobody could answer, and RecipeError for data that are not here."""
    if not yes and not (sys.stdin.isatty() and sys.stderr.isatty()):
        raise UsageError("joining by a link asks before it begins, and there is no terminal to ask on; add --yes")
    if role == "trainer":
        check_data_here(recipe)


def recipe_of(run: LinkedRun, settings: Sequence[Setting]) -> tuple[str, Recipe, RunEstimate]:
    """Returns the recipe as this computer keeps it, from here or from the contact; the same with what a person has set;
    and how the run goes, if that was asked. Puts the files of its model in their place: `run.forget` removes them."""
    if run.link.ticket is not None:
        check_not_ended(run.link.ticket)
    if (kept := recipe_kept(run, settings)) is not None:
        return *kept, UNKNOWN
    err.print(f"asking {run.link.named} for the recipe of {run.link.run_id}")

    try:
        fetched, answer = fetch_recipe(run.link, run.path, run.bring)
    except SwarmError:
        if run.recipe.exists():
            with aloud():
                tell_earlier_version(run)
        raise
    text = run.text_of(fetched)
    return text, with_settings(run, text, settings), answer.going


def recipe_kept(run: LinkedRun, settings: Sequence[Setting]) -> tuple[str, Recipe] | None:
    """Returns the recipe that was kept earlier, and the same with what a person has set; None: there is none that
    matches the link. Raises RecipeError for settings that do not fit it."""
    text = run.kept()
    return None if text is None else (text, with_settings(run, text, settings))


def tell_earlier_version(run: LinkedRun) -> None:
    """Says what helps if an earlier version computed the recipe's fingerprint in another way, or somebody has edited
    the recipe since."""
    err.print(
        "this computer has joined by that link before, but the recipe that it kept no longer matches the link: "
        "somebody has changed it, or an earlier version of swarm wrote it. Ask for a new link (`swarm link` prints it "
        "there), and go on as the same peer:"
    )
    for home in sorted(files.parent for files in files_of_homes(run.path, LINK)):
        err.print(f"  swarm join NEW-LINK --home {shlex.quote(str(home))}", soft_wrap=True)


def check_not_ended(ticket: Ticket) -> None:
    """Raises MembershipError here, and not after a minute by a refusal."""
    if ticket.invitation.until <= time.time():
        raise MembershipError(
            f"the invitation of this link held until {format_moment(ticket.invitation.until)}; ask the owner of the "
            "run for another link (`swarm invite`)"
        )


def show_sheet(run: LinkedRun, role: Role, recipe: Recipe, going: RunEstimate) -> None:
    """Tells what joining will do, and writes nothing. Raises RecipeError for what could not be joined."""
    err.print("checking what that takes on this computer: up to a minute")  # mostly for imports
    from swarmcli.cli import consent
    from swarmcli.peer.collaboration import compute_of
    from swarmcli.training.demand import demand_of
    from swarmcli.training.memory import check_memory
    from swarmcli.training.outline import outline_of

    compute = compute_of(recipe, role)
    outline = outline_of(recipe)
    limits = LimitStore(recipe).limits
    # When the role begins, which may be long after the answer, it looks whether that much is free.
    memory = check_memory(recipe, outline, role, compute, limits=limits, now=False)
    demand = demand_of(recipe, outline, role, going)
    lines = consent.sheet(recipe, role, demand, memory, run.path, limits)
    if run.link.ticket is not None:
        lines.insert(1, ("access", consent.invitation_in_words(run.link.ticket)))
    if run.brought:
        came = format_size(sum(run.brought.values()))
        lines.append(("came already", f"{came} of config and tokenizer, from that peer, checked by the link"))
    consent.show(recipe, run.link.peer_id.short, lines)


def with_settings(run: LinkedRun, text: str, settings: Sequence[Setting]) -> Recipe:
    """Returns the recipe with what a person has set. Raises RecipeError if that changes what the run has agreed on."""
    recipe = parse_recipe(text, settings, name=str(run.recipe), directory=run.path)
    if digest_of(recipe) != run.link.fingerprint:
        plain = parse_recipe(text, name=str(run.recipe), directory=run.path)
        keys = ", ".join(differing_keys(fingerprint_of(plain), fingerprint_of(recipe)))
        raise RecipeError(f"--set changes {keys}, which must be the same for all peers of the run; leave it out")
    return recipe
