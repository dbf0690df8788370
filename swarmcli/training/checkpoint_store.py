"""Writing checkpoints; what is in one says swarmcli.training.checkpoint.

A checkpoint appears whole or not at all: it is written beside its place, flushed to the disk, and renamed. Beside the
checkpoints the link `latest` names the one that was written last. It never names one that is not there.
"""

from __future__ import annotations

import copy
import json
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

import psutil
from torch import Tensor, nn

from swarmcli.errors import CheckpointError
from swarmcli.events import CheckpointWritten, Events, Noticed
from swarmcli.files.durable import flush
from swarmcli.files.flat import flatten
from swarmcli.files.tensor_file import write_tensors
from swarmcli.training.checkpoint import (
    CONFIG,
    DIGEST,
    FORMAT,
    LATEST,
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

    def __init__(
        self,
        directory: Path,
        run_id: str,
        *,
        keep: int = 3,
        events: Events | None = None,
        describe: Callable[[Path, int, int | None], object] | None = None,
    ) -> None:
        """`describe(directory, epoch, samples)` adds what users of the model want beside it, a tokenizer say. Training
        goes on without: these files may be edited, and where it raises, the checkpoint lacks them with a warning.
        """
        self.directory = directory
        self._describe = describe
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
            self._replace(place, partial)
        except (OSError, CheckpointError) as error:
            text = f"the checkpoint of epoch {epoch} was not written to {self.directory} ({error})"
            self._events.emit(Noticed("warning", text))
            if shards is not None:
                shards.settle(partial, "", [])
            return None
        finally:
            shutil.rmtree(partial, ignore_errors=True)
        self._point_to(place)
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
        found = self.all()
        later = [path for path in found if _epoch_of(path) > epoch]
        if later:
            self._point_to(next((path for path in reversed(found) if path not in later), None))
        for path in later:
            shutil.rmtree(path, ignore_errors=True)

    def all(self) -> list[Path]:
        """The checkpoints that there are, the oldest epoch first."""
        if not self.directory.is_dir():
            return []
        return sorted((path for path in self.directory.iterdir() if NAME.fullmatch(path.name)), key=_epoch_of)

    def _fill(
        self,
        directory: Path,
        model: nn.Module,
        optimizer_state: Mapping[str, Any],
        epoch: int,
        shards: Shards | None,
    ) -> None:
        statistics: dict[str, Tensor] = {}
        kept = optimizer_state if shards is None else {**optimizer_state, "state": {}}
        structure = flatten(kept, statistics, "optimizer")
        write_tensors(directory / MODEL, model_tensors(model))
        write_tensors(directory / TRAINING, statistics)
        _write_config(model, directory / CONFIG)
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
        if self._describe is not None:
            try:
                self._describe(directory, epoch, optimizer_state.get("swarm", {}).get("samples_seen"))
            except Exception as error:  # tokenizers raise many kinds, some of them plain Exception
                text = f"the checkpoint of epoch {epoch} lacks its tokenizer or model card: {error}"
                self._events.emit(Noticed("warning", text))
        for file in [*directory.iterdir(), directory]:
            flush(file)

    def _replace(self, place: Path, partial: Path) -> None:
        """Renames, also over a checkpoint of the same epoch (a run that was resumed before it)."""
        if place.exists():
            aside = place.with_name(f".{place.name}.old-{os.getpid()}")
            # A directory cannot be exchanged for another at once, and whoever is killed in between must leave no link
            # to nothing.
            self._point_to(next((path for path in reversed(self.all()) if path != place), None))
            place.rename(aside)
            partial.rename(place)
            shutil.rmtree(aside, ignore_errors=True)
        else:
            partial.rename(place)
        flush(place.parent)

    def _point_to(self, place: Path | None) -> None:
        """`latest` names this checkpoint from now on; None: the link goes. It is replaced at once, by a rename.

        Where the file system has no symbolic links it is a text file that holds the name. A failure costs the link.
        """
        link = self.directory / LATEST
        temporary = self.directory / f".{LATEST}-{os.getpid()}"
        try:
            if place is None:
                link.unlink(missing_ok=True)
                return
            temporary.unlink(missing_ok=True)
            try:
                temporary.symlink_to(place.name, target_is_directory=True)
            except (OSError, NotImplementedError):
                temporary.write_text(f"{place.name}\n", encoding="utf-8")
            temporary.replace(link)
        except OSError as error:
            self._events.emit(Noticed("warning", f"{link} does not name the newest checkpoint: {error}"))
            for file in (temporary, link):  # a link that names an older one could outlive it
                with suppress(OSError):
                    file.unlink()

    def _remove_old(self, written: Path) -> None:
        """What was just written stays, also where a run that was set back wrote it beside those of later epochs."""
        others = [path for path in self.all() if path != written]
        for path in others[: max(0, len(others) + 1 - self._keep)]:
            shutil.rmtree(path, ignore_errors=True)
        for path in self.directory.glob(".epoch-*-*"):
            # Left by a process that was killed while it wrote.
            if not psutil.pid_exists(int(path.name.rpartition("-")[2])):
                shutil.rmtree(path, ignore_errors=True)


def _epoch_of(path: Path) -> int:
    return int(path.name.partition("-")[2])


def _write_config(model: nn.Module, file: Path) -> None:
    """A model of transformers is described as its users want it: with its class, and with a cache for generating."""
    config: Any = copy.copy(getattr(model, "config", None))
    if hasattr(config, "to_json_string"):
        config.architectures = [type(model).__name__]
        config.use_cache = True
        if getattr(config, "dtype", None) is not None:  # of the weights that training began with, perhaps
            config.dtype = model.dtype
        config.name_or_path = ""  # where the weights lay on this machine is nobody's business
        file.write_text(config.to_json_string(), encoding="utf-8")
