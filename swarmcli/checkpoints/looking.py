"""Lists directories of checkpoints, and checks whether checkpoints are whole."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from swarmcli.checkpoints.directory import CheckpointDirectory, kept, loss_of
from swarmcli.checkpoints.layout import (
    BEST,
    LATEST,
    MANIFEST,
    SHARDED_FORMAT,
    SHARDS,
    check_files,
    checkpoints_below,
    epoch_of,
    read_manifest,
)
from swarmcli.errors import CheckpointError


@dataclass(frozen=True, slots=True)
class CheckpointInfo:
    """One checkpoint, as far as its directory shows without reading tensors."""

    path: Path
    run_id: str  # "": it cannot be read
    epoch: int
    written: float  # seconds since 1970
    bytes: int
    loss: float | None  # on text that nobody trains on; None: it was not measured
    kept: tuple[str, ...]  # why it stays; empty: it is removed when the next one is written, or by `prune`
    latest: bool  # whether the link of that name leads here
    best: bool
    problem: str = ""  # why it cannot be used; "": nothing is missing. `verify` looks into the files


def listing(directory: Path) -> list[CheckpointInfo]:
    """Returns all checkpoints below a directory; those in one directory stand together, the newest first.

    Raises nothing: `problem` tells what cannot be read, and checkpoints that are removed meanwhile are left out.
    """
    found: dict[Path, list[Path]] = {}
    for path in checkpoints_below(directory):
        found.setdefault(path.parent, []).append(path)
    return [info for parent, paths in sorted(found.items()) for info in _described(CheckpointDirectory(parent), paths)]


def _described(checkpoints: CheckpointDirectory, paths: Iterable[Path]) -> list[CheckpointInfo]:
    losses = {epoch_of(path): loss_of(path) for path in paths}
    latest, best = checkpoints.linked(LATEST), checkpoints.linked(BEST)
    last = next((epoch_of(path) for path in paths if path.name == latest), None)
    why = kept(losses, checkpoints.keep, last)
    described = []
    for path in paths:
        epoch = epoch_of(path)
        try:
            size = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
            written = (path / MANIFEST).stat().st_mtime
        except OSError:
            continue
        run_id, problem = _looked_at(path)
        links = path.name == latest, path.name == best
        described.append(
            CheckpointInfo(path, run_id, epoch, written, size, losses[epoch], why.get(epoch, ()), *links, problem)
        )
    return described


def _looked_at(path: Path) -> tuple[str, str]:
    """Returns the run, and what is wrong as far as sizes tell."""
    try:
        manifest = read_manifest(path)
        for name, size in dict(manifest.get("bytes") or {}).items():  # earlier versions wrote none
            file = path / Path(name).name
            if not file.is_file():
                return manifest["run_id"], f"{file.name} is missing"
            if file.stat().st_size != size:
                return manifest["run_id"], f"{file.name} has {file.stat().st_size:,} of {size:,} bytes"
    except (CheckpointError, OSError, ValueError, TypeError) as error:
        return "", str(error)
    return manifest["run_id"], ""


def verify(path: Path) -> str:
    """Reads all of a checkpoint; returns what is wrong with it, "" if all is as it was written.

    Takes time in proportion to the size of its files. If a site of a former version wrote files on several machines,
    all have to be here.
    """
    try:
        manifest = read_manifest(path)
        check_files(path, manifest)
        if manifest["format"] == SHARDED_FORMAT:
            # Imported here: it imports torch, and only former versions wrote shards.
            from swarmcli.files.old_shards import read_shards

            read_shards(path / SHARDS, manifest["shards"])
    except (CheckpointError, OSError) as error:
        return str(error)
    return ""
