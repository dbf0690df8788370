"""Checkpoints on disk: the model as transformers reads it, and beside it what training needs to go on.

    <directory>/epoch-000012/
        model.safetensors      parameters and buffers by name; with config.json a directory that base_model can name
        training.safetensors   optimizer statistics and extra tensors
        checkpoint.json        run, epoch, lineage, settings of optimizer and scheduler, a hash of each file

A checkpoint appears whole or not at all: it is written beside its place, flushed to the disk, and renamed.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from swarmcli.errors import CheckpointError
from swarmcli.events import CheckpointWritten, Events, Noticed
from swarmcli.optim.training_state import CapturedState
from swarmcli.training.portable import from_json, to_json

logger = logging.getLogger(__name__)

FORMAT = 1
MANIFEST = "checkpoint.json"
MODEL = "model.safetensors"
TRAINING = "training.safetensors"
CONFIG = "config.json"

_NAME = re.compile(r"epoch-(\d{6,})")
_PARAMETER = "parameter/"


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint that was read and found whole. Tensors are on the CPU."""

    path: Path
    run_id: str
    metadata: dict[str, Any]  # of the CapturedState
    model: dict[str, Tensor]  # parameters and buffers by name
    training: dict[str, Tensor]  # the other tensors of the CapturedState
    parameter_names: tuple[str, ...]  # in the optimizer's order

    @property
    def epoch(self) -> int:
        return int(self.metadata["epoch"])

    def captured(self, model: nn.Module, parameters: Sequence[Tensor]) -> CapturedState:
        """The state for an optimizer over `parameters` of `model`. CheckpointError when they are of other shapes."""
        names = parameter_names(model, parameters)
        if set(names) != set(self.parameter_names):
            differing = sorted(set(names) ^ set(self.parameter_names))
            raise CheckpointError(f"{self.path} is of another model: {differing[0]} is only in one of the two")
        if names != self.parameter_names:
            raise CheckpointError(f"{self.path} was written by an optimizer with its parameters in another order")
        for name, parameter in zip(names, parameters, strict=True):
            saved = self.model[name]
            if saved.shape != parameter.shape:
                raise CheckpointError(
                    f"{self.path} is of another model: {name} is {tuple(saved.shape)} there, "
                    f"{tuple(parameter.shape)} here; resume with the recipe that wrote it"
                )
        tensors = {f"{_PARAMETER}{index}": self.model[name] for index, name in enumerate(names)}
        return CapturedState(self.metadata, {**tensors, **self.training})


class CheckpointStore:
    """The checkpoints of one run in one directory, of which the newest `keep` stay."""

    def __init__(self, directory: Path, run_id: str, *, keep: int = 3, events: Events | None = None) -> None:
        self.directory = directory
        self._run_id = run_id
        self._keep = keep
        self._events = events or Events()

    def write(self, captured: CapturedState, model: nn.Module, parameters: Sequence[Tensor]) -> Path | None:
        """Writes a state of `model`, whose optimizer holds `parameters`; older checkpoints beyond `keep` go.

        `captured` has to be a clone: training may go on meanwhile. None when the disk is full or cannot be written
        to: a warning is emitted, nothing half is left, and training goes on.
        """
        epoch = int(captured.metadata["epoch"])
        place = self.directory / f"epoch-{epoch:06d}"
        partial = self.directory / f".{place.name}-{os.getpid()}"
        try:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
            self._fill(partial, captured, model, parameters)
            _replace(place, partial)
            self._remove_old()
        except (OSError, safetensors.SafetensorError) as error:
            shutil.rmtree(partial, ignore_errors=True)
            text = f"no checkpoint of epoch {epoch} in {self.directory} ({error}); training goes on without it"
            logger.warning(text)
            self._events.emit(Noticed("warning", text))
            return None
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

    def _fill(self, directory: Path, captured: CapturedState, model: nn.Module, parameters: Sequence[Tensor]) -> None:
        names = parameter_names(model, parameters)
        weights = _model_tensors(model) | {
            name: captured.tensors[f"{_PARAMETER}{index}"] for index, name in enumerate(names)
        }
        training = {name: tensor for name, tensor in captured.tensors.items() if not name.startswith(_PARAMETER)}
        _save(weights, directory / MODEL)
        _save(training, directory / TRAINING)
        config: Any = getattr(model, "config", None)
        if hasattr(config, "to_json_string"):
            (directory / CONFIG).write_text(config.to_json_string(), encoding="utf-8")
        manifest = {
            "format": FORMAT,
            "run_id": self._run_id,
            "metadata": to_json(captured.metadata),
            "parameters": names,
            "sha256": {file.name: _digest(file) for file in sorted(directory.iterdir())},
        }
        (directory / MANIFEST).write_text(json.dumps(manifest, indent=1), encoding="utf-8")
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
        model, training = load_file(path / MODEL), load_file(path / TRAINING)
        metadata = from_json(manifest["metadata"])
        names = tuple(map(str, manifest["parameters"]))
        if not isinstance(metadata["epoch"], int) or not set(names) <= set(model):
            raise ValueError("its parts do not belong together")
    except (OSError, ValueError, KeyError, TypeError, safetensors.SafetensorError) as error:
        raise CheckpointError(f"{path} is damaged: {error}; use an older checkpoint") from error
    return Checkpoint(path, manifest["run_id"], metadata, model, training, names)


def parameter_names(model: nn.Module, parameters: Sequence[Tensor]) -> tuple[str, ...]:
    """The names that an optimizer's parameters have in the model, in the optimizer's order."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return tuple(names[id(parameter)] for parameter in parameters)


def _read_manifest(path: Path) -> dict[str, Any]:
    try:
        manifest = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{path} is no checkpoint: it has no {MANIFEST}") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path / MANIFEST} cannot be read: {error}; use an older checkpoint") from error
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise CheckpointError(f"{path} is a checkpoint of another format; this version reads format {FORMAT}")
    kinds = {"run_id": str, "metadata": dict, "parameters": list, "sha256": dict}
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
            found[name] = tensor.detach().to("cpu", copy=True)
    return found


def _save(tensors: Mapping[str, Tensor], file: Path) -> None:
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, file, metadata={"format": "pt"})


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
