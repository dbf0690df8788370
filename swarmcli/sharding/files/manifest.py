"""What is written beside the tensors of a sharded state: a description per rank, and a manifest that makes it whole.

Both are msgpack, sealed: their own SHA-256 stands in front of them, so that a flipped bit is noticed.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Annotated, TypeVar

import msgspec
import torch

from swarmcli.errors import CheckpointError
from swarmcli.network import wire
from swarmcli.sharding.files.durable import write_file
from swarmcli.sharding.zero.state_tree import Node

T = TypeVar("T")
FORMAT = 1
MANIFEST = "complete.msgpack"
MAX_BYTES = 64 * 2**20  # of a manifest or a description

Count = Annotated[int, msgspec.Meta(ge=0)]
Digest = Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]


class Entry(msgspec.Struct, frozen=True):
    """The state of one parameter; its tensors lie in the rank's file under the names of `tensor_names`."""

    index: Count  # of the parameter, in the order of the parameter groups
    statistics: dict[str, Node]
    digests: list[Digest]  # of the tensors, in the same order


class Description(msgspec.Struct, frozen=True):
    """What one rank wrote."""

    rank: Count
    epoch: Count
    entries: list[Entry]


class ShardRecord(msgspec.Struct, frozen=True):
    """One rank's file as the others know it."""

    rank: Count
    indices: list[Count]  # the parameters with state in it
    nbytes: Count  # of the tensors' file
    description: Digest  # of the description's content
    host: str  # where it was written


class ParameterForm(msgspec.Struct, frozen=True):
    """By which the parameters of another model are told apart from these."""

    dtype: str
    shape: list[Count]


def form_of(parameter: torch.Tensor) -> ParameterForm:
    return ParameterForm(str(parameter.dtype).removeprefix("torch."), list(parameter.shape))


class Manifest(msgspec.Struct, frozen=True):
    """A whole sharded state. It is written last, when the files of all ranks are on their disks."""

    format: Count
    epoch: Count
    shards: list[ShardRecord]
    parameters: list[ParameterForm]
    group_sizes: list[Count]  # parameters per parameter group
    settings: Node  # of the parameter groups


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
