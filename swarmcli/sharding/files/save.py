"""A sharded optimizer state in one directory: a file per rank, and a manifest that makes it whole.

    rank-00000.safetensors      tensors of rank 0's share, by parameter index and name
    rank-00001.safetensors ...
    complete.msgpack            the manifest, written when all ranks' files are on their disks: what the tensors belong
                                to, with numbers and None among them, and a digest of each

Ranks on several machines without a shared directory write into a directory of the same name each; every one of them
then has its own ranks' files and the manifest.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, TypeAlias

import msgspec
import torch
import torch.distributed as dist
from safetensors import SafetensorError

from swarmcli.errors import CheckpointError
from swarmcli.files.durable import forget, write_file
from swarmcli.sharding.files.reshard import reshard
from swarmcli.sharding.files.shard import Count, Shard, ShardRecord, shard_file, write_shard
from swarmcli.sharding.transfer import agree, exchange
from swarmcli.sharding.zero.state import State, apply_settings, copied_to_cpu, describe_settings
from swarmcli.sharding.zero.zero_redundancy_optimizer import ZeroRedundancyOptimizer

FORMAT = 1
MANIFEST = "complete.msgpack"
MAX_BYTES = 64 * 2**20  # of a manifest


class ParameterForm(msgspec.Struct, frozen=True):
    """By which the parameters of another model are told apart from these."""

    dtype: str
    shape: list[Count]


def form_of(parameter: torch.Tensor) -> ParameterForm:
    return ParameterForm(str(parameter.dtype).removeprefix("torch."), list(parameter.shape))


class ShardManifest(msgspec.Struct, frozen=True):
    """A whole sharded state. It is written last, when the files of all ranks are on their disks."""

    format: Count
    epoch: Count
    shards: list[ShardRecord]
    parameters: list[ParameterForm]
    group_sizes: list[Count]  # parameters per parameter group
    settings: list[dict[str, Any]]  # of the parameter groups


Written: TypeAlias = ShardRecord | str  # a rank's file, or why there is none


def try_to_write(directory: Path, rank: int, state: State) -> Written:
    """This rank's part of a save, read back from the disk; a full disk and its like are returned, not raised."""
    try:
        record = write_shard(directory, rank, state)
        forget(shard_file(directory, rank))
        with Shard(directory, record) as written:
            written.check_content(record.entries)
        return record
    except (OSError, TypeError, SafetensorError, CheckpointError) as error:
        return f"rank {rank} could not write {shard_file(directory, rank)}: {error}"


def complete(
    directory: Path, epoch: int, own: Written, optimizer: ZeroRedundancyOptimizer, group: dist.ProcessGroup
) -> None:
    """Makes what all ranks have written a whole save. A collective call.

    Raises CheckpointError at all ranks if one has not written, or none could write the manifest; the save is then
    none. RuntimeError when a rank is gone.
    """
    settings = None
    if dist.get_rank(group) == 0:
        try:
            settings = describe_settings(optimizer.param_groups)
        except TypeError as error:
            own = f"rank 0 could not write the settings: {error}"
    told = exchange(_Told, _Told(own, settings), group)
    if problems := [each.written for each in told if isinstance(each.written, str)]:
        raise CheckpointError(f"the state of epoch {epoch} was not saved: {'; '.join(problems)}")
    # The same everywhere: in a directory that ranks share, each writes over the others'.
    manifest = ShardManifest(
        FORMAT,
        epoch,
        [each.written for each in told if isinstance(each.written, ShardRecord)],
        [form_of(parameter) for parameter in optimizer.parameters],
        [len(group["params"]) for group in optimizer.param_groups],
        next(each.settings for each in told if each.settings is not None),
    )
    problem = ""
    try:
        write_file(directory / MANIFEST, seal(manifest))
    except (OSError, ValueError) as error:
        problem = f"{directory / MANIFEST} could not be written: {error}"
    problems = exchange(str, problem, group)
    if all(problems):  # one manifest anywhere is enough: it says what belongs to the save
        raise CheckpointError(f"the state of epoch {epoch} was not saved: {'; '.join(problems)}")


def read_manifest(directory: Path) -> tuple[ShardManifest, bytes]:
    """The manifest in a directory and its SHA-256. CheckpointError when there is none, or it is damaged."""
    file = directory / MANIFEST
    try:
        if file.stat().st_size > MAX_BYTES:
            raise CheckpointError(f"{file} is damaged: it is larger than {MAX_BYTES} bytes")
        data = file.read_bytes()
    except FileNotFoundError:
        raise CheckpointError(f"{file} is missing") from None
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error.strerror}") from error
    return unseal(data, file), data[:32]


def seal(manifest: ShardManifest) -> bytes:
    """The manifest behind its SHA-256, by which a flipped bit is noticed. Raises ValueError for more than is read."""
    encoded = msgspec.msgpack.encode(manifest)
    if len(encoded) > MAX_BYTES - 32:
        raise ValueError(f"it would take {len(encoded)} bytes; at most {MAX_BYTES} are read again")
    return hashlib.sha256(encoded).digest() + encoded


def unseal(data: bytes, file: Path) -> ShardManifest:
    """Reads what `seal` has made. Raises CheckpointError, which names `file`."""
    if hashlib.sha256(data[32:]).digest() != data[:32]:
        raise CheckpointError(f"{file} is damaged: its content is not what was written")
    try:
        manifest = msgspec.msgpack.decode(data[32:], type=ShardManifest)
    except (ValueError, RecursionError) as error:  # what msgspec says, and what Python says to texts and depths
        raise CheckpointError(f"{file} is of another version of this program, or no such file: {error}") from error
    if manifest.format != FORMAT:
        raise CheckpointError(f"{file} is of format {manifest.format}; this version reads {FORMAT}")
    return manifest


def check_whole(directory: Path, digest: str) -> None:
    """Reads all files of a save. CheckpointError for what is missing, damaged or not of the save with this digest."""
    manifest, found = read_manifest(directory)
    if found.hex() != digest:
        raise CheckpointError(f"{directory} belongs to another checkpoint, of epoch {manifest.epoch}")
    for record in manifest.shards:
        with Shard(directory, record) as shard:
            shard.check_content(record.entries)


def read_whole(directory: Path, manifest: ShardManifest) -> dict[int, dict[str, Any]]:
    """The state in all ranks' files, for a process that holds it alone; copies in CPU memory.

    Raises CheckpointError that names every file that is missing or damaged.
    """
    with _seen([directory], manifest) as (shards, problems):
        for shard in shards:
            shard.check_fit(len(manifest.parameters))
            shard.check_content(shard.state)
        missing = _expected(manifest).difference(*(shard.state for shard in shards))
        if missing or problems:
            raise CheckpointError(_describe_missing(manifest, missing, problems))
        return {index: copied_to_cpu(values) for shard in shards for index, values in shard.state.items()}


def load_save(
    directories: Sequence[Path],
    manifest: ShardManifest,
    optimizer: ZeroRedundancyOptimizer,
    group: dist.ProcessGroup,
    *,
    meet: Callable[[], object] = lambda: None,
) -> None:
    """Lays the state of a save out over the optimizer's ranks, however many wrote it. A collective call.

    `directories`: where this rank may see files of the save. Each rank reads what it owns from the files
    that it sees; what it does not see, one sends that does. Everything that will be used is checked first: either all
    ranks have their share and the settings afterwards, or CheckpointError is raised at all and nothing has changed.
    RuntimeError when a rank is gone. `meet`: see reshard.
    """
    with ExitStack() as stack:
        problems: list[str] = []
        shards: list[Shard] = []
        try:
            _check_model(manifest, optimizer)
            shards, problems = stack.enter_context(_seen(directories, manifest))
            for shard in shards:
                shard.check_fit(len(manifest.parameters))
            unfit = None
        except CheckpointError as error:
            unfit = str(error)
        agree(unfit, group)
        by_index = {index: shard for shard in shards for index in shard.state}
        _check_complete(manifest, by_index, problems, group)

        def check(indices: Collection[int]) -> str | None:
            try:
                for index in indices:
                    by_index[index].check_content([index])
            except CheckpointError as error:
                return f"{error}; use an older save"
            return None

        held = {index: shard.state[index] for index, shard in by_index.items()}
        state = reshard(held, optimizer.indices_of(optimizer.rank), group, check=check, meet=meet)
        apply_settings(optimizer.param_groups, manifest.settings)
        # Nobody else uses what others sent; a rank has only views of its own files.
        own = {index: copied_to_cpu(values) if index in held else values for index, values in state.items()}
        optimizer.install_state(own, copy=False)


def _check_model(manifest: ShardManifest, optimizer: ZeroRedundancyOptimizer) -> None:
    """Raises CheckpointError unless the save is of these parameters in these groups."""
    save = f"the save of epoch {manifest.epoch}"
    sizes = [len(group["params"]) for group in optimizer.param_groups]
    if sizes != manifest.group_sizes or sum(sizes) != len(manifest.parameters):
        raise CheckpointError(
            f"{save} is of parameter groups with {manifest.group_sizes} parameters, this optimizer's have {sizes}: "
            "make the same groups in the same order before loading"
        )
    for index, (there, parameter) in enumerate(zip(manifest.parameters, optimizer.parameters, strict=True)):
        if there != form_of(parameter):
            raise CheckpointError(
                f"{save} is of another model: parameter {index} is {there.dtype} {tuple(there.shape)} there, "
                f"{parameter.dtype} {tuple(parameter.shape)} here"
            )


@contextmanager
def _seen(directories: Sequence[Path], manifest: ShardManifest) -> Iterator[tuple[list[Shard], list[str]]]:
    """The files of the save that are in order here, and what is wrong with the others."""
    shards, problems = [], []
    with ExitStack() as stack:
        for record in manifest.shards:
            wrong = []
            for directory in directories:
                try:
                    shards.append(stack.enter_context(Shard(directory, record)))
                    break
                except CheckpointError as error:
                    wrong.append(str(error))
            else:
                problems += wrong
        yield shards, problems


def _check_complete(
    manifest: ShardManifest, available: Collection[int], problems: list[str], group: dist.ProcessGroup
) -> None:
    """CheckpointError at all ranks if nobody sees a piece. A file that one rank misses another may see."""
    told = exchange(_Sight, _Sight(list(available), problems), group)
    missing = _expected(manifest).difference(*(each.indices for each in told))
    if missing:
        raise CheckpointError(_describe_missing(manifest, missing, [text for each in told for text in each.problems]))


class _Told(msgspec.Struct, frozen=True):
    written: Written
    settings: list[dict[str, Any]] | None  # rank 0's: schedulers may run there alone


class _Sight(msgspec.Struct, frozen=True):
    indices: list[int]
    problems: list[str]


def _expected(manifest: ShardManifest) -> set[int]:
    return {index for record in manifest.shards for index in record.entries}


def _describe_missing(manifest: ShardManifest, missing: Collection[int], problems: Sequence[str]) -> str:
    lost = [record for record in manifest.shards if record.entries.keys() & set(missing)]
    files = ", ".join(f"{shard_file(Path(), record.rank)} (written on {record.host})" for record in lost)
    why = f": {'; '.join(dict.fromkeys(problems))}" if problems else ""
    return (
        f"of the save of epoch {manifest.epoch}, nobody can use {files}, with the state of {len(missing)} of "
        f"{len(manifest.parameters)} parameters{why}; bring the files to where a rank sees them, or use an older save"
    )
