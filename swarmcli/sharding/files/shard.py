"""One rank's share of an optimizer's state on a disk: `rank-00003.safetensors` and what describes it.

Descriptions are msgpack, sealed: their own SHA-256 stands in front of them, so that a flipped bit is noticed.
"""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Annotated, Any, TypeVar

import msgspec
from torch import Tensor

from swarmcli.errors import CheckpointError
from swarmcli.files.durable import write_file
from swarmcli.files.flat import unflatten
from swarmcli.files.tensor_file import TensorFile, digest_of, write_tensors
from swarmcli.network import wire
from swarmcli.sharding.zero.state import State, describe

T = TypeVar("T")
MAX_BYTES = 64 * 2**20  # of what is sealed

Count = Annotated[int, msgspec.Meta(ge=0)]
Digest = Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]


class Entry(msgspec.Struct, frozen=True):
    """The state of one parameter."""

    statistics: dict[str, Any]  # flattened
    digests: dict[str, Digest]  # of its tensors, by their names in the rank's file


class Description(msgspec.Struct, frozen=True):
    """What one rank wrote."""

    rank: Count
    epoch: Count
    entries: dict[Count, Entry]  # by the parameter's place in the parameter groups


class ShardRecord(msgspec.Struct, frozen=True):
    """One rank's file as the others know it."""

    rank: Count
    indices: list[Count]  # the parameters with state in it
    nbytes: Count  # of the tensors' file
    description: Digest  # of the description's content
    host: str  # where it was written


def shard_file(directory: Path, rank: int) -> Path:
    return directory / f"rank-{rank:05d}.safetensors"


def description_file(directory: Path, rank: int) -> Path:
    return directory / f"rank-{rank:05d}.msgpack"


def write_shard(directory: Path, rank: int, epoch: int, state: State) -> ShardRecord:
    """Writes what `rank` holds of the state: tensors on any device, numbers, texts, None, lists, tuples and dicts.

    Holds one tensor of a device in host memory at a time. Raises OSError, TypeError for values of other kinds, and
    ValueError where the description would be longer than may be read.
    """
    directory.mkdir(parents=True, exist_ok=True)
    tensors: dict[int, dict[str, Tensor]] = {index: {} for index in state}
    described = {index: _describe(index, statistics, tensors[index]) for index, statistics in state.items()}
    file = shard_file(directory, rank)
    everything = {name: tensor for own in tensors.values() for name, tensor in own.items()}
    digests = write_tensors(file, everything, hashed=True)
    entries = {
        index: Entry(each, {name: digests[name] for name in tensors[index]}) for index, each in described.items()
    }
    description = write_sealed(description_file(directory, rank), Description(rank, epoch, entries))
    return ShardRecord(rank, sorted(state), file.stat().st_size, description, platform.node())


def _describe(index: int, statistics: Mapping[Any, Any], tensors: dict[str, Tensor]) -> dict[str, Any]:
    for name in statistics:
        if not isinstance(name, str):
            raise TypeError(f"state[{index}] has the key {name!r}, a {type(name).__name__}: only texts can be written")
    return {name: describe(value, tensors, f"{index}/{name}") for name, value in statistics.items()}


class Shard:
    """A rank's files, open for reading: `state` are views of the file, of which nothing has been read yet.

    Raises CheckpointError when a file is missing, truncated or damaged, or not the one that the record speaks of.
    """

    def __init__(self, directory: Path, record: ShardRecord) -> None:
        self.record = record
        file = description_file(directory, record.rank)
        description, digest = read_sealed(Description, file)
        if digest != record.description:
            raise CheckpointError(f"{file} belongs to another save, of epoch {description.epoch}")
        self._entries = description.entries
        self._file = TensorFile(shard_file(directory, record.rank))
        try:
            if self._file.path.stat().st_size != record.nbytes:
                raise CheckpointError(f"{self._file.path} is not of the {record.nbytes} bytes that were written")
            self.state: State = {
                index: {name: unflatten(value, self._file.tensor) for name, value in entry.statistics.items()}
                for index, entry in self._entries.items()
            }
        except CheckpointError:
            self.close()
            raise

    def check_fit(self, parameters: int) -> None:
        """Raises CheckpointError for state of others than the first `parameters` parameters.

        How large a statistic is, is the optimizer's affair (matrices of a side's square, histories); no tensor reaches
        beyond the file, whose length was checked.
        """
        for index in self._entries:
            if index >= parameters:
                raise CheckpointError(f"{self._file.path} has state of parameter {index} of only {parameters}")

    def check_content(self, indices: Iterable[int]) -> None:
        """Reads the state of these parameters. Raises CheckpointError where it is not what was written."""
        for index in indices:
            for name, digest in self._entries[index].digests.items():
                if digest_of(self._file.tensor(name)) != digest:
                    raise CheckpointError(f"{self._file.path} is damaged: {name} is not what was written")

    def close(self) -> None:
        self._file.__exit__(None, None, None)

    def __enter__(self) -> Shard:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def seal(content: object) -> bytes:
    """The encoded content behind its SHA-256."""
    encoded = wire.encode(content)
    return hashlib.sha256(encoded).digest() + encoded


def unseal(kind: type[T], data: bytes, file: Path) -> T:
    """What was sealed. Raises CheckpointError, which names `file`."""
    if hashlib.sha256(data[32:]).digest() != data[:32]:
        raise CheckpointError(f"{file} is damaged: its content is not what was written")
    try:
        return wire.decode(kind, data[32:])
    except msgspec.DecodeError as error:
        raise CheckpointError(f"{file} is of another version of this program, or no such file: {error}") from error


def write_sealed(file: Path, content: object) -> bytes:
    """Writes it durably and returns its SHA-256. Raises OSError, and ValueError for more than may be read again."""
    data = seal(content)
    if len(data) > MAX_BYTES:
        raise ValueError(f"{file.name} would take {len(data)} bytes; at most {MAX_BYTES} are read again")
    write_file(file, lambda stream: stream.write(data))
    return data[:32]


def read_sealed(kind: type[T], file: Path) -> tuple[T, bytes]:
    """The content and its SHA-256. Raises CheckpointError for a file that is missing, too large or damaged."""
    try:
        if file.stat().st_size > MAX_BYTES:
            raise CheckpointError(f"{file} is damaged: it is larger than {MAX_BYTES} bytes")
        data = file.read_bytes()
    except FileNotFoundError:
        raise CheckpointError(f"{file} is missing") from None
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error.strerror}") from error
    return unseal(kind, data, file), data[:32]
