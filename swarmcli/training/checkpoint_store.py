"""Writing checkpoints; what is in one says swarmcli.training.checkpoint.

A checkpoint appears whole or not at all: it is written beside its place, flushed to the disk, and renamed.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import safetensors
from safetensors.torch import save_file
from torch import Tensor, nn

from swarmcli.errors import CheckpointError
from swarmcli.events import CheckpointWritten, Events, Noticed
from swarmcli.training.checkpoint import (
    CONFIG,
    DIGEST,
    FORMAT,
    MANIFEST,
    MODEL,
    NAME,
    SHARDED_FORMAT,
    SHARDS,
    TRAINING,
    file_digest,
    manifest_digest,
    model_tensors,
)
from swarmcli.training.portable import flatten


class Shards(Protocol):
    """What writes the statistics of an optimizer that is sharded over several processes; swarmcli.sites has one."""

    def copy(self) -> None:
        """All processes copy their shares."""

    def write(self, directory: Path, epoch: int) -> str:
        """All processes write their copies into this directory; a digest of them all. Raises CheckpointError."""

    def settle(self, directory: Path, name: str, kept: Sequence[str]) -> None:
        """The directory is called `name` now, or (empty) has gone; beside it those `kept` are left."""


class CheckpointStore:
    """The checkpoints of one run in one directory, of which the newest `keep` stay."""

    def __init__(self, directory: Path, run_id: str, *, keep: int = 3, events: Events | None = None) -> None:
        self.directory = directory
        self._run_id = run_id
        self._keep = keep
        self._events = events or Events()

    def write(
        self, model: nn.Module, optimizer_state: Mapping[str, Any], epoch: int, *, shards: Shards | None = None
    ) -> Path | None:
        """Writes the model and its optimizer's `state_dict()`; older checkpoints beyond `keep` go.

        Neither may change meanwhile. With `shards` the statistics in the state dict are left out, and all processes
        write what they copied before. None when a disk is full or cannot be written to: a warning is emitted, nothing
        half is left, and training goes on.
        """
        place = self.directory / f"epoch-{epoch:06d}"
        partial = self.directory / f".{place.name}-{os.getpid()}"
        try:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
            self._fill(partial, model, optimizer_state, epoch, shards)
            _replace(place, partial)
        except (OSError, safetensors.SafetensorError, CheckpointError) as error:
            text = f"no checkpoint of epoch {epoch} in {self.directory} ({error}); training goes on without it"
            self._events.emit(Noticed("warning", text))
            if shards is not None:
                shards.settle(partial, "", [])
            return None
        finally:
            shutil.rmtree(partial, ignore_errors=True)
        self._remove_old(place)
        if shards is not None:
            shards.settle(partial, place.name, [path.name for path in self.all()])
        size = sum(file.stat().st_size for file in place.rglob("*") if file.is_file())
        self._events.emit(CheckpointWritten(epoch, str(place), size))
        return place

    def latest(self) -> Path | None:
        """The newest checkpoint, None when there is none yet."""
        found = self.all()
        return found[-1] if found else None

    def remove_after(self, epoch: int) -> None:
        """Removes the checkpoints of later epochs: of a history that this peer is no part of any more."""
        for path in self.all():
            if int(path.name.partition("-")[2]) > epoch:
                shutil.rmtree(path, ignore_errors=True)

    def all(self) -> list[Path]:
        """The checkpoints that there are, the oldest epoch first."""
        if not self.directory.is_dir():
            return []
        numbered = [(int(m[1]), path) for path in self.directory.iterdir() if (m := NAME.fullmatch(path.name))]
        return [path for _, path in sorted(numbered)]

    def _fill(
        self,
        directory: Path,
        model: nn.Module,
        optimizer_state: Mapping[str, Any],
        epoch: int,
        shards: Shards | None,
    ) -> None:
        statistics: dict[str, Tensor] = {}
        structure = flatten(optimizer_state if shards is None else {**optimizer_state, "state": {}}, statistics)
        _save(model_tensors(model), directory / MODEL)
        _save(statistics, directory / TRAINING)
        config: Any = getattr(model, "config", None)
        if hasattr(config, "to_json_string"):
            (directory / CONFIG).write_text(config.to_json_string(), encoding="utf-8")
        manifest: dict[str, Any] = {
            "format": FORMAT if shards is None else SHARDED_FORMAT,
            "run_id": self._run_id,
            "epoch": epoch,
            "optimizer": structure,
            "sha256": {file.name: file_digest(file) for file in sorted(directory.iterdir())},
        }
        if shards is not None:
            manifest["shards"] = shards.write(directory / SHARDS, epoch)
        manifest[DIGEST] = manifest_digest(manifest)
        (directory / MANIFEST).write_text(json.dumps(manifest), encoding="utf-8")
        for file in [*directory.iterdir(), directory]:
            _flush(file)

    def _remove_old(self, written: Path) -> None:
        """What was just written stays, also where a run that was set back wrote it beside those of later epochs."""
        others = [path for path in self.all() if path != written]
        for path in others[: max(0, len(others) + 1 - self._keep)]:
            shutil.rmtree(path, ignore_errors=True)
        for path in self.directory.glob(".epoch-*-*"):
            # Left by a process that was killed while it wrote.
            if not _is_running(int(path.name.rpartition("-")[2])):
                shutil.rmtree(path, ignore_errors=True)


def _save(tensors: Mapping[str, Tensor], file: Path) -> None:
    # Copies, because safetensors refuses tensors that share memory with each other.
    copies = {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in tensors.items()}
    save_file(copies, file, metadata={"format": "pt"})


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _replace(place: Path, partial: Path) -> None:
    """Renames, also over a checkpoint of the same epoch (a run that was resumed before it)."""
    if place.exists():
        aside = place.with_name(f".{place.name}.old-{os.getpid()}")
        place.rename(aside)
        partial.rename(place)
        shutil.rmtree(aside, ignore_errors=True)
    else:
        partial.rename(place)
    _flush(place.parent)


def _is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
