"""Checkpoints without tensors: a few files that their manifest lists, as a store would have written them."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

from swarmcli.checkpoints.directory import CheckpointDirectory
from swarmcli.checkpoints.layout import DIGEST, FORMAT, MANIFEST, MODEL, TRAINING, manifest_digest


def fill(partial: Path, epoch: int, run_id: str = "run", content: bytes = b"weights") -> Path:
    partial.mkdir(parents=True)
    files = {MODEL: content, TRAINING: b"statistics"}
    for name, data in files.items():
        (partial / name).write_bytes(data)
    manifest = {
        "format": FORMAT,
        "run_id": run_id,
        "epoch": epoch,
        "optimizer": {},
        "sha256": {name: hashlib.sha256(data).hexdigest() for name, data in files.items()},
        "bytes": {name: len(data) for name, data in files.items()},
    }
    (partial / MANIFEST).write_text(json.dumps({**manifest, DIGEST: manifest_digest(manifest)}))
    return partial


def put(checkpoints: CheckpointDirectory, epoch: int, loss: float | None = None, run_id: str = "run") -> Path:
    place = checkpoints.put(fill(checkpoints.partial(epoch), epoch, run_id))
    os.utime(place / MANIFEST, (1_790_000_000 + epoch, 1_790_000_000 + epoch))
    if loss is not None:
        checkpoints.remember_loss(place, loss, 256)
    return place
