"""Checks of what this user's peers have on the disk."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from urllib.parse import quote

from swarmcli.cli.doctor.finding import Context, Finding, of_error
from swarmcli.errors import JournalError, SwarmError
from swarmcli.files.durable import foreign
from swarmcli.journal import JOURNAL_NAME
from swarmcli.machine.places import data_directory, files_of_homes, places_of_runs
from swarmcli.words import plural

JOURNAL_SECONDS = 20.0  # for reading the pages of one journal
CHECKED_EVERY = 10_000  # steps of SQLite between two looks at the time


def check_homes(context: Context) -> Iterator[Finding]:
    """Key files are this user's own, readable by nobody else, and hold a key; so with what makes members of peers.
    SQLite reads through each journal."""
    from swarmcli.network.key_file import read_key_file  # beside the lock, which a running peer holds
    from swarmcli.owner.invitations import read_remembered

    homes = find_homes(context)
    if not homes:
        yield Finding("homes", "SKIP", f"earlier runs: none (looked below {data_directory()})")
    files = [home / "identity.key" for home in homes]
    if context.recipe is not None and context.recipe.local.identity_path is not None:
        files.append(Path(context.recipe.local.identity_path))
    fix = "restore a backup, or move it away, and the peer makes a new one"
    yield from _each("identity", files, lambda file: read_key_file(file, "identity file", fix), "key", "in order")
    files = [home / "membership.json" for home in homes]
    yield from _each("membership", files, read_remembered, "invitation", "in order")
    yield from _each("journal", [home / JOURNAL_NAME for home in homes], _look_into, "journal", "intact")


def find_homes(context: Context) -> list[Path]:
    """The directories of peers: of runs joined by a link, of the recipe that is named, of peers that run, and below
    `runs` here."""
    places = places_of_runs()
    if context.recipe is not None:
        places.append(Path(context.recipe.output_dir).resolve() / context.recipe.run_id)
    files = [
        file for place in places for name in ("identity.key", JOURNAL_NAME) for file in files_of_homes(place, name)
    ]
    return list(dict.fromkeys(file.parent for file in files))


def _each(check: str, files: list[Path], look: Callable[[Path], object], what: str, well: str) -> Iterator[Finding]:
    """A line for each file of which `look` raises or returns a finding, and one for all that are well."""
    good = 0
    for file in filter(Path.exists, files):
        try:
            if said := foreign(file, file.parent):
                raise SwarmError(said)
            found = look(file)
        except SwarmError as error:
            yield from of_error(check, error)
        except OSError as error:
            yield Finding(check, "FAIL", f"{file} cannot be read: {error.strerror}", f"chmod 600 {file}")
        else:
            good += 1
            if isinstance(found, Finding):
                yield found
    if good:
        yield Finding(check, "OK", f"{plural(good, what)} {well}")


def _look_into(journal: Path) -> Finding | None:
    """Raises JournalError."""
    deadline = time.monotonic() + JOURNAL_SECONDS
    try:
        with closing(sqlite3.connect(f"file:{quote(str(journal.absolute()))}?mode=ro", uri=True)) as database:
            database.set_progress_handler(lambda: time.monotonic() > deadline, CHECKED_EVERY)
            damage = ", ".join(str(row[0]) for row in database.execute("PRAGMA quick_check(3)"))[:300]
    except sqlite3.Error as error:
        damage = str(error)
    if damage == "interrupted":
        text = f"{journal} is large and was not read to its end in {JOURNAL_SECONDS:g} s"
        return Finding("journal", "SKIP", text)
    if damage != "ok":
        fix = f"move it away, and the peer begins a new one: mv {journal} {journal}.damaged"
        raise JournalError(f"{journal} is damaged: {damage}; {fix}")
    return None
