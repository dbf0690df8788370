"""Checkpoints on disk: the model as transformers reads it, and beside it what training needs to go on.

    <directory>/epoch-000012/
        model.safetensors      parameters and buffers by name; with config.json a directory that base_model can name
        training.safetensors   tensors of the optimizer's state
        checkpoint.json        run, epoch, the rest of the optimizer's state (lineage, schedule), a hash of each file

A checkpoint appears whole or not at all: it is written beside its place, flushed to the disk, and renamed.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from swarmcli.errors import CheckpointError
from swarmcli.events import CheckpointWritten, Events, Noticed
from swarmcli.training.portable import flatten, unflatten

logger = logging.getLogger(__name__)

FORMAT = 1
MANIFEST = "checkpoint.json"
MODEL = "model.safetensors"
TRAINING = "training.safetensors"
CONFIG = "config.json"

_NAME = re.compile(r"epoch-(\d{6,})")


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint that was read and found whole. Tensors are on the CPU."""

    path: Path
    run_id: str
    epoch: int
    model: dict[str, Tensor]  # parameters and buffers by name
    optimizer: dict[str, Any]  # what the optimizer's state_dict() was; for its load_state_dict()

    @torch.no_grad()
    def restore_model(self, model: nn.Module) -> None:
        """Copies the weights into a model of the same shapes. CheckpointError, and nothing changed, for another."""
        own = _model_tensors(model)
        if own.keys() != self.model.keys():
            differing = min(own.keys() ^ self.model.keys())
            raise CheckpointError(
                f"{self.path} is of another model: {differing} is only {'here' if differing in own else 'there'}; "
                "resume with the recipe that wrote it"
            )
        for name, tensor in own.items():
            saved = self.model[name]
            if (saved.shape, saved.dtype) != (tensor.shape, tensor.dtype):
                raise CheckpointError(
                    f"{self.path} is of another model: {name} is {saved.dtype} {tuple(saved.shape)} there, "
                    f"{tensor.dtype} {tuple(tensor.shape)} here; resume with the recipe that wrote it"
                )
        for name, tensor in own.items():
            tensor.copy_(self.model[name])


class CheckpointStore:
    """The checkpoints of one run in one directory, of which the newest `keep` stay."""

    def __init__(self, directory: Path, run_id: str, *, keep: int = 3, events: Events | None = None) -> None:
        self.directory = directory
        self._run_id = run_id
        self._keep = keep
        self._events = events or Events()

    def write(self, model: nn.Module, optimizer_state: Mapping[str, Any], epoch: int) -> Path | None:
        """Writes the model and its optimizer's `state_dict()`; older checkpoints beyond `keep` go.

        Neither may change meanwhile. None when the disk is full or cannot be written to: a warning is emitted,
        nothing half is left, and training goes on.
        """
        place = self.directory / f"epoch-{epoch:06d}"
        partial = self.directory / f".{place.name}-{os.getpid()}"
        try:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
            self._fill(partial, model, optimizer_state, epoch)
            _replace(place, partial)
        except (OSError, safetensors.SafetensorError) as error:
            shutil.rmtree(partial, ignore_errors=True)
            text = f"no checkpoint of epoch {epoch} in {self.directory} ({error}); training goes on without it"
            logger.warning(text)
            self._events.emit(Noticed("warning", text))
            return None
        self._remove_old()
        size = sum(file.stat().st_size for file in place.iterdir())
        self._events.emit(CheckpointWritten(epoch, str(place), size))
        return place

    def latest(self) -> Path | None:
        """The newest checkpoint, None when there is none yet."""
        found = self._all()
        return found[-1] if found else None

    def _all(self) -> list[Path]:
        if not self.directory.is_dir():
            return []
        numbered = [(int(m[1]), path) for path in self.directory.iterdir() if (m := _NAME.fullmatch(path.name))]
        return [path for _, path in sorted(numbered)]

    def _fill(self, directory: Path, model: nn.Module, optimizer_state: Mapping[str, Any], epoch: int) -> None:
        statistics: dict[str, Tensor] = {}
        structure = flatten(optimizer_state, statistics)
        _save(_model_tensors(model), directory / MODEL)
        _save(statistics, directory / TRAINING)
        config: Any = getattr(model, "config", None)
        if hasattr(config, "to_json_string"):
            (directory / CONFIG).write_text(config.to_json_string(), encoding="utf-8")
        manifest = {
            "format": FORMAT,
            "run_id": self._run_id,
            "epoch": epoch,
            "optimizer": structure,
            "sha256": {file.name: _digest(file) for file in sorted(directory.iterdir())},
        }
        (directory / MANIFEST).write_text(json.dumps(manifest), encoding="utf-8")
        for file in [*directory.iterdir(), directory]:
            _flush(file)

    def _remove_old(self) -> None:
        for path in self._all()[: -self._keep]:
            shutil.rmtree(path, ignore_errors=True)
        for path in self.directory.glob(".epoch-*-*"):
            # Left by a process that was killed while it wrote.
            if not _is_running(int(path.name.rpartition("-")[2])):
                shutil.rmtree(path, ignore_errors=True)


def find_checkpoint(path: Path) -> Path:
    """A checkpoint itself, or the newest one in a directory that holds some, at any depth below it.

    So `--resume` may name a checkpoint, a peer's directory or the whole output_dir. CheckpointError when none is there.
    """
    if (path / MANIFEST).is_file():
        return path
    found = [file.parent for file in path.rglob(MANIFEST) if _NAME.fullmatch(file.parent.name)]
    if not found:
        raise CheckpointError(f"there is no checkpoint in {path}; give a directory that holds one")
    return max(found, key=lambda place: (int(place.name.partition("-")[2]), place.stat().st_mtime))


def load_checkpoint(path: Path, run_id: str | None = None) -> Checkpoint:
    """Reads a checkpoint and checks every file against its hash.

    Raises CheckpointError when it is damaged, of another format, or (with `run_id`) of another run.
    """
    manifest = _read_manifest(path)
    if run_id is not None and manifest["run_id"] != run_id:
        raise CheckpointError(f"{path} belongs to the run {manifest['run_id']!r}, not to {run_id!r}")
    for name, digest in manifest["sha256"].items():
        _check_file(path / Path(name).name, digest)
    try:
        optimizer = unflatten(manifest["optimizer"], load_file(path / TRAINING))
        model = load_file(path / MODEL)
    except (OSError, ValueError, KeyError, TypeError, safetensors.SafetensorError) as error:
        raise CheckpointError(f"{path} is damaged: {error}; use an older checkpoint") from error
    return Checkpoint(path, manifest["run_id"], manifest["epoch"], model, optimizer)


def _read_manifest(path: Path) -> dict[str, Any]:
    try:
        manifest = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{path} is no checkpoint: it has no {MANIFEST}") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path / MANIFEST} cannot be read: {error}; use an older checkpoint") from error
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise CheckpointError(f"{path} is a checkpoint of another format; this version reads format {FORMAT}")
    if not isinstance(manifest.get("sha256"), dict) or not {MODEL, TRAINING} <= manifest["sha256"].keys():
        raise CheckpointError(f"{path / MANIFEST} is damaged: it does not list its files; use an older checkpoint")
    kinds = {"run_id": str, "epoch": int, "optimizer": dict}
    for key, kind in kinds.items():
        if not isinstance(manifest.get(key), kind):
            raise CheckpointError(f"{path / MANIFEST} is damaged: {key} is missing; use an older checkpoint")
    return manifest


def _check_file(file: Path, digest: str) -> None:
    try:
        found = _digest(file)
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error.strerror}; use an older checkpoint") from error
    if found != digest:
        raise CheckpointError(f"{file} is damaged: its content is not what was written; use an older checkpoint")


def _model_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Frozen parameters and saved buffers too; of tensors that share memory (tied weights) only the first name."""
    found: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in seen:
            seen.add(id(tensor))
            found[name] = tensor.detach()
    return found


def _save(tensors: Mapping[str, Tensor], file: Path) -> None:
    # Copies, because safetensors refuses tensors that share memory with each other.
    copies = {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in tensors.items()}
    save_file(copies, file, metadata={"format": "pt"})


def _digest(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


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
