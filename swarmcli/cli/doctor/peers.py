"""Checks of this user's peers: what they left on the disk, and how those do that run."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any
from urllib.parse import quote

from swarmcli.cli.doctor.finding import Context, Finding, of_error
from swarmcli.cli.status import reports
from swarmcli.errors import JournalError, SwarmError
from swarmcli.files.durable import foreign
from swarmcli.journal import JOURNAL_NAME, JournalReader
from swarmcli.machine.registry import VARIABLE
from swarmcli.words import plural

MOST_HOMES = 200
JOURNAL_SECONDS = 20.0  # for reading the pages of one journal
CHECKED_EVERY = 10_000  # steps of SQLite between two looks at the time


def find_homes(context: Context) -> Iterator[Finding]:
    """The directories of peers: of runs joined by a link, of the recipe that is named, of peers that run, and below
    `runs` here."""
    from swarmcli.machine.places import data_directory, files_of_homes, places_of_runs

    places = places_of_runs(context.registry)
    if context.recipe is not None:
        places.append(Path(context.recipe.output_dir).resolve() / context.recipe.run_id)
    files = [
        file for place in places for name in ("identity.key", JOURNAL_NAME) for file in files_of_homes(place, name)
    ]
    are = list(dict.fromkeys(file.parent for file in files))
    context.homes = are[:MOST_HOMES]
    if not are:
        yield Finding("homes", "SKIP", f"no peer of yours has run yet (below {data_directory()}, or of a recipe named)")
    elif len(are) > MOST_HOMES:
        yield Finding("homes", "SKIP", f"only {MOST_HOMES} of {len(are)} peers' directories are looked at")


def check_identities(context: Context) -> Iterator[Finding]:
    """Key files are this user's own, readable by nobody else, and hold a key; so with what makes members of peers."""
    from swarmcli.network.key_file import read_key_file  # beside the lock, which a running peer holds
    from swarmcli.owner.invitations import read_remembered

    files = [home / "identity.key" for home in context.homes]
    if context.recipe is not None and context.recipe.local.identity_path is not None:
        files.append(Path(context.recipe.local.identity_path))
    fix = "restore a backup, or move it away: a new one is made"
    yield from _each("identity", files, lambda file: read_key_file(file, "identity file", fix), "key", "in order")
    files = [home / "membership.json" for home in context.homes]
    yield from _each("membership", files, read_remembered, "invitation", "in order")


def check_journals(context: Context) -> Iterator[Finding]:
    """SQLite reads through each; and the last life of a peer that does not run should have ended with a goodbye."""
    running = {peer.home for peer in context.registry.living()}
    files = [home / JOURNAL_NAME for home in context.homes]
    yield from _each("journal", files, lambda file: _look_into(file, running), "journal", "intact")


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


def _look_into(journal: Path, running: set[str]) -> Finding | None:
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
        fix = f"move it away, and a new one is begun: mv {journal} {journal}.damaged"
        raise JournalError(f"{journal} is damaged: {damage}; {fix}")
    with JournalReader(journal) as reader:
        runs = reader.runs()
    home, last = str(journal.parent), runs[-1] if runs else None
    # A peer that was started with another runtime directory is in another registry.
    if last is None or last.finished is not None or home in running or last.goes_on(time.time()):
        return None
    text = f"{home} ended without a goodbye: it was killed, or power was lost"
    fix = f"start it again, it takes up where it was; `swarm log {home}` shows what was before"
    return Finding("last end", "WARN", text, fix)


def check_peers(context: Context) -> Iterator[Finding]:
    """Those that run answer, and raise no alarm."""
    registry = context.registry
    if registry.directory.exists() and not registry.is_own:
        text = f"{registry.directory} belongs to another user or may be written by others, so no peer is found there"
        fix = f"chmod 700 {registry.directory}, or set {VARIABLE} to a directory of your own"
        yield Finding("peers", "FAIL", text, fix)
        return
    peers = registry.peers()
    if not peers:
        yield Finding("peers", "SKIP", "no peer of yours runs on this computer")
        return
    for report in reports(registry, peers):
        who = f"{report['name']} ({report['role']} of {report['run_id']})"
        if "error" in report:
            yield Finding("peers", "FAIL", f"{who} does not answer", f"`swarm stop --now` ends process {report['pid']}")
        elif "joining" in report:
            yield Finding("peers", "OK", f"{who} is joining")
        else:
            yield from _of_state(who, report["state"])


def _of_state(who: str, state: Any) -> Iterator[Finding]:
    try:
        run, sentence = state["run"], state["me"]["sentence"]
        alarms = [*filter(None, (run["alarm"], run["notice"], *(alert["text"] for alert in state["alerts"])))]
    except (KeyError, TypeError):
        yield Finding("peers", "WARN", f"{who} is of another version of swarm", "stop it and start it again")
        return
    if not alarms:
        yield Finding("peers", "OK", f"{who}: {sentence}")
    for alarm in alarms:
        yield Finding("peers", "WARN", f"{who}: {alarm}", "`swarm status` and its page tell more")
