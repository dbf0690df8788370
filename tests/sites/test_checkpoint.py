"""A site with a sharded optimizer writes its state at every epoch and goes on from it, with any number of ranks."""

from __future__ import annotations

import copy
import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from swarmcli.checkpoints.directory import Keep
from swarmcli.peer.checkpoints import BackgroundCheckpoints
from swarmcli.sharding.zero.state import copied_to_cpu
from swarmcli.training import CheckpointStore
from tests.sharding.files.jobs import differing, whole
from tests.sharding.processes import Worlds
from tests.sharding.threads import in_threads, ranks
from tests.sites.site_training import Plan, Rank, site_rank, train, weights
from tests.suites import soak

SIZES = {2: (4, 4), 4: (2, 2, 2, 2)}


def plan(size: int, home: str, epochs: int) -> Plan:
    return Plan("adamw", SIZES[size], epochs=epochs, zero=True, home=home, target=16)


def run_site(size: int, home: str, epochs: int) -> dict[str, Any]:
    """Trains up to `epochs`, saving each; what this rank has of the statistics, before and after."""
    with site_rank(plan(size, home, epochs)) as rank:
        began = {"epoch": rank.steps.local_epoch, "state": share(rank), "weights": weights(rank.net)}
        while rank.steps.local_epoch < epochs:
            train_an_epoch(rank, size)
            save(rank)
        return {"began": began, "state": share(rank), "weights": weights(rank.net)}


def train_an_epoch(rank: Rank, size: int) -> None:
    train(rank.steps, rank.net, rank.site.rank, SIZES[size][0], epochs=rank.steps.local_epoch + 1, turns=2)


def store_of(rank: Rank) -> CheckpointStore:
    assert rank.shards is not None
    return CheckpointStore(rank.shards.home / "site", "site", keep=Keep(2))


def save(rank: Rank) -> Path | None:
    """At rank 0, while the others wait in their next step; they write by command."""
    if rank.commands is None or rank.shards is None:
        return None
    state = rank.optimizer.state_dict()
    rank.shards.copy()
    return store_of(rank).write(rank.net, state, rank.optimizer.local_epoch, shards=rank.shards)


def share(rank: Rank) -> dict[int, Any]:
    zero = rank.share.zero if rank.share is not None else rank.optimizer.opt.zero  # type: ignore[union-attr]
    return {index: copied_to_cpu(values) for index, values in zero.local_state().items()}


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir() if path.is_dir() and not path.is_symlink())


def check_continued(second: list[dict[str, Any]], first: list[dict[str, Any]], epoch: int) -> None:
    assert {each["began"]["epoch"] for each in second} == {epoch}
    assert differing(whole([each["began"]["state"] for each in second]), whole([each["state"] for each in first])) == []
    assert all(torch.equal(each["began"]["weights"], first[0]["weights"]) for each in second)


@pytest.mark.parametrize(("before", "after"), [(2, 4), *soak([(2, 2), (4, 2)])])
def test_a_site_goes_on_with_other_ranks_as_if_nothing_had_happened(tmp_path: Path, before: int, after: int) -> None:
    home = str(tmp_path / "home")
    first = in_threads(before, run_site, before, home, 3)
    assert names(tmp_path / "home/site") == ["epoch-000002", "epoch-000003"]
    second = in_threads(after, run_site, after, home, 4)
    check_continued(second, first, 3)
    assert names(tmp_path / "home/site") == ["epoch-000003", "epoch-000004"]
    assert all(torch.equal(each["weights"], second[0]["weights"]) for each in second)


@pytest.mark.e2e
def test_machines_with_homes_of_their_own_keep_their_parts(worlds: Worlds, tmp_path: Path) -> None:
    home = str(tmp_path / "home-{rank}")
    first = worlds(2).run(run_site, 2, home, 3)
    assert names(tmp_path / "home-0/site") == names(tmp_path / "home-1/site") == ["epoch-000002", "epoch-000003"]
    assert names(tmp_path / "home-1/site/epoch-000003") == ["shards"]
    assert "rank-00000.safetensors" not in names(tmp_path / "home-1/site/epoch-000003/shards")
    check_continued(worlds(4).run(run_site, 4, home, 3), first, 3)


def run_and_kill(home: str, while_saving: bool) -> None:
    """Rank 1 dies in its third epoch, or while it writes down what it has after it."""
    with site_rank(plan(2, home, 3)) as rank:
        for _ in range(2):
            train_an_epoch(rank, 2)
            save(rank)
        rank.site.meet()
        if while_saving:
            train_an_epoch(rank, 2)
        if rank.site.rank == 1:
            die = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # noqa: E731
            if not while_saving:
                die()
            from swarmcli.files import durable

            durable.os.fsync = die  # type: ignore[attr-defined]
        save(rank)
        train_an_epoch(rank, 2)


@pytest.mark.e2e
@pytest.mark.parametrize("while_saving", [False, True])
def test_a_killed_rank_costs_the_epoch_under_way(worlds: Worlds, tmp_path: Path, while_saving: bool) -> None:
    home = str(tmp_path / "home")
    survivor, dead = worlds(2).outcomes(run_and_kill, home, while_saving)
    assert "ended with -9" in str(dead.error)
    assert "SiteError" in str(survivor.error)
    again = worlds(2).run(run_site, 2, home, 2)
    assert {each["began"]["epoch"] for each in again} == {2}
    undisturbed = worlds(2).run(run_site, 2, str(tmp_path / "other"), 2)
    check_continued(again, undisturbed, 2)


def run_with_a_full_disk(home: str) -> list[Any]:
    """Rank 1's disk is full at the second save, and has room again at the third."""
    import resource

    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    written = []
    with site_rank(plan(2, home, 3)) as rank:
        for epoch in range(3):
            train_an_epoch(rank, 2)
            ready = Path(home, f"limited-{epoch}")  # rank 1 writes as soon as rank 0 saves, which may be sooner
            if rank.site.rank == 1:
                resource.setrlimit(resource.RLIMIT_FSIZE, (200 if epoch == 1 else limit[0], limit[1]))
                ready.touch()
            while not ready.exists():
                time.sleep(0.01)
            written.append(save(rank) is not None)
    return written


@pytest.mark.e2e
def test_a_full_disk_of_one_rank_costs_a_checkpoint_and_nothing_else(worlds: Worlds, tmp_path: Path) -> None:
    home = tmp_path / "home"
    leader, _ = worlds(2).run(run_with_a_full_disk, str(home))
    assert leader == [True, False, True]
    assert names(home / "site") == ["epoch-000001", "epoch-000003"]


@ranks(2)
def test_checkpoints_beside_training_end_with_the_last_epoch(tmp_path: Path) -> None:
    """Saves in the background, as roles do."""
    home, epochs = tmp_path / "home", 4
    with site_rank(plan(2, str(home), epochs)) as rank:
        if rank.commands is None or rank.shards is None:
            train(rank.steps, rank.net, rank.site.rank, 4, epochs=epochs, turns=2)
            return
        with BackgroundCheckpoints(store_of(rank), rank.net, rank.optimizer, 1, shards=rank.shards) as saver:
            while rank.steps.local_epoch < epochs:
                train_an_epoch(rank, 2)
                saver.look()
        assert names(home / "site")[-1] == "epoch-000004"
        assert len(names(home / "site")) == 2


def run_with_a_slow_disk(home: str) -> dict[str, Any]:
    """Rank 1's disk does nothing until a further epoch is over."""
    over = threading.Event()
    with site_rank(plan(2, home, 2)) as rank:
        train_an_epoch(rank, 2)
        if rank.site.rank == 1:
            from swarmcli.files import tensor_file

            write = tensor_file.write_file
            tensor_file.write_file = lambda *what, **options: over.wait() and write(*what, **options)
            train_an_epoch(rank, 2)
            tensor_file.write_file = write
            over.set()
            return {}
        with ThreadPoolExecutor(1) as pool:
            assert rank.commands is not None and rank.shards is not None
            state, net = rank.optimizer.state_dict(), copy.deepcopy(rank.net)
            rank.shards.copy()
            writing = pool.submit(store_of(rank).write, net, state, 1, shards=rank.shards)
            train_an_epoch(rank, 2)
            return {"ended": writing.done(), "written": str(writing.result()), "epoch": rank.steps.local_epoch}


@pytest.mark.e2e
def test_steps_do_not_wait_for_a_disk_and_what_is_written_is_of_the_moment_it_was_copied(
    worlds: Worlds, tmp_path: Path
) -> None:
    home = str(tmp_path / "home")
    leader, _ = worlds(2).run(run_with_a_slow_disk, home)
    assert (leader["ended"], leader["epoch"]) == (False, 2)
    first = worlds(2).run(run_site, 2, str(tmp_path / "other"), 1)
    check_continued(worlds(2).run(run_site, 2, home, 1), first, 1)
