"""Writes and reads checkpoints; swarmcli.checkpoints.layout says what lies where in one.

A checkpoint appears whole or not at all: it is written beside its place, flushed to the disk, read back, and renamed.
"""

from __future__ import annotations

import copy
import hashlib
import json
import math
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from swarmcli.checkpoints.directory import CheckpointDirectory, Keep
from swarmcli.checkpoints.layout import (
    ADAPTER,
    ADAPTER_CONFIG,
    CONFIG,
    DIGEST,
    FORMAT,
    MANIFEST,
    MODEL,
    OWNER,
    SHARDED_FORMAT,
    SHARDS,
    TRAINING,
    averaged_file,
    check_files,
    epoch_of,
    manifest_digest,
    read_manifest,
    weights_file,
)
from swarmcli.errors import CheckpointError
from swarmcli.events import CheckpointWritten, Events, Noticed
from swarmcli.files.durable import flush, forget, write_file
from swarmcli.files.flat import flatten, unflatten
from swarmcli.files.old_shards import read_shards
from swarmcli.files.tensor_file import TensorFile, write_tensors
from swarmcli.training.adapters import adapter_text, is_adapted
from swarmcli.words import format_size


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint that was read and found whole. Tensors are on the CPU."""

    path: Path
    run_id: str
    epoch: int
    model: dict[str, Tensor]  # parameters and buffers by name, or an adapter's as peft saves it
    optimizer: dict[str, Any]  # what the optimizer's state_dict() was; for its load_state_dict()

    @torch.no_grad()
    def restore_model(self, model: nn.Module) -> None:
        """Copies the weights into a model of the same shapes. For another model it raises CheckpointError and changes
        nothing."""
        own = model_tensors(model)
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


def load_checkpoint(path: Path, run_id: str | None = None) -> Checkpoint:
    """Reads a checkpoint and checks every file against its hash. The optimizer's tensors are views of the files.

    Raises CheckpointError when it is damaged, of another format, or (with `run_id`) of another run.
    """
    manifest = read_manifest(path)
    if run_id is not None and manifest["run_id"] != run_id:
        raise CheckpointError(f"{path} belongs to the run {manifest['run_id']!r}, not to {run_id!r}")
    check_files(path, manifest)
    try:
        with TensorFile(path / TRAINING) as file:
            optimizer = unflatten(manifest["optimizer"], file.tensor)
        model = load_file(path / weights_file(manifest))
    except (OSError, ValueError, KeyError, TypeError, RecursionError, safetensors.SafetensorError) as error:
        raise CheckpointError(f"{path} is damaged: {error}; use an older checkpoint") from error
    if manifest["format"] == SHARDED_FORMAT:
        optimizer["state"] = read_shards(path / SHARDS, manifest["shards"])
    if isinstance(optimizer.get("swarm"), dict) and (signature := _owners_signature(path)):
        optimizer["swarm"]["owner"] = signature
    return Checkpoint(path, manifest["run_id"], manifest["epoch"], model, optimizer)


def _owners_signature(path: Path) -> str:
    """Returns the signature in hexadecimal, "" if nobody has signed. Peers check whether it is the owner's."""
    try:
        return str(json.loads((path / OWNER).read_text(encoding="utf-8"))["signature"])
    except FileNotFoundError:
        return ""
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path / OWNER} cannot be read: {error}; remove it, or sign again") from error


def saved_buffers(model: nn.Module) -> list[Tensor]:
    """Returns the buffers that a model saves with its weights, such as batch norm's statistics; of an adapted model
    none, since its buffers are its base's."""
    if is_adapted(model):
        return []
    parameters = {id(parameter) for parameter in model.parameters()}
    saved = model.state_dict(keep_vars=True).values()
    return list({id(each): each for each in saved if id(each) not in parameters}.values())


def model_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Returns parameters, frozen ones too, and saved buffers by name; of tensors that share memory (tied weights) only
    the first name. Of an adapted model: the adapter alone, by the names under which peft saves it."""
    if is_adapted(model):
        from peft import get_peft_model_state_dict

        return {
            name: tensor.detach()
            for name, tensor in sorted(get_peft_model_state_dict(model, save_embedding_layers=False).items())
        }
    found: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in seen:
            seen.add(id(tensor))
            found[name] = tensor.detach()
    return found


class CheckpointStore:
    """The checkpoints of one run in one directory. `Keep` says which of them stay."""

    def __init__(
        self,
        directory: Path,
        run_id: str,
        *,
        keep: Keep | None = None,
        events: Events | None = None,
        describe: Callable[[Path, int, int | None], object] | None = None,
        room: Callable[[], float] = lambda: math.inf,
        averages: Callable[[nn.Module, Mapping[str, Any]], Sequence[tuple[Tensor, Tensor]]] = lambda model, state: (),
    ) -> None:
        """`room()`: bytes that may still be written within the user's limit. `averages`: see `averages_in`.

        `describe(directory, epoch, samples)` adds files for users of the model, a tokenizer for example. They are not
        hashed, since users may edit them. If `describe` raises, the checkpoint is written without them, and a warning
        is emitted.
        """
        self.directory = directory
        self._describe = describe
        self._room = room
        self._averages = averages
        self._run_id = run_id
        self._events = events or Events()
        self._told: tuple[type[Exception], int | None] | None = None  # why the last one was not written
        self.checkpoints = CheckpointDirectory(
            directory, keep or Keep(), lambda text: self._events.emit(Noticed("warning", text))
        )

    def write(self, model: nn.Module, optimizer_state: Mapping[str, Any], epoch: int) -> Path | None:
        """Writes the model and its optimizer's `state_dict()`, reads them back, and removes older checkpoints.

        Neither may change meanwhile. Returns None if a disk is full, cannot be written to or holds something else than
        was written: then a warning is emitted (once for the same reason in a row), nothing half-written is left, and
        training goes on.
        """
        partial = self.checkpoints.partial(epoch)
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            self.checkpoints.mend()
            partial.mkdir()
            self._fill(partial, model, optimizer_state, epoch)
            place = self.checkpoints.put(partial)
        except (OSError, CheckpointError) as error:
            reason = type(error), getattr(error, "errno", None)
            if reason != self._told:
                text = f"the checkpoint of epoch {epoch} was not written to {self.directory} ({error})"
                self._events.emit(Noticed("warning", f"{text}; later ones that fail so are not told of"))
            self._told = reason
            return None
        finally:
            shutil.rmtree(partial, ignore_errors=True)
        self._told = None
        self.checkpoints.prune(place)
        size = sum(file.stat().st_size for file in place.rglob("*") if file.is_file())
        self._events.emit(CheckpointWritten(epoch, str(place), size))
        return place

    def remember_loss(self, place: Path, loss: float, samples: int, metrics: Mapping[str, float] | None = None) -> bool:
        """Records the loss of a checkpoint's evaluation, and returns whether it is the best one now. May remove
        others."""
        best = place.is_dir() and self.checkpoints.remember_loss(place, loss, samples, metrics)
        self.checkpoints.prune()
        return best

    @torch.no_grad()
    def put_averages(self, model: nn.Module, optimizer_state: Mapping[str, Any]) -> None:
        """Replaces the model's weights by their averages over epochs, if the optimizer's `state_dict()` has any."""
        for parameter, average in self._averages(model, optimizer_state):
            parameter.copy_(average)

    def remove_after(self, epoch: int) -> None:
        """Removes the checkpoints of later epochs: they belong to a lineage that this peer has left."""
        self.checkpoints.remove(path for path in self.checkpoints.all() if epoch_of(path) > epoch)

    def _make_room(self, nbytes: int) -> None:
        """Removes older checkpoints, but not the newest, until `nbytes` may be written. Raises CheckpointError."""
        older = self.checkpoints.all()[:-1]
        while (room := self._room()) < nbytes and older:
            self.checkpoints.remove([older.pop(0)])
        if room < nbytes:
            raise CheckpointError(
                f"it takes {format_size(nbytes)}, and your limit for the disk leaves {format_size(max(0.0, room))}; "
                "`swarm limits set disk=…` changes that"
            )

    def _fill(
        self,
        directory: Path,
        model: nn.Module,
        optimizer_state: Mapping[str, Any],
        epoch: int,
    ) -> None:
        statistics: dict[str, Tensor] = {}
        structure = flatten(optimizer_state, statistics, "optimizer")
        weights, texts = ADAPTER if is_adapted(model) else MODEL, _configs(model)
        files = {weights: model_tensors(model), TRAINING: statistics}
        if averages := {each.data_ptr(): average for each, average in self._averages(model, optimizer_state)}:
            averaged = {name: averages.get(each.data_ptr(), each) for name, each in files[weights].items()}
            files[averaged_file(weights)] = averaged
        self._make_room(sum(tensor.nbytes for tensors in files.values() for tensor in tensors.values()))
        # Hashed on their way to the disk, so that reading back finds what the disk changed.
        hashes = {name: hashlib.sha256() for name in (*files, *texts)}
        for name, tensors in files.items():
            write_tensors(directory / name, tensors, digest=hashes[name])
        for name, text in texts.items():
            write_file(directory / name, text.encode(), digest=hashes[name])
        manifest: dict[str, Any] = {
            "format": FORMAT,
            "run_id": self._run_id,
            "epoch": epoch,
            "optimizer": structure,
            "sha256": {file.name: hashes[file.name].hexdigest() for file in sorted(directory.iterdir())},
            "bytes": {file.name: file.stat().st_size for file in sorted(directory.iterdir())},
        }
        manifest[DIGEST] = manifest_digest(manifest)
        write_file(directory / MANIFEST, json.dumps(manifest).encode())
        if self._describe is not None:
            try:
                self._describe(directory, epoch, optimizer_state.get("swarm", {}).get("samples_seen"))
            except Exception as error:  # tokenizers raise many kinds, some of them plain Exception
                text = f"the checkpoint of epoch {epoch} lacks its tokenizer or model card: {error}"
                self._events.emit(Noticed("warning", text))
        for file in [*directory.iterdir(), directory]:
            flush(file)
        for name in (*manifest["sha256"], MANIFEST):
            forget(directory / name)
        check_files(directory, read_manifest(directory))


def _configs(model: nn.Module) -> dict[str, str]:
    """Returns the texts of configs by their file names; {} for a model that is not of transformers. A config names the
    model's class and turns on the cache for generating, as the model's users want it. For an adapted model it is the
    base's, and a second text is the adapter's."""
    bare: Any = model.get_base_model() if is_adapted(model) else model  # type: ignore[operator]  # peft's
    config: Any = copy.copy(getattr(bare, "config", None))
    if not hasattr(config, "to_json_string"):
        return {}
    config.architectures = [type(bare).__name__]
    config.use_cache = True
    if getattr(config, "dtype", None) is not None:  # perhaps of the weights that training began with
        config.dtype = bare.dtype
    config.name_or_path = ""  # where the weights lay on this machine is nobody's business
    texts = {CONFIG: str(config.to_json_string())}
    return texts if bare is model else {**texts, ADAPTER_CONFIG: adapter_text(model)}
