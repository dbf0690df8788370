"""Saving and loading between any numbers of ranks, with one directory for all or one for each."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from swarmcli.errors import CheckpointError
from swarmcli.sharding import ShardedStateStore
from swarmcli.sharding.files.save import read_manifest
from swarmcli.sharding.zero import transfer
from tests.sharding.files.jobs import differing, plain, reference, sharded, train, whole
from tests.sharding.processes import Worlds

pytestmark = pytest.mark.processes


def store(directory: str, *, apart: bool = False) -> ShardedStateStore:
    """`apart`: each rank on a machine of its own, which shares no directory with the others."""
    place = Path(directory, f"machine-{dist.get_rank()}") if apart else Path(directory)
    return ShardedStateStore(place)


def save(directory: str, steps: int = 2, *, apart: bool = False, shares: list[float] | None = None) -> str:
    optimizer = sharded(shares=shares)
    train(optimizer, steps)
    if dist.get_rank():  # as where a scheduler runs at rank 0 alone
        optimizer.param_groups[1]["lr"] = 0.7
    place = store(directory, apart=apart).save(optimizer, epoch=steps)
    digests = transfer.gather_numbers([float(read_manifest(place)[1][0])], optimizer.process_group)
    assert len({digest for (digest,) in digests}) == 1
    return place.name


def save_apart(directory: str, steps: int = 2) -> str:
    return save(directory, steps, apart=True)


def load(directory: str, apart: bool = False, shares: list[float] | None = None) -> dict[str, Any]:
    """The share that this rank has afterwards, and the parameters after one more step."""
    optimizer = sharded(shares=shares)
    optimizer.param_groups[0]["lr"] = 0.5  # overwritten by the save's
    restored = store(directory, apart=apart).load(optimizer)
    if restored is None:
        return {"epoch": None, "state": plain(optimizer.local_state())}
    state = plain(optimizer.local_state())
    own = optimizer.indices_of(optimizer.rank)
    return {
        "epoch": restored.epoch,
        "name": restored.name,
        "state": state,
        "own": own,
        "rates": [group["lr"] for group in optimizer.param_groups],
    }


def refuse(directory: str, apart: bool = False) -> str:
    """The same error at every rank, and nothing has changed."""
    optimizer = sharded()
    train(optimizer, 1)
    before = {index: dict(values) for index, values in optimizer.local_state().items()}
    with pytest.raises(CheckpointError) as caught:
        store(directory, apart=apart).load(optimizer)
    assert differing(plain(optimizer.local_state()), before) == []
    return str(caught.value)


def check_loaded(loaded: list[dict[str, Any]], steps: int = 2) -> None:
    assert [each["epoch"] for each in loaded] == [steps] * len(loaded)
    assert differing(whole([each["state"] for each in loaded]), plain(reference(steps).state_dict()["state"])) == []
    assert all(set(each["state"]) <= set(each["own"]) for each in loaded)
    assert all(each["rates"] == [0.01, 0.02] for each in loaded)


@pytest.mark.parametrize("before", [1, 2, 4])
@pytest.mark.parametrize("after", [1, 2, 4])
def test_any_number_of_ranks_reads_what_any_number_wrote(
    worlds: Worlds, tmp_path: Path, before: int, after: int
) -> None:
    assert worlds(before).run(save, str(tmp_path)) == ["save-00000001"] * before
    check_loaded(worlds(after).run(load, str(tmp_path)))


def test_other_shares(worlds: Worlds, tmp_path: Path) -> None:
    worlds(2).run(save, str(tmp_path))
    check_loaded(worlds(4).run(load, str(tmp_path), False, [0.0, 1.0, 0.0, 3.0]))


def test_no_rank_writes_more_than_its_share(worlds: Worlds, tmp_path: Path) -> None:
    worlds(4).run(save, str(tmp_path))
    place = tmp_path / "save-00000001"
    files = sorted(place.iterdir())
    assert [file.name for file in files if file.suffix == ".safetensors"] == [
        f"rank-{rank:05d}.safetensors" for rank in range(4)
    ]
    assert len(files) == 9
    assert not (tmp_path / "save-00000002").exists()


def test_machines_without_a_shared_directory_send_each_other_what_they_see(worlds: Worlds, tmp_path: Path) -> None:
    worlds(2).run(save_apart, str(tmp_path))
    assert (tmp_path / "machine-1/save-00000001/complete.msgpack").exists()
    assert not (tmp_path / "machine-1/save-00000001/rank-00000.msgpack").exists()
    check_loaded(worlds(4).run(load, str(tmp_path), True))  # two of them see nothing


def test_a_machine_whose_files_are_gone_is_named(worlds: Worlds, tmp_path: Path) -> None:
    worlds(2).run(save_apart, str(tmp_path))
    (tmp_path / "machine-1/save-00000001/rank-00001.safetensors").unlink()
    for text in worlds(2).run(refuse, str(tmp_path), True):
        assert "rank-00001.safetensors (written on " in text
        assert "bring the files to where a rank sees them" in text


def test_without_any_save_nothing_happens(worlds: Worlds, tmp_path: Path) -> None:
    assert [each["epoch"] for each in worlds(2).run(load, str(tmp_path / "none"))] == [None, None]


def test_the_last_two_stay(worlds: Worlds, tmp_path: Path) -> None:
    for steps in (1, 2, 3):
        worlds(2).run(save, str(tmp_path), steps)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["save-00000002", "save-00000003"]
    check_loaded(worlds(2).run(load, str(tmp_path)), steps=3)


# What can go wrong


def damage(file: Path, at: int = -3) -> None:
    data = bytearray(file.read_bytes())
    data[at] ^= 0x40
    file.write_bytes(data)


def truncate(file: Path) -> None:
    os.truncate(file, file.stat().st_size - 4)


@pytest.mark.parametrize("harm", [damage, truncate, Path.unlink], ids=["corrupted", "truncated", "missing"])
@pytest.mark.parametrize("name", ["rank-00000.safetensors", "rank-00001.msgpack", "complete.msgpack"])
def test_a_harmed_save_is_named_and_the_older_one_used(worlds: Worlds, tmp_path: Path, harm: Any, name: str) -> None:
    worlds(2).run(save, str(tmp_path), 2)
    worlds(2).run(save, str(tmp_path), 3)
    harm(tmp_path / "save-00000002" / name)
    check_loaded(worlds(2).run(load, str(tmp_path)), steps=2)
    if (tmp_path / "save-00000002/complete.msgpack").exists():
        (tmp_path / "save-00000001/complete.msgpack").write_bytes(b"")
        for text in worlds(2).run(refuse, str(tmp_path)):
            assert str(tmp_path / "save-00000002" / name) in text
            assert str(tmp_path / "save-00000001/complete.msgpack") in text


def test_files_of_another_epoch_are_not_mixed_in(worlds: Worlds, tmp_path: Path) -> None:
    worlds(2).run(save, str(tmp_path), 2)
    worlds(2).run(save, str(tmp_path), 3)
    for suffix in ("msgpack", "safetensors"):
        name = f"rank-00001.{suffix}"
        (tmp_path / "save-00000002" / name).write_bytes((tmp_path / "save-00000001" / name).read_bytes())
    (tmp_path / "save-00000001/complete.msgpack").unlink()
    for text in worlds(2).run(refuse, str(tmp_path)):
        assert "rank-00001.msgpack belongs to another save, of epoch 2" in text


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
            store(directory).save(optimizer, epoch=3)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    return str(caught.value)


def test_a_full_disk_at_one_rank_is_everyones_and_the_older_save_stays(worlds: Worlds, tmp_path: Path) -> None:
    worlds(2).run(save, str(tmp_path), 2)
    for text in worlds(2).run(save_with_small_disk, str(tmp_path)):
        assert "the state of epoch 3 was not saved: rank 1 could not write" in text
        assert "File too large" in text
    assert [path.name for path in tmp_path.iterdir()] == ["save-00000001"]
    check_loaded(worlds(2).run(load, str(tmp_path)), steps=2)


def die_while_saving(directory: str) -> None:
    optimizer = sharded()
    train(optimizer, 3)
    if dist.get_rank() == 1:
        from swarmcli.sharding.files import durable

        durable.os.fsync = lambda descriptor: os.kill(os.getpid(), signal.SIGKILL)  # with its tensors half on the disk
    store(directory).save(optimizer, epoch=3)


def test_a_rank_killed_while_it_writes_leaves_the_older_save(worlds: Worlds, tmp_path: Path) -> None:
    worlds(2).run(save, str(tmp_path), 2)
    survivor, dead = worlds(2).outcomes(die_while_saving, str(tmp_path))
    assert "ended with -9" in str(dead.error)
    assert survivor.error is not None
    assert not (tmp_path / "save-00000002/complete.msgpack").exists()
    check_loaded(worlds(4).run(load, str(tmp_path)), steps=2)
    assert worlds(4).run(save, str(tmp_path), 4) == ["save-00000003"] * 4  # beside what the dead one left
    assert worlds(4).run(save, str(tmp_path), 5) == ["save-00000004"] * 4
    assert sorted(path.name for path in tmp_path.iterdir()) == ["save-00000003", "save-00000004"]


def load_into_another_model(directory: str) -> list[str]:
    from tests.sharding.files import jobs

    texts = []
    optimizer = sharded()
    wider = torch.nn.Parameter(torch.zeros(9, 5))
    optimizer.parameters[0] = wider
    with pytest.raises(CheckpointError) as caught:
        store(directory).load(optimizer)
    texts.append(str(caught.value))
    from swarmcli.sharding import ZeroRedundancyOptimizer

    in_one_group = ZeroRedundancyOptimizer(jobs.parameters(), torch.optim.AdamW)
    with pytest.raises(CheckpointError) as caught:
        store(directory).load(in_one_group)
    return [*texts, str(caught.value)]


def test_a_save_of_another_model_is_refused(worlds: Worlds, tmp_path: Path) -> None:
    worlds(2).run(save, str(tmp_path))
    for model, layout in worlds(2).run(load_into_another_model, str(tmp_path)):
        assert "of another model: parameter 0 is float32 (7, 5) there, torch.float32 (9, 5) here" in model
        assert "parameter groups with [3, 4] parameters, this optimizer's have [7]" in layout


def save_what_cannot_be_written(directory: str) -> list[str]:
    texts = []
    optimizer = sharded()
    train(optimizer, 1)
    optimizer.param_groups[0]["hook"] = print
    with pytest.raises(CheckpointError) as caught:
        store(directory).save(optimizer)
    texts.append(str(caught.value))
    del optimizer.param_groups[0]["hook"]
    if dist.get_rank() == 1:
        optimizer.install_state({index: {"odd": {1, 2}} for index in optimizer.indices_of(1)})
    with pytest.raises(CheckpointError) as caught:
        store(directory).save(optimizer)
    return [*texts, str(caught.value)]


def test_values_that_cannot_be_written_are_named_at_all_ranks(worlds: Worlds, tmp_path: Path) -> None:
    for setting, statistic in worlds(2).run(save_what_cannot_be_written, str(tmp_path)):
        assert "param_groups[0]['hook']" in setting
        assert "rank 1 could not write" in statistic and "['odd'] is a set" in statistic
    assert list(tmp_path.iterdir()) == []


def save_too_wide_integers(directory: str) -> list[str]:
    texts = []
    optimizer = sharded()
    train(optimizer, 1)
    optimizer.param_groups[0]["seed"] = 2**70
    with pytest.raises(CheckpointError) as caught:
        store(directory).save(optimizer)
    texts.append(str(caught.value))
    del optimizer.param_groups[0]["seed"]
    if dist.get_rank() == 1:
        optimizer.install_state({index: {"seed": 2**70} for index in optimizer.indices_of(1)})
    with pytest.raises(CheckpointError) as caught:
        store(directory).save(optimizer)
    return [*texts, str(caught.value)]


def test_integers_beyond_64_bits_are_named_at_all_ranks(worlds: Worlds, tmp_path: Path) -> None:
    for setting, statistic in worlds(2).run(save_too_wide_integers, str(tmp_path)):
        assert "rank 0 could not write the settings: param_groups[0]['seed']" in setting
        assert "rank 1 could not write" in statistic and "['seed'] cannot be written" in statistic
    assert list(tmp_path.iterdir()) == []


class WithMatrices(torch.optim.SGD):
    """Statistics that are larger than their parameters, as Shampoo and LBFGS have them."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["matrix"] = torch.outer(parameter.detach().ravel(), parameter.detach().ravel())


def save_and_load(directory: str) -> list[str]:
    optimizer, again = sharded(kind=WithMatrices), sharded(kind=WithMatrices, shares=[3.0, 1.0])
    train(optimizer, 1)
    store(directory).save(optimizer)
    store(directory).load(again)
    held = ShardedStateStore(directory + "/again")
    held.save(again)
    whole_again = sharded(kind=WithMatrices)
    held.load(whole_again)
    return differing(plain(whole_again.local_state()), plain(optimizer.local_state()))


def test_statistics_may_be_larger_than_their_parameters(worlds: Worlds, tmp_path: Path) -> None:
    assert worlds(2).run(save_and_load, str(tmp_path)) == [[], []]


def save_odd_epochs(directory: str, kind: str) -> list[str]:
    """The error of an epoch that only rank 1 gives, of one that all give, and the epoch that is loaded then."""
    odd: Any = {"negative": -1, "fraction": 1.5, "huge": 2**63}[kind]
    optimizer = sharded()
    texts = []
    for epoch in (odd if dist.get_rank() == 1 else 5, odd):
        with pytest.raises((TypeError, ValueError, CheckpointError)) as caught:
            store(directory).save(optimizer, epoch=epoch)
        texts.append(f"{type(caught.value).__name__}: {caught.value}")
    restored = store(directory).load(optimizer)
    return [*texts, str(restored and restored.epoch)]


@pytest.mark.parametrize(
    ("kind", "error"),
    [
        ("negative", "ValueError: epoch=-1: expected at least 0"),
        ("fraction", "TypeError: epoch=1.5: expected a whole number"),
        ("huge", f"ValueError: epoch={2**63}: expected less than 2**63"),
    ],
)
def test_an_epoch_that_could_not_be_read_is_refused_before_anything_is_written(
    worlds: Worlds, tmp_path: Path, kind: str, error: str
) -> None:
    worlds(2).run(save, str(tmp_path))
    waiting, wrong = worlds(2).run(save_odd_epochs, str(tmp_path), kind)
    assert waiting == [f"CheckpointError: nothing was saved: rank 1: {error.split(': ', 1)[1]}", error, "2"]
    assert wrong == [error, error, "2"]
    assert [path.name for path in tmp_path.iterdir()] == ["save-00000001"]


def save_different_epochs(directory: str) -> str:
    with pytest.raises(CheckpointError) as caught:
        store(directory).save(sharded(), epoch=5 + dist.get_rank())
    return str(caught.value)


def test_epochs_that_differ_are_named_at_all_ranks(worlds: Worlds, tmp_path: Path) -> None:
    expected = "nothing was saved: rank 1 gave epoch=6, rank 0 5"
    assert worlds(2).run(save_different_epochs, str(tmp_path)) == [expected] * 2
    assert list(tmp_path.iterdir()) == []


def save_counts_of_others(directory: str) -> list[int]:
    found = []
    for epoch in (np.int64(3), torch.tensor(4)):
        store(directory).save(sharded(), epoch=epoch)  # type: ignore[arg-type]
        restored = store(directory).load(sharded())
        assert restored is not None
        found.append(restored.epoch)
    return found


def test_an_epoch_may_be_a_count_of_numpy_or_torch(worlds: Worlds, tmp_path: Path) -> None:
    assert worlds(1).run(save_counts_of_others, str(tmp_path)) == [[3, 4]]


def use_a_file_as_directory(file: str) -> list[str]:
    texts = []
    for call in (ShardedStateStore(file).save, ShardedStateStore(file).load):
        with pytest.raises(CheckpointError) as caught:
            call(sharded())
        texts.append(str(caught.value))
    return texts


def test_a_file_in_the_place_of_the_directory_is_named(worlds: Worlds, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    for texts in worlds(2).run(use_a_file_as_directory, str(file)):
        assert all(f"{file} cannot be read as a directory: Not a directory" in text for text in texts)


def give_an_unsharded_one(directory: str) -> list[str]:
    texts = []
    for call in (store(directory).save, store(directory).load):
        with pytest.raises(TypeError) as caught:
            call(reference(1))
        texts.append(str(caught.value))
    return texts


def test_an_unsharded_optimizer_is_refused_with_what_to_give(worlds: Worlds, tmp_path: Path) -> None:
    (texts,) = worlds(1).run(give_an_unsharded_one, str(tmp_path))
    expected = "optimizer is a torch.optim.adamw.AdamW, which does not say what each rank holds: give a swarmcli."
    assert all(text.startswith(expected) for text in texts)


def test_wrong_arguments_are_named() -> None:
    with pytest.raises(ValueError, match="keep=0"):
        ShardedStateStore("x", keep=0)
    with pytest.raises(TypeError, match="keep='a': expected a whole number"):
        ShardedStateStore("x", keep="a")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="directory=None: expected a path"):
        ShardedStateStore(None)  # type: ignore[arg-type]
