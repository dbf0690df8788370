"""Saving and loading between any numbers of ranks, with one directory for all or one for each."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from swarmcli.errors import CheckpointError
from swarmcli.sharding import ZeroRedundancyOptimizer
from swarmcli.sharding.files.save import (
    MANIFEST,
    complete,
    load_save,
    read_manifest,
    seal,
    try_to_write,
    unseal,
)
from swarmcli.sharding.transfer import exchange
from tests.sharding.files.jobs import differing, parameters, plain, reference, sharded, train, whole
from tests.sharding.processes import Worlds
from tests.sharding.threads import in_threads


def write(directory: Path, optimizer: ZeroRedundancyOptimizer, epoch: int) -> bytes:
    """The digest of the manifest that this rank sees then."""
    report = try_to_write(directory, optimizer.rank, optimizer.local_state())
    complete(directory, epoch, report, optimizer, optimizer.process_group)
    return read_manifest(directory)[1]


def read(directory: Path, optimizer: ZeroRedundancyOptimizer) -> int:
    """As a site does it: by the manifest that rank 0 sees. Its epoch."""
    own = seal(read_manifest(directory)[0]) if optimizer.rank == 0 else b""
    manifest = unseal(exchange(bytes, own, optimizer.process_group)[0], directory / MANIFEST)
    load_save([directory], manifest, optimizer, optimizer.process_group)
    return manifest.epoch


def place(directory: str, apart: bool) -> Path:
    """`apart`: each rank on a machine of its own, which shares no directory with the others."""
    return Path(directory, f"machine-{dist.get_rank()}") if apart else Path(directory)


def save(directory: str, steps: int = 2, apart: bool = False) -> bytes:
    optimizer = sharded()
    train(optimizer, steps)
    if dist.get_rank():  # as where a scheduler runs at rank 0 alone
        optimizer.param_groups[1]["lr"] = 0.7
    return write(place(directory, apart), optimizer, steps)


def load(directory: str, apart: bool = False, shares: list[float] | None = None) -> dict[str, Any]:
    """The share that this rank has afterwards."""
    optimizer = sharded(shares=shares)
    optimizer.param_groups[0]["lr"] = 0.5  # overwritten by the save's
    return {
        "epoch": read(place(directory, apart), optimizer),
        "state": plain(optimizer.local_state()),
        "own": optimizer.indices_of(optimizer.rank),
        "rates": [group["lr"] for group in optimizer.param_groups],
    }


def refuse(directory: str, apart: bool = False) -> str:
    """The same error at every rank, and nothing has changed."""
    optimizer = sharded()
    train(optimizer, 1)
    before = {index: dict(values) for index, values in optimizer.local_state().items()}
    with pytest.raises(CheckpointError) as caught:
        read(place(directory, apart), optimizer)
    assert differing(plain(optimizer.local_state()), before) == []
    return str(caught.value)


def check_loaded(loaded: list[dict[str, Any]], steps: int = 2) -> None:
    assert [each["epoch"] for each in loaded] == [steps] * len(loaded)
    assert differing(whole([each["state"] for each in loaded]), plain(reference(steps).state_dict()["state"])) == []
    assert all(set(each["state"]) <= set(each["own"]) for each in loaded)
    assert all(each["rates"] == [0.01, 0.02] for each in loaded)


@pytest.mark.parametrize(("before", "after"), [(1, 2), (4, 2)])
def test_any_number_of_ranks_reads_what_any_number_wrote(tmp_path: Path, before: int, after: int) -> None:
    assert len(set(in_threads(before, save, str(tmp_path)))) == 1  # the same manifest everywhere
    written = sorted(file.name for file in tmp_path.glob("*.safetensors"))
    assert written == [f"rank-{rank:05d}.safetensors" for rank in range(before)]
    assert len(list(tmp_path.iterdir())) == before + 1
    check_loaded(in_threads(after, load, str(tmp_path)))


def test_machines_without_a_shared_directory_send_each_other_what_they_see(tmp_path: Path) -> None:
    in_threads(2, save, str(tmp_path), 2, True)
    assert (tmp_path / "machine-1/complete.msgpack").exists()
    assert not (tmp_path / "machine-1/rank-00000.safetensors").exists()
    check_loaded(in_threads(4, load, str(tmp_path), True))  # two of them see nothing


# What can go wrong


def test_a_machine_whose_files_are_gone_is_named(tmp_path: Path) -> None:
    in_threads(2, save, str(tmp_path), 2, True)
    (tmp_path / "machine-1/rank-00001.safetensors").unlink()
    for text in in_threads(2, refuse, str(tmp_path), True):
        assert "rank-00001.safetensors (written on " in text
        assert "bring the files to where a rank sees them" in text


def damage(file: Path, at: int = -3) -> None:
    data = bytearray(file.read_bytes())
    data[at] ^= 0x40
    file.write_bytes(data)


def truncate(file: Path) -> None:
    os.truncate(file, file.stat().st_size - 4)


@pytest.mark.parametrize("harm", [damage, truncate, Path.unlink], ids=["corrupted", "truncated", "missing"])
def test_a_harmed_file_is_named_at_all_ranks(tmp_path: Path, harm: Any) -> None:
    in_threads(2, save, str(tmp_path))
    harm(tmp_path / "rank-00001.safetensors")
    for text in in_threads(2, refuse, str(tmp_path)):
        assert str(tmp_path / "rank-00001.safetensors") in text


@pytest.mark.parametrize("harm", [damage, truncate, Path.unlink], ids=["corrupted", "truncated", "missing"])
def test_a_harmed_manifest_is_named(tmp_path: Path, harm: Any) -> None:
    in_threads(1, save, str(tmp_path))
    harm(tmp_path / MANIFEST)
    with pytest.raises(CheckpointError, match=str(tmp_path / MANIFEST)):
        read_manifest(tmp_path)


def test_files_of_another_epoch_are_not_mixed_in(tmp_path: Path) -> None:
    for steps in (2, 3):
        in_threads(2, save, str(tmp_path / str(steps)), steps)
    name = "rank-00001.safetensors"
    (tmp_path / "3" / name).write_bytes((tmp_path / "2" / name).read_bytes())
    for text in in_threads(2, refuse, str(tmp_path / "3")):
        assert f"{name} belongs to another save" in text


def save_with_small_disk(directory: str) -> str:
    """Rank 1's disk takes no more than 200 bytes per file."""
    import resource

    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    optimizer = sharded()
    train(optimizer, 3)
    if dist.get_rank() == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (200, limit[1]))
    try:
        with pytest.raises(CheckpointError) as caught:
            write(Path(directory), optimizer, 3)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    return str(caught.value)


@pytest.mark.e2e
def test_a_full_disk_at_one_rank_is_told_at_all_and_leaves_no_save(worlds: Worlds, tmp_path: Path) -> None:
    for text in worlds(2).run(save_with_small_disk, str(tmp_path)):
        assert "the state of epoch 3 was not saved: rank 1 could not write" in text
        assert "File too large" in text
    assert not (tmp_path / MANIFEST).exists()


def load_into_another_model(directory: str) -> list[str]:
    texts = []
    wider, in_one_group = sharded(), ZeroRedundancyOptimizer(parameters(), torch.optim.AdamW)
    wider.parameters[0] = torch.nn.Parameter(torch.zeros(9, 5))
    for optimizer in (wider, in_one_group):
        with pytest.raises(CheckpointError) as caught:
            read(Path(directory), optimizer)
        texts.append(str(caught.value))
    return texts


def test_a_save_of_another_model_is_refused(tmp_path: Path) -> None:
    in_threads(2, save, str(tmp_path))
    for model, layout in in_threads(2, load_into_another_model, str(tmp_path)):
        assert "of another model: parameter 0 is float32 (7, 5) there, torch.float32 (9, 5) here" in model
        assert "parameter groups with [3, 4] parameters, this optimizer's have [7]" in layout


ODD: dict[str, Any] = {"hook": print, "seed": 2**70}


def save_what_cannot_be_written(directory: str, kind: str) -> list[str]:
    """The error of such a setting, and of such a statistic at rank 1."""
    texts = []
    optimizer = sharded()
    train(optimizer, 1)
    optimizer.param_groups[0][kind] = ODD[kind]
    with pytest.raises(CheckpointError) as caught:
        write(Path(directory), optimizer, 1)
    texts.append(str(caught.value))
    del optimizer.param_groups[0][kind]
    if dist.get_rank() == 1:
        optimizer.install_state({index: {kind: ODD[kind]} for index in optimizer.indices_of(1)})
    with pytest.raises(CheckpointError) as caught:
        write(Path(directory), optimizer, 1)
    return [*texts, str(caught.value)]


@pytest.mark.parametrize("kind", ODD)
def test_values_that_cannot_be_written_are_named_at_all_ranks(tmp_path: Path, kind: str) -> None:
    for setting, statistic in in_threads(2, save_what_cannot_be_written, str(tmp_path), kind):
        assert f"rank 0 could not write the settings: param_groups[0]['{kind}']" in setting
        assert "rank 1 could not write" in statistic and f"/{kind} " in statistic
    assert not (tmp_path / MANIFEST).exists()
