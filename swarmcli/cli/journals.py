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
    """The journal of a path (a file, the one in a directory, or one up to three levels below it), of a run's name, or
    of this user; here before elsewhere. Of several, that of the only peer that runs. Raises UsageError."""
    path = Path(which or ".")
    if path.is_file():
        return path
    if (path / JOURNAL_NAME).is_file():
        return path / JOURNAL_NAME
    is_place = path.exists() and (which is not None or bool(files_of_homes(path, JOURNAL_NAME)))
    places = [path] if is_place else places_of_runs()
    journals = [file for place in places for file in files_of_homes(place, JOURNAL_NAME)]
    found = [file for file in journals if is_place or which is None or _is_of(file, which)]
    if not found:
        where = f"in {path.absolute()} or below" if is_place else "on this computer"
        of_run = f" of the run {which}" if which and not is_place else ""
        raise UsageError(f"there is no journal{of_run} {where}; name the directory of a peer")
    homes = running_homes()
    running = [file for file in found if file.parent.resolve() in homes]
    found = running or found
    if len(found) > 1 and (is_place or which is None):
        found.sort(key=lambda each: each.stat().st_mtime, reverse=True)
        named = "".join(f"\n  {file.parent}" for file in found[:MOST_NAMED])
        more = f"\n  and {len(found) - MOST_NAMED} more" if len(found) > MOST_NAMED else ""
        are = "run now" if running else "have a journal"
        raise UsageError(f"{len(found)} peers {are}; name one of these directories, or a run:{named}{more}")
    # Among several peers of a run the monitor saw most; without one, take the journal that was written last.
    return max(found, key=lambda file: (file.parent.name.startswith("monitor"), file.stat().st_mtime))


def _is_of(file: Path, run_id: str) -> bool:
    try:
        with JournalReader(file) as reader:
            return any(run.run_id == run_id for run in reader.runs())
    except JournalError:
        return False
