"""A site's sharded statistics as builds until 26d1bc3 wrote them into checkpoints; they are only read.

shards/complete.msgpack            SHA-256, then msgpack: which tensors belong to what, and a digest of each
shards/rank-00000.safetensors …    the tensors of each rank's share
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import msgspec

from swarmcli.errors import CheckpointError
from swarmcli.files.flat import unflatten
from swarmcli.files.tensor_file import TensorFile, digest_of


class ShardEntry(msgspec.Struct, frozen=True):
    """The statistics of one parameter."""

    statistics: dict[str, Any]  # flattened
    digests: dict[str, bytes]  # of its tensors, by their names in the rank's file


class ShardRecord(msgspec.Struct, frozen=True):
    """One rank's file."""

    rank: int
    entries: dict[int, ShardEntry]  # by the parameter's place in the parameter groups
    mark: str  # also in the file's metadata: other checkpoints have files of the same name
    host: str  # where it was written


class ShardManifest(msgspec.Struct, frozen=True):
    shards: list[ShardRecord]


def read_shards(directory: Path, digest: str) -> dict[int, dict[str, Any]]:
    """The statistics by parameter; tensors are views of the files. `digest`: of the manifest, in hexadecimal.

    Raises CheckpointError, which names the file, for one that is missing, damaged or of another checkpoint.
    """
    file = directory / "complete.msgpack"
    try:
        data = file.read_bytes()
        manifest = msgspec.msgpack.decode(data[32:], type=ShardManifest)
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{file} cannot be read: {error}; use an older checkpoint") from error
    if hashlib.sha256(data[32:]).hexdigest() != digest:
        raise CheckpointError(f"{file} is damaged, or belongs to another checkpoint; use an older one")
    state: dict[int, dict[str, Any]] = {}
    for record in manifest.shards:
        state.update(_read_shard(directory / f"rank-{record.rank:05d}.safetensors", record))
    return dict(sorted(state.items()))


def _read_shard(file: Path, record: ShardRecord) -> dict[int, dict[str, Any]]:
    if not file.exists():
        raise CheckpointError(f"{file} is missing: it was written on {record.host}; copy it from there")
    with TensorFile(file) as shard:
        if shard.mark != record.mark:
            raise CheckpointError(f"{file} belongs to another checkpoint; copy the right one from {record.host}")
        for entry in record.entries.values():
            for name, digest in entry.digests.items():
                if digest_of(shard.tensor(name)) != digest:
                    raise CheckpointError(f"{file} is damaged: {name} is not what was written; use an older checkpoint")
        return {index: unflatten(entry.statistics, shard.tensor) for index, entry in record.entries.items()}
