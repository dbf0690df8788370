"""Checkpoints on disk: the model as transformers reads it, and beside it what training needs to go on.

<directory>/latest         a link to the one that was written last
<directory>/epoch-000012/
    model.safetensors      parameters and buffers by name; with config.json a directory that base_model can name
    training.safetensors   tensors of the optimizer's state
    shards/                of a site with a sharded optimizer: its statistics, a file per rank
    tokenizer.json, …      what the task needs beside the model, and README.md, a model card
    checkpoint.json        run, epoch, the rest of the optimizer's state (lineage, schedule), a hash of each file
                           that training goes on from
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import safetensors
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from swarmcli.errors import CheckpointError
from swarmcli.files.flat import unflatten
from swarmcli.files.tensor_file import TensorFile

if TYPE_CHECKING:
    from swarmcli.sharding.files.save import Manifest

FORMAT = 1
SHARDED_FORMAT = 2
MANIFEST = "checkpoint.json"
MODEL = "model.safetensors"
TRAINING = "training.safetensors"
CONFIG = "config.json"
SHARDS = "shards"
LATEST = "latest"
OWNER = "owner.json"  # the signature of the run's owner, if there is one
DIGEST = "digest"  # of the rest of checkpoint.json

NAME = re.compile(r"epoch-(\d{6,})")


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


def find_checkpoint(path: Path) -> Path:
    """A checkpoint itself, or the newest one in a directory that holds some, at any depth below it.

    So `--resume` may name a checkpoint, the link to one, a peer's directory or the whole output_dir. CheckpointError
    when none is there.
    """
    if path.name == LATEST:
        path = _followed(path)
    if (path / MANIFEST).is_file():
        return path
    found = checkpoints_below(path)
    if not found:
        raise CheckpointError(f"there is no checkpoint in {path}; give a directory that holds one")
    return found[0]


def checkpoints_below(path: Path, run_id: str | None = None) -> list[Path]:
    """The checkpoints below a directory, at any depth, the newest first; with `run_id` without those that say that they
    are of another run. Whether they can be read shows when they are loaded."""
    found = [file.parent for file in path.rglob(MANIFEST) if NAME.fullmatch(file.parent.name)]
    if run_id is not None:
        found = [place for place in found if _run_of(place) in (run_id, None)]
    return sorted(found, key=lambda place: (epoch_of(place), place.stat().st_mtime), reverse=True)


def epoch_of(place: Path) -> int:
    """The epoch of a checkpoint, by the name of its directory."""
    return int(place.name.partition("-")[2])


def _run_of(place: Path) -> str | None:
    try:
        return str(read_manifest(place)["run_id"])
    except CheckpointError:
        return None


def _followed(link: Path) -> Path:
    """What `latest` names now: what is read has to be one checkpoint, also when the link moves on meanwhile."""
    if not link.is_file():
        return link.resolve()
    try:  # without symbolic links it is a file that holds the name
        with link.open(encoding="utf-8") as file:
            name = file.read(100).strip()
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{link} cannot be read: {error}; name a checkpoint beside it") from error
    if not NAME.fullmatch(name):
        raise CheckpointError(f"{link} names no checkpoint; name one beside it")
    return link.with_name(name)


def load_checkpoint(path: Path, run_id: str | None = None, *, whole: bool = True) -> Checkpoint:
    """Reads a checkpoint, of one process or of a site, and checks every file against its hash.

    Without `whole` the optimizer's statistics ("state") are left out, for a site whose ranks read a share each.
    Raises CheckpointError when it is damaged, of another format, or (with `run_id`) of another run.
    """
    manifest = read_manifest(path)
    if run_id is not None and manifest["run_id"] != run_id:
        raise CheckpointError(f"{path} belongs to the run {manifest['run_id']!r}, not to {run_id!r}")
    for name, digest in manifest["sha256"].items():
        _check_file(path / Path(name).name, digest)
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


def read_manifest(path: Path) -> dict[str, Any]:
    try:
        manifest = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{path} is no checkpoint: it has no {MANIFEST}") from None
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path / MANIFEST} cannot be read: {error}; use an older checkpoint") from error
    digest = manifest.pop(DIGEST, None) if isinstance(manifest, dict) else None
    if digest not in (None, manifest_digest(manifest)):  # earlier versions wrote none
        raise CheckpointError(
            f"{path / MANIFEST} is damaged: its content is not what was written; use an older checkpoint"
        )
    if not isinstance(manifest, dict) or manifest.get("format") not in (FORMAT, SHARDED_FORMAT):
        raise CheckpointError(
            f"{path} is a checkpoint of another format; this version reads formats {FORMAT} and {SHARDED_FORMAT}"
        )
    if not isinstance(manifest.get("sha256"), dict) or not {MODEL, TRAINING} <= manifest["sha256"].keys():
        raise CheckpointError(f"{path / MANIFEST} is damaged: it does not list its files; use an older checkpoint")
    kinds = {"run_id": str, "epoch": int, "optimizer": dict}
    if manifest["format"] == SHARDED_FORMAT:
        kinds["shards"] = str
    for key, kind in kinds.items():
        if not isinstance(manifest.get(key), kind):
            raise CheckpointError(f"{path / MANIFEST} is damaged: {key} is missing; use an older checkpoint")
    return manifest


def position_of(path: Path, run_id: str) -> tuple[int, int, bytes, bytes]:
    """Epoch, samples, lineage and SHA-256 of the parameters of a checkpoint. Raises CheckpointError."""
    manifest = read_manifest(path)
    if manifest["run_id"] != run_id:
        raise CheckpointError(f"{path} belongs to the run {manifest['run_id']!r}, not to {run_id!r}")
    try:
        swarm = manifest["optimizer"]["swarm"]
        hashes = bytes.fromhex(swarm["lineage"]), bytes.fromhex(swarm["parameters"])
        return int(swarm["epoch"]), int(swarm["samples_seen"]), *hashes
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path / MANIFEST} does not say which position it is of: {error}") from error


def _owners_signature(path: Path) -> str:
    """In hexadecimal; empty if nobody has signed it. Whether it is the owner's is for peers to find out."""
    try:
        return str(json.loads((path / OWNER).read_text(encoding="utf-8"))["signature"])
    except FileNotFoundError:
        return ""
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path / OWNER} cannot be read: {error}; remove it, or sign again") from error


def _check_file(file: Path, digest: str) -> None:
    try:
        found = file_digest(file)
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error.strerror}; use an older checkpoint") from error
    if found != digest:
        raise CheckpointError(f"{file} is damaged: its content is not what was written; use an older checkpoint")


def model_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Frozen parameters and saved buffers too; of tensors that share memory (tied weights) only the first name."""
    found: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in seen:
            seen.add(id(tensor))
            found[name] = tensor.detach()
    return found


def manifest_digest(manifest: Mapping[str, Any]) -> str:
    """SHA-256 over the content of a checkpoint.json, without the digest itself."""
    return hashlib.sha256(json.dumps(manifest).encode()).hexdigest()


def file_digest(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
