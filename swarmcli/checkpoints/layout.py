"""Checkpoints on disk: the model as transformers reads it, and beside it what training needs to go on.

<directory>/latest         a link to the one that was written last
<directory>/best           a link to the one with the lowest loss, if any was evaluated
<directory>/keep.json      which ones stay, for a look at the directory without its recipe
<directory>/epoch-000012/
    model.safetensors      parameters and buffers by name; with config.json a directory that base_model can name
    adapter_model.safetensors, adapter_config.json
                           in its place, of a run that trains an adapter; config.json is the base's then
    model.ema.safetensors, adapter_model.ema.safetensors
                           the same with weights averaged over epochs, of a run with ema_decay; transformers reads it
                           with variant="ema"
    training.safetensors   tensors of the optimizer's state
    shards/                the statistics of a site with a sharded optimizer, where a former version wrote them
    tokenizer.json, …      what the task needs beside the model, and README.md, a model card
    evaluation.json        the loss on text that nobody trains on, once it was measured
    checkpoint.json        run, epoch, the rest of the optimizer's state (lineage, schedule), a hash of each file
                           that training goes on from

This package finds, lists, checks and removes them, and knows nothing of tensors; swarmcli.training reads and writes
what is in them.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from swarmcli.errors import CheckpointError

FORMAT = 1
SHARDED_FORMAT = 2  # former versions': a site's statistics are in SHARDS
MANIFEST = "checkpoint.json"
MODEL = "model.safetensors"
ADAPTER = "adapter_model.safetensors"  # in place of MODEL if only an adapter is trained …
ADAPTER_CONFIG = "adapter_config.json"  # … and its config; the library peft reads both
TRAINING = "training.safetensors"
CONFIG = "config.json"
SHARDS = "shards"
EVALUATION = "evaluation.json"
LATEST = "latest"
BEST = "best"
OWNER = "owner.json"  # the signature of the run's owner, if there is one
DIGEST = "digest"  # over the rest of checkpoint.json

NAME = re.compile(r"epoch-(\d{6,})")
# A checkpoint that another of its epoch replaces can be read under this name until the other one has its name.
REPLACED = ".replaced"
_READABLE = re.compile(rf"{NAME.pattern}({re.escape(REPLACED)})?")
# what a link may name, also while a save goes on
_LINKED = re.compile(rf"\.?{NAME.pattern}(-\d+|{re.escape(REPLACED)})?")


def find_checkpoint(path: Path) -> Path:
    """Returns a checkpoint itself, or the newest one at any depth below a directory.

    So `--resume` may name a checkpoint, the link to one, a peer's directory or the whole output_dir. Raises
    CheckpointError when there is none.
    """
    if path.name in (LATEST, BEST):
        path = _followed(path)
    if (path / MANIFEST).is_file():
        return path
    found = checkpoints_below(path)
    if not found:
        raise CheckpointError(f"there is no checkpoint in {path}; give a directory that holds one")
    return found[0]


def checkpoints_below(path: Path, run_id: str | None = None) -> list[Path]:
    """Returns the checkpoints below a directory, at any depth, the newest first; with `run_id`, without those that say
    that they are of another run. Whether they can be read shows when they are loaded."""
    # Unlike Path.rglob, this goes on if a directory is removed meanwhile, as a peer that writes checkpoints does.
    places = (Path(directory) for directory, _, names in os.walk(path) if MANIFEST in names)
    found = [place for place in places if _READABLE.fullmatch(place.name)]
    if run_id is not None:
        found = [place for place in found if _run_of(place) in (run_id, None)]
    return newest_first(found)


def newest_first(found: Iterable[Path]) -> list[Path]:
    """Sorts checkpoints by their epochs, those of one epoch by when they were written."""
    return sorted(found, key=lambda place: (epoch_of(place), _changed_at(place)), reverse=True)


def _changed_at(place: Path) -> float:
    """Returns 0 for a checkpoint that is gone."""
    try:
        return place.stat().st_mtime
    except OSError:
        return 0.0


def epoch_of(place: Path) -> int:
    """Returns the epoch of a checkpoint, by the name of its directory. Raises CheckpointError."""
    found = _LINKED.fullmatch(place.name)
    if found is None:
        raise CheckpointError(f"{place} is not called like a checkpoint; name it epoch- and six digits")
    return int(found[1])


def _run_of(place: Path) -> str | None:
    try:
        return str(read_manifest(place)["run_id"])
    except CheckpointError:
        return None


def _followed(link: Path) -> Path:
    """Returns the checkpoint that a link names now, so that all is read from one checkpoint, even if the link moves
    meanwhile."""
    if not link.is_file():
        return link.resolve()
    try:  # without symbolic links, it is a file that holds the name
        with link.open(encoding="utf-8") as file:
            name = file.read(100).strip()
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{link} cannot be read: {error}; name a checkpoint beside it") from error
    if not _LINKED.fullmatch(name):
        raise CheckpointError(f"{link} names no checkpoint; name one beside it")
    return link.with_name(name)


def read_manifest(path: Path) -> dict[str, Any]:
    try:
        manifest = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{path} is no checkpoint: it has no {MANIFEST}") from None
    except (OSError, ValueError, RecursionError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is damaged"
        raise CheckpointError(f"{path / MANIFEST} cannot be read: {why}; use an older checkpoint") from error
    digest = manifest.pop(DIGEST, None) if isinstance(manifest, dict) else None
    if digest not in (None, manifest_digest(manifest)):  # earlier versions wrote none
        raise CheckpointError(
            f"{path / MANIFEST} is damaged: its content is not what was written; use an older checkpoint"
        )
    if not isinstance(manifest, dict) or manifest.get("format") not in (FORMAT, SHARDED_FORMAT):
        raise CheckpointError(
            f"{path} is a checkpoint of another format; this version reads formats {FORMAT} and {SHARDED_FORMAT}"
        )
    listed = manifest.get("sha256")
    if not isinstance(listed, dict) or TRAINING not in listed or not {MODEL, ADAPTER} & listed.keys():
        raise CheckpointError(f"{path / MANIFEST} is damaged: it does not list its files; use an older checkpoint")
    kinds = {"run_id": str, "epoch": int, "optimizer": dict}
    if manifest["format"] == SHARDED_FORMAT:
        kinds["shards"] = str
    for key, kind in kinds.items():
        if not isinstance(manifest.get(key), kind):
            raise CheckpointError(f"{path / MANIFEST} is damaged: {key} is missing; use an older checkpoint")
    return manifest


def position_of(path: Path, run_id: str) -> tuple[int, int, bytes, bytes]:
    """Returns epoch, samples, lineage and SHA-256 of the parameters of a checkpoint. Raises CheckpointError."""
    manifest = read_manifest(path)
    if manifest["run_id"] != run_id:
        raise CheckpointError(f"{path} belongs to the run {manifest['run_id']!r}, not to {run_id!r}")
    try:
        swarm = manifest["optimizer"]["swarm"]
        hashes = bytes.fromhex(swarm["lineage"]), bytes.fromhex(swarm["parameters"])
        return int(swarm["epoch"]), int(swarm["samples_seen"]), *hashes
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path / MANIFEST} does not say which position it is of: {error}") from error


def weights_file(manifest: Mapping[str, Any]) -> str:
    """Returns the name of the file with what is trained."""
    return ADAPTER if ADAPTER in manifest["sha256"] else MODEL


def averaged_file(name: str) -> str:
    """Returns the name of the file beside MODEL or ADAPTER with the average over epochs, as transformers names such a
    variant."""
    return name.replace(".safetensors", ".ema.safetensors")


def check_files(path: Path, manifest: Mapping[str, Any]) -> None:
    """Reads the files that a manifest lists. Raises CheckpointError for one that is not what was written."""
    for name, digest in manifest["sha256"].items():
        file = path / Path(name).name
        try:
            found = file_digest(file)
        except (OSError, ValueError) as error:  # ValueError: no file can have such a name
            why = getattr(error, "strerror", None) or error
            raise CheckpointError(f"{file} cannot be read: {why}; use an older checkpoint") from error
        if found != digest:
            raise CheckpointError(f"{file} is damaged: its content is not what was written; use an older checkpoint")


def manifest_digest(manifest: Mapping[str, Any]) -> str:
    """Returns SHA-256 over the content of a checkpoint.json, without the digest itself."""
    return hashlib.sha256(json.dumps(manifest).encode()).hexdigest()


def file_digest(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
