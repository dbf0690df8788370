"""A sharded site writes checkpoints like any other's, and goes on from them with any number of ranks."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from swarmcli.checkpoints.directory import Keep
from swarmcli.checkpoints.looking import verify
from swarmcli.errors import CheckpointError
from swarmcli.events import Event, Events, Noticed
from swarmcli.peer.checkpoints import BackgroundCheckpoints
from swarmcli.state.unnamed_file import UnnamedFile
from swarmcli.training import CheckpointStore, load_checkpoint
from tests.sharding.processes import Worlds
from tests.sharding.threads import in_threads, ranks
from tests.sites.site_state import differing
from tests.sites.site_training import OPTIMIZERS, Plan, Rank, model, site_rank, train, weights
from tests.suites import soak

SIZES = {2: (4, 4), 4: (2, 2, 2, 2)}
OLD = Path(__file__).parent.parent / "kept" / "site-of-26d1bc3" / "epoch-000003"


def plan(size: int, home: str, epochs: int) -> Plan:
    return Plan("adamw", SIZES[size], epochs=epochs, zero=True, home=home, target=16)


def run_site(size: int, home: str, epochs: int) -> dict[str, Any]:
    """Trains up to `epochs`, saving each. The weights before and after, and rank 0's optimizer."""
    with site_rank(plan(size, home, epochs)) as rank:
        began = {"epoch": rank.steps.local_epoch, "weights": weights(rank.net), "state": state_of(rank)}
        while rank.steps.local_epoch < epochs:
            train_an_epoch(rank, size)
            if rank.optimizer is not None:
                rank.steps.in_step.append(lambda: save(rank))
            rank.steps.step(batch_size=0)
            if rank.optimizer is not None:
                rank.steps.in_step.clear()
        return {"began": began, "weights": weights(rank.net), "state": state_of(rank)}


def state_of(rank: Rank) -> Any:
    """The whole optimizer's, at rank 0, while the others take a step."""
    found: list[Any] = []
    if rank.optimizer is not None:
        rank.steps.in_step.append(lambda: found.append(rank.optimizer.state_dict()["state"]))
    rank.steps.step(batch_size=0)
    if rank.optimizer is None:
        return {}
    rank.steps.in_step.clear()
    return {index: dict(values) for index, values in found[0].items()}


def train_an_epoch(rank: Rank, size: int) -> None:
    train(rank.steps, rank.net, rank.site.rank, SIZES[size][0], epochs=rank.steps.local_epoch + 1, turns=2)


def store_of(home: str) -> CheckpointStore:
    return CheckpointStore(Path(home, "site"), "site", keep=Keep(2))


def save(rank: Rank) -> None:
    home = str(rank.optimizer.opt.statistics.spool)
    assert store_of(home).write(rank.net, rank.optimizer.state_dict(), rank.optimizer.local_epoch)


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir() if path.is_dir() and not path.is_symlink())


def check_continued(second: list[dict[str, Any]], first: list[dict[str, Any]], epoch: int) -> None:
    assert {each["began"]["epoch"] for each in second} == {epoch}
    assert differing(second[0]["began"]["state"], first[0]["state"]) == []
    assert all(torch.equal(each["began"]["weights"], first[0]["weights"]) for each in second)


@pytest.mark.parametrize(("before", "after"), [(2, 4), *soak([(2, 2), (4, 2)])])
def test_a_site_goes_on_with_other_ranks_as_if_nothing_had_happened(tmp_path: Path, before: int, after: int) -> None:
    home = str(tmp_path / "home")
    first = in_threads(before, run_site, before, home, 3)
    assert names(tmp_path / "home/site") == ["epoch-000002", "epoch-000003"]
    second = in_threads(after, run_site, after, home, 4)
    check_continued(second, first, 3)
    assert all(torch.equal(each["weights"], second[0]["weights"]) for each in second)
    check_alone(tmp_path / "home/site/epoch-000004", second)


def check_alone(place: Path, ranks: list[dict[str, Any]]) -> None:
    """A single process goes on from what a site wrote."""
    checkpoint, net = load_checkpoint(place, "site"), model(1)
    checkpoint.restore_model(net)
    assert torch.equal(weights(net), ranks[0]["weights"])
    made, settings = OPTIMIZERS["adamw"]
    optimizer = made(net.parameters(), **settings)
    optimizer.load_state_dict({key: checkpoint.optimizer[key] for key in ("state", "param_groups")})
    assert differing(optimizer.state_dict()["state"], ranks[0]["state"]) == []


@ranks(2)
def test_a_site_goes_on_from_what_a_former_version_wrote_in_shards(tmp_path: Path) -> None:
    """The kept one was written by two ranks of the build 26d1bc3 in three epochs of this training."""
    home = tmp_path / "home"
    if torch.distributed.get_rank() == 0:
        (home / "site").mkdir(parents=True)
        (home / "site" / OLD.name).symlink_to(OLD)
    torch.distributed.barrier()
    with site_rank(plan(2, str(home), 3)) as rank:
        assert rank.steps.local_epoch == 3
        state = state_of(rank)
        if rank.optimizer is not None:
            assert differing(state, load_checkpoint(OLD, "site").optimizer["state"]) == []
            assert {int(each["step"]) for each in state.values()} == {3}
            assert {each["exp_avg"].shape for each in state.values()} == {each.shape for each in rank.net.parameters()}


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("rank-00001.safetensors", "rank-00001.safetensors is damaged: .* is not what was written; use an older"),
        ("complete.msgpack", "complete.msgpack is damaged, or belongs to another checkpoint"),
        ("", "rank-00001.safetensors is missing: it was written on .*; copy it from there"),
    ],
)
def test_shards_that_cannot_be_used_are_named_with_what_helps(tmp_path: Path, name: str, words: str) -> None:
    place = tmp_path / OLD.name
    for file in OLD.rglob("*"):
        if file.is_file():
            (place / file.relative_to(OLD)).parent.mkdir(parents=True, exist_ok=True)
            (place / file.relative_to(OLD)).write_bytes(file.read_bytes())
    assert verify(place) == ""
    if name:
        data = bytearray((place / "shards" / name).read_bytes())
        data[-3] ^= 1
        (place / "shards" / name).write_bytes(data)
    else:
        (place / "shards" / "rank-00001.safetensors").unlink()
    with pytest.raises(CheckpointError, match=words):
        load_checkpoint(place)
    assert name in verify(place)


def run_and_kill(home: str) -> None:
    """Rank 1 dies while it sends what it has after its third epoch."""
    with site_rank(plan(2, home, 3)) as rank:
        for epoch in range(3):
            if epoch == 2 and rank.site.rank == 1:
                from swarmcli.sites import statistics

                statistics.send_tensors = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[assignment]
            train_an_epoch(rank, 2)
            if rank.optimizer is not None:
                rank.steps.in_step[:] = [lambda: save(rank)]
            rank.steps.step(batch_size=0)
            if rank.optimizer is not None:
                rank.steps.in_step.clear()


@pytest.mark.e2e
def test_a_killed_rank_costs_the_epoch_under_way(worlds: Worlds, tmp_path: Path) -> None:
    survivor, dead = worlds(2).outcomes(run_and_kill, str(tmp_path / "home"))
    assert "ended with -9" in str(dead.error)
    assert "SiteError" in str(survivor.error)
    assert names(tmp_path / "home/site") == ["epoch-000001", "epoch-000002"]


@ranks(2)
def test_checkpoints_beside_training_end_with_the_last_epoch_and_cost_nothing_where_the_disk_is_full(
    tmp_path: Path,
) -> None:
    """Saves in the background, as roles do."""
    home, epochs = tmp_path / "home", 4
    with site_rank(plan(2, str(home), epochs)) as rank:
        if rank.optimizer is None:
            train(rank.steps, rank.net, 1, 4, epochs=epochs, turns=2)
            while not rank.steps.stopped.is_set():
                rank.steps.step(batch_size=0)
            return
        events, told = Events(), list[Event]()
        events.subscribe(told.append)
        saver = BackgroundCheckpoints(
            store_of(str(home)), rank.net, rank.optimizer, 1, copy=lambda state: state, events=events
        )
        with saver:
            rank.steps.in_step.append(saver.look)
            with patch.object(UnnamedFile, "write", side_effect=OSError("no space")):
                train_an_epoch(rank, 2)
            assert [each.text for each in told if isinstance(each, Noticed)] == [
                "no checkpoint of epoch 1 is written or evaluated: no space"
            ]
            train(rank.steps, rank.net, 0, 4, epochs=epochs, turns=2)
            rank.steps._wants_to_stop.set()
            rank.steps.step(batch_size=0)
        assert names(home / "site")[-1] == "epoch-000004"
        assert len(names(home / "site")) == 2
