"""Where a user's runs are on this computer."""

from __future__ import annotations

import os
from pathlib import Path

import platformdirs

from swarmcli.machine.registry import LocalPeers

VARIABLE = "SWARM_DATA_DIR"
USUAL = Path("runs")  # output_dir of a recipe that names none


def data_directory() -> Path:
    """Returns the directory of runs that were joined by a link: $SWARM_DATA_DIR, or where the platform keeps the data
    of programs."""
    if chosen := os.environ.get(VARIABLE):
        return Path(chosen).expanduser().resolve()
    return platformdirs.user_data_path("swarm", appauthor=False)


def files_of_homes(directory: Path, name: str) -> list[Path]:
    """Returns the files of this name in a home, or in homes up to three levels below."""
    found = [file for depth in ("", "*/", "*/*/", "*/*/*/") for file in sorted(directory.glob(depth + name))]
    return [file for file in found if file.is_file()]


def places_of_runs(registry: LocalPeers | None = None) -> list[Path]:
    """Returns directories below which this user's checkpoints are, as far as can be known: the homes of peers that run,
    the runs that were joined by a link, and `runs` in the working directory or in a directory there, as `swarm init
    my-run` makes one. None of them is within another."""
    here = Path.cwd()
    homes = [Path(peer.home) for peer in (registry or LocalPeers()).peers()]
    found = [*homes, data_directory(), here / USUAL, *here.glob(f"*/{USUAL}")]
    there = sorted({path.resolve() for path in found if path.is_dir()})
    return [path for path in there if not any(path.is_relative_to(other) for other in there if other != path)]
