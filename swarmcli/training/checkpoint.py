"""Reading a checkpoint; what lies where in one says swarmcli.checkpoints.layout."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import safetensors
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from swarmcli.checkpoints.layout import (
    MANIFEST,
    MODEL,
    OWNER,
    SHARDED_FORMAT,
    SHARDS,
    TRAINING,
    check_files,
    read_manifest,
)
from swarmcli.errors import CheckpointError
from swarmcli.files.flat import unflatten
from swarmcli.files.tensor_file import TensorFile

if TYPE_CHECKING:
    from swarmcli.sharding.files.save import Manifest


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


def load_checkpoint(path: Path, run_id: str | None = None, *, whole: bool = True) -> Checkpoint:
    """Reads a checkpoint, of one process or of a site, and checks every file against its hash.

    Without `whole` the optimizer's statistics ("state") are left out, for a site whose ranks read a share each.
    Raises CheckpointError when it is damaged, of another format, or (with `run_id`) of another run.
    """
    manifest = read_manifest(path)
    if run_id is not None and manifest["run_id"] != run_id:
        raise CheckpointError(f"{path} belongs to the run {manifest['run_id']!r}, not to {run_id!r}")
    check_files(path, manifest)
    structure = manifest["optimizer"] if whole else {**manifest["optimizer"], "state": {}}
    try:
        with TensorFile(path / TRAINING) as file:
            optimizer = unflatten(structure, file.tensor)
        model = load_file(path / MODEL)
    except (OSError, ValueError, KeyError, TypeError, RecursionError, safetensors.SafetensorError) as error:
        raise CheckpointError(f"{path} is damaged: {error}; use an older checkpoint") from error
    if whole and manifest["format"] == SHARDED_FORMAT:
        from swarmcli.sharding.files.save import read_whole

        optimizer["state"] = read_whole(path / SHARDS, read_shards(path, manifest))
    if isinstance(optimizer.get("swarm"), dict) and (signature := _owners_signature(path)):
        optimizer["swarm"]["owner"] = signature
    return Checkpoint(path, manifest["run_id"], manifest["epoch"], model, optimizer)


def read_shards(path: Path, manifest: Mapping[str, Any]) -> Manifest:
    """What a sharded checkpoint says about its shards. CheckpointError when they are not those that belong to it."""
    # Imported here because few processes ever read a sharded checkpoint, and it takes torch.distributed.
    from swarmcli.sharding.files.save import read_manifest

    shards, digest = read_manifest(path / SHARDS)
    if digest.hex() != manifest["shards"]:
        raise CheckpointError(
            f"{path / SHARDS} belongs to another checkpoint, of epoch {shards.epoch}, than {path / MANIFEST}; "
            "use an older checkpoint"
        )
    return shards


def _owners_signature(path: Path) -> str:
    """In hexadecimal; empty if nobody has signed it. Whether it is the owner's is for peers to find out."""
    try:
        return str(json.loads((path / OWNER).read_text(encoding="utf-8"))["signature"])
    except FileNotFoundError:
        return ""
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path / OWNER} cannot be read: {error}; remove it, or sign again") from error


def saved_buffers(model: nn.Module) -> list[Tensor]:
    """The buffers that a model saves with its weights, batch norm's for example: what is learned beside parameters."""
    parameters = {id(parameter) for parameter in model.parameters()}
    saved = model.state_dict(keep_vars=True).values()
    return list({id(each): each for each in saved if id(each) not in parameters}.values())


def model_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Frozen parameters and saved buffers too; of tensors that share memory (tied weights) only the first name."""
    found: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in seen:
            seen.add(id(tensor))
            found[name] = tensor.detach()
    return found
