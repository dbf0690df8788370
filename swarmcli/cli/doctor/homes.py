"""Checks of what lies on the disk: identities, journals and checkpoints of this user's peers."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from urllib.parse import quote

from swarmcli.cli.doctor.finding import Context, Finding, of_error
from swarmcli.errors import IdentityError, JournalError, MembershipError
from swarmcli.journal import JOURNAL_NAME, JournalReader
from swarmcli.machine.registry import is_running

MOST_HOMES = 200
IDENTITY = "identity.key"
JOURNAL_SECONDS = 20.0  # for reading the pages of one journal
READ_SECONDS = 60.0  # after which no further checkpoint is read
CHECKED_EVERY = 10_000  # steps of SQLite between two looks at the time


def find_homes(context: Context) -> Iterator[Finding]:
    """The directories of peers: of runs joined by a link, of the recipe that is named, of peers that run, and below
    `runs` here."""
    from swarmcli.machine.places import data_directory, places_of_runs

    places = places_of_runs(context.registry)
    if context.recipe is not None:
        places.append(Path(context.recipe.output_dir).resolve() / context.recipe.run_id)
    names = [depth + name for depth in ("", "*/", "*/*/", "*/*/*/") for name in (IDENTITY, JOURNAL_NAME)]
    are = list(dict.fromkeys(file.parent for place in places for name in names for file in sorted(place.glob(name))))
    context.homes = are[:MOST_HOMES]
    if not are:
        yield Finding("homes", "SKIP", f"no peer of yours has run yet (below {data_directory()}, or of a recipe named)")
    elif len(are) > MOST_HOMES:
        yield Finding("homes", "SKIP", f"only {MOST_HOMES} of {len(are)} peers' directories are looked at")


def check_identities(context: Context) -> Iterator[Finding]:
    """Key files are this user's own, readable by nobody else, and hold a key; so with what makes members of peers."""
    files = [home / IDENTITY for home in context.homes]
    if context.recipe is not None and context.recipe.local.identity_path is not None:
        files.append(Path(context.recipe.local.identity_path))
    files = [file for file in files if file.exists()]
    yield from _each("identity", files, _key_problem, "keys", "in order")
    members = [file for home in context.homes if (file := home / "membership.json").exists()]
    yield from _each("membership", members, _membership_problem, "invitations", "in order")


def _each(
    check: str, files: list[Path], problem_of: Callable[[Path], Finding | None], many: str, well: str
) -> Iterator[Finding]:
    """A line for each that is not well, and one for all others."""
    problems = [problem for file in files if (problem := problem_of(file)) is not None]
    yield from problems
    if good := len(files) - sum(each.outcome == "FAIL" for each in problems):
        yield Finding(check, "OK", f"{good} {many if good != 1 else many.removesuffix('s')} {well}")


def _key_problem(file: Path) -> Finding | None:
    """Without the lock, which a running peer holds."""
    from swarmcli.network.key_file import read_key_file

    try:
        read_key_file(file, "identity file", "restore a backup, or move it away: a new one is made")
    except IdentityError as error:
        return of_error("identity", error)
    except OSError as error:
        return Finding("identity", "FAIL", f"{file} cannot be read: {error.strerror}", f"chmod 600 {file}")
    return None


def _membership_problem(file: Path) -> Finding | None:
    from swarmcli.owner.invitations import read_remembered

    try:
        read_remembered(file)
    except MembershipError as error:
        return of_error("membership", error)
    return None


def check_journals(context: Context) -> Iterator[Finding]:
    """SQLite reads through each; and the last life of a peer that does not run should have ended with a goodbye."""
    running = {peer.home for peer in context.registry.living()}
    files = [file for home in context.homes if (file := home / JOURNAL_NAME).exists()]
    yield from _each("journal", files, lambda file: _journal_problem(file, running), "journals", "intact")


def _journal_problem(file: Path, running: set[str]) -> Finding | None:
    again = f"move it away, and a new one is begun: mv {file} {file}.damaged"
    try:
        damage = quick_check(file)
        if damage == "interrupted":
            return Finding("journal", "SKIP", f"{file} is large and was not read to its end in {JOURNAL_SECONDS:g} s")
        if damage:
            return Finding("journal", "FAIL", f"{file} is damaged: {damage}", again)
        with JournalReader(file) as reader:
            runs = reader.runs()
    except JournalError as error:
        return of_error("journal", error)
    except sqlite3.Error as error:
        return Finding("journal", "FAIL", f"{file} is damaged: {error}", again)
    last = runs[-1] if runs else None
    # A peer that was started with another runtime directory is in another registry.
    gone = str(file.parent) not in running and last is not None and not is_running(last.pid, last.started)
    if gone and last is not None and last.finished is None:
        return Finding(
            "last end",
            "WARN",
            f"{file.parent} ended without a goodbye: it was killed, or power was lost",
            f"start it again, it takes up where it was; `swarm log {file.parent}` shows what was before",
        )
    return None


def quick_check(file: Path) -> str:
    """What SQLite finds wrong in a file; "" if nothing, "interrupted" if it takes too long. Raises sqlite3.Error."""
    deadline = time.monotonic() + JOURNAL_SECONDS
    with closing(sqlite3.connect(f"file:{quote(str(file.absolute()))}?mode=ro", uri=True)) as database:
        database.set_progress_handler(lambda: time.monotonic() > deadline, CHECKED_EVERY)
        try:
            rows = database.execute("PRAGMA quick_check(3)").fetchall()
        except sqlite3.OperationalError as error:
            if "interrupted" in str(error):
                return "interrupted"
            raise
    said = "; ".join(str(row[0]) for row in rows)
    return "" if said == "ok" else said[:300]


def check_checkpoints(context: Context) -> Iterator[Finding]:
    """All are complete by their sizes, and the newest of each peer holds what was written, byte by byte."""
    from swarmcli.checkpoints.looking import listing, verify

    deadline = time.monotonic() + READ_SECONDS
    read = 0
    for home in context.homes:
        found = listing(home / "checkpoints")
        torn = {each.path: each.problem for each in found if each.problem}
        whole = next((each.path for each in found if not each.problem), None)
        if whole is not None and time.monotonic() < deadline:
            read += 1
            if problem := verify(whole):
                torn[whole] = problem
        for path, problem in torn.items():
            yield Finding(
                "checkpoint",
                "FAIL",
                f"{path} is damaged: {problem.partition('; ')[0]}",
                f"use another one, or have the peer begin without: rm -r {path}",
            )
    if read:
        rest = "`swarm checkpoints verify` reads all"
        yield Finding("checkpoint", "OK", f"the newest of {read} {'peer' if read == 1 else 'peers'} was read; {rest}")
