"""One rank's share of an optimizer's state on a disk: `rank-00003.safetensors` and what describes it."""

from __future__ import annotations

import platform
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from torch import Tensor

from swarmcli.errors import CheckpointError
from swarmcli.sharding.files.describing import describe
from swarmcli.sharding.files.manifest import Description, Entry, ShardRecord, read_sealed, write_sealed
from swarmcli.sharding.files.tensor_file import TensorFile, digest_of, write_tensors
from swarmcli.sharding.zero.state_tree import Node, TensorNode, put_together, tensor_nodes

State = Mapping[int, Mapping[str, Any]]  # statistics of parameters by their index


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
    tensors: dict[str, Tensor] = {}
    described: dict[int, dict[str, Node]] = {}
    for index, statistics in state.items():
        described[index] = {name: _describe(index, name, value, tensors) for name, value in statistics.items()}
    file = shard_file(directory, rank)
    digests = write_tensors(file, tensors)
    entries = [
        Entry(index, nodes, [digests[name] for name in tensor_names(index, nodes)])
        for index, nodes in described.items()
    ]
    description = write_sealed(description_file(directory, rank), Description(rank, epoch, entries))
    return ShardRecord(rank, sorted(state), file.stat().st_size, description, platform.node())


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
        self._file = TensorFile(shard_file(directory, record.rank))
        try:
            if self._file.path.stat().st_size != record.nbytes:
                raise CheckpointError(f"{self._file.path} is not of the {record.nbytes} bytes that were written")
            self._entries = {entry.index: entry for entry in description.entries}
            self.state: State = {index: self._statistics(entry) for index, entry in self._entries.items()}
        except CheckpointError:
            self.close()
            raise

    def _statistics(self, entry: Entry) -> dict[str, Any]:
        names = iter(tensor_names(entry.index, entry.statistics))
        statistics = {}
        for name, node in entry.statistics.items():
            views = [self._view(next(names), form) for form in tensor_nodes(node)]
            statistics[name] = put_together(node, iter(views))
        return statistics

    def _view(self, name: str, form: TensorNode) -> Tensor:
        tensor = self._file.tensor(name)
        if (str(tensor.dtype).removeprefix("torch."), list(tensor.shape)) != (form.dtype, form.shape):
            raise CheckpointError(f"{self._file.path} is damaged: {name} is not {form.dtype} {tuple(form.shape)}")
        return tensor

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
            entry = self._entries[index]
            names = tensor_names(index, entry.statistics)
            for name, digest in zip(names, entry.digests, strict=True):
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


def tensor_names(index: int, statistics: Mapping[str, Node]) -> list[str]:
    """`<index>/<statistic>`, and where a statistic is made of several tensors also `/<which>`; no two are equal."""
    names = []
    for raw, node in statistics.items():
        name = raw.replace("/", "//")  # so that one slash alone is never part of it
        if isinstance(node, TensorNode):
            names.append(f"{index}/{name}")
        else:
            names += [f"{index}/{name}/{place}" for place, _ in enumerate(tensor_nodes(node))]
    return names


def _describe(index: int, name: object, value: Any, tensors: dict[str, Tensor]) -> Node:
    if not isinstance(name, str):
        raise TypeError(f"state[{index}] has the key {name!r}, a {type(name).__name__}: only texts can be written")
    found: list[Tensor] = []
    node = describe(value, found, f"state[{index}][{name!r}]")
    tensors.update(zip(tensor_names(index, {name: node}), found, strict=True))
    return node
