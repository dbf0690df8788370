"""One rank's share of an optimizer's state on a disk: `rank-00003.safetensors`, and the record that describes it."""

from __future__ import annotations

import platform
import secrets
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any

import msgspec
from torch import Tensor

from swarmcli.errors import CheckpointError
from swarmcli.files.flat import unflatten
from swarmcli.files.tensor_file import TensorFile, digest_of, write_tensors
from swarmcli.sharding.zero.state import State, describe

Count = Annotated[int, msgspec.Meta(ge=0)]
Digest = Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]


class ShardEntry(msgspec.Struct, frozen=True):
    """The state of one parameter."""

    statistics: dict[str, Any]  # flattened
    digests: dict[str, Digest]  # of its tensors, by their names in the rank's file


class ShardRecord(msgspec.Struct, frozen=True):
    """One rank's file, as the manifest has it."""

    rank: Count
    entries: dict[Count, ShardEntry]  # by the parameter's place in the parameter groups
    nbytes: Count  # of the file
    mark: str  # in the file: there may be others of its name
    host: str  # where it was written


def shard_file(directory: Path, rank: int) -> Path:
    return directory / f"rank-{rank:05d}.safetensors"


def write_shard(directory: Path, rank: int, state: State) -> ShardRecord:
    """Writes what `rank` holds of the state: tensors on any device, numbers, texts, None, lists, tuples and dicts.

    Holds one tensor of a device in host memory at a time. Raises OSError, and TypeError for values of other kinds.
    """
    directory.mkdir(parents=True, exist_ok=True)
    tensors: dict[int, dict[str, Tensor]] = {index: {} for index in state}
    described = {index: _describe(index, statistics, tensors[index]) for index, statistics in state.items()}
    file, mark = shard_file(directory, rank), secrets.token_hex(8)
    everything = {name: tensor for own in tensors.values() for name, tensor in own.items()}
    digests = write_tensors(file, everything, hashed=True, mark=mark)
    entries = {
        index: ShardEntry(each, {name: digests[name] for name in tensors[index]}) for index, each in described.items()
    }
    return ShardRecord(rank, entries, file.stat().st_size, mark, platform.node())


def _describe(index: int, statistics: Mapping[Any, Any], tensors: dict[str, Tensor]) -> dict[str, Any]:
    for name in statistics:
        if not isinstance(name, str):
            raise TypeError(f"state[{index}] has the key {name!r}, a {type(name).__name__}: only texts can be written")
    return {name: describe(value, tensors, f"{index}/{name}") for name, value in statistics.items()}


class Shard:
    """A rank's file, open for reading: `state` are views of it; nothing has been read yet.

    Raises CheckpointError when the file is missing, truncated or damaged, or not the one that the record speaks of.
    """

    def __init__(self, directory: Path, record: ShardRecord) -> None:
        self.record = record
        self._file = TensorFile(shard_file(directory, record.rank))
        try:
            if self._file.mark != record.mark:
                raise CheckpointError(f"{self._file.path} belongs to another save")
            if self._file.path.stat().st_size != record.nbytes:
                raise CheckpointError(f"{self._file.path} is not of the {record.nbytes} bytes that were written")
            self.state: State = {
                index: {name: unflatten(value, self._file.tensor) for name, value in entry.statistics.items()}
                for index, entry in record.entries.items()
            }
        except CheckpointError:
            self.close()
            raise

    def check_fit(self, parameters: int) -> None:
        """Raises CheckpointError for state of others than the first `parameters` parameters.

        How large a statistic is, is the optimizer's affair (matrices of a side's square, histories); no tensor reaches
        beyond the file, whose length was checked.
        """
        for index in self.record.entries:
            if index >= parameters:
                raise CheckpointError(f"{self._file.path} has state of parameter {index} of only {parameters}")

    def check_content(self, indices: Iterable[int]) -> None:
        """Reads the state of these parameters. Raises CheckpointError where it is not what was written."""
        for index in indices:
            for name, digest in self.record.entries[index].digests.items():
                if digest_of(self._file.tensor(name)) != digest:
                    raise CheckpointError(f"{self._file.path} is damaged: {name} is not what was written")

    def close(self) -> None:
        self._file.__exit__(None, None, None)

    def __enter__(self) -> Shard:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
