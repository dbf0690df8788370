"""Which journal a command means: by a path, by the name of a run, or the only one there is."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from swarmcli.cli.local import running_homes
from swarmcli.errors import JournalError, UsageError
from swarmcli.journal import JOURNAL_NAME, JournalReader
from swarmcli.machine.places import files_of_homes, places_of_runs

MOST_NAMED = 8  # journals that are named where several are meant

Which = Annotated[
    str | None,
    typer.Argument(
        metavar="[RUN|HOME]",
        help="A run by its name, or a peer's directory or journal. Default: the only one here or of this "
        "user, or of those the only one that runs.",
    ),
]


def journal_of(which: str | None) -> Path:
    """Finds the journal of a path, of a run's name, or the only one; among several it prefers that of a running peer.
    Raises JournalError, UsageError."""
    if which is not None and Path(which).exists():
        return find_journal(Path(which))
    if which is None and files_of_homes(Path(), JOURNAL_NAME):
        return find_journal(None)
    found = [file for file in known_journals() if which is None or _is_of(file, which)]
    if not found:
        named = f"of the run {which} " if which else ""
        raise UsageError(f"no journal {named}is known on this computer; name the directory of a peer")
    running = _of_running(found)
    found = running or found
    if len(found) > 1 and which is None:
        named = "".join(f"\n  {file.parent}" for file in found[:MOST_NAMED])
        are = "run now" if running else "have a journal"
        raise UsageError(f"{len(found)} peers of yours {are}; name one of these directories, or a run:{named}")
    # Among several peers of a run the monitor saw most; without one, take the journal that was written last.
    return max(found, key=lambda file: (file.parent.name.startswith("monitor"), file.stat().st_mtime))


def known_journals() -> list[Path]:
    """Lists the journals of running peers, of runs joined by a link, and below the usual output_dir."""
    return [file for place in places_of_runs() for file in files_of_homes(place, JOURNAL_NAME)]


def _of_running(journals: list[Path]) -> list[Path]:
    homes = running_homes()
    return [file for file in journals if file.parent.resolve() in homes]


def _is_of(file: Path, run_id: str) -> bool:
    try:
        with JournalReader(file) as reader:
            return any(run.run_id == run_id for run in reader.runs())
    except JournalError:
        return False


def find_journal(path: Path | None) -> Path:
    """The file itself, or the one journal in a directory or up to three levels below it; of several that of the only
    peer that runs."""
    where = path if path is not None else Path()
    if not where.exists():
        raise JournalError(f"{where} does not exist; give a journal ({JOURNAL_NAME}) or a directory that holds one")
    if not where.is_dir():
        return where
    if (where / JOURNAL_NAME).is_file():
        return where / JOURNAL_NAME
    found = files_of_homes(where, JOURNAL_NAME)
    if len(found) == 1:
        return found[0]
    if len(running := _of_running(found)) == 1:
        return running[0]
    if not found:
        raise JournalError(f"there is no {JOURNAL_NAME} in {where.absolute()} or below; give the path of one")
    found.sort(key=lambda each: each.stat().st_mtime, reverse=True)
    named = "".join(f"\n  {each}" for each in found[:MOST_NAMED])
    more = f"\n  and {len(found) - MOST_NAMED} more" if len(found) > MOST_NAMED else ""
    raise JournalError(f"{where.absolute()} holds {len(found)} journals; give the path of one:{named}{more}")
