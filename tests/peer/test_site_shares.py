"""Checkpoints of sites and of single processes, read by either."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from swarmcli.errors import CheckpointError
from swarmcli.peer.site_state import load_newest
from swarmcli.sites.checkpoint import SiteShards
from swarmcli.sites.commands import CommandFollower, LeaderCommands
from swarmcli.sites.site import Site
from swarmcli.training import CheckpointStore, load_checkpoint
from tests.sharding.files.jobs import differing, groups, parameters, plain, reference, sharded, train, whole
from tests.sharding.processes import Worlds

pytestmark = pytest.mark.e2e

SWARM = {"epoch": 3, "lineage": "ab" * 32, "scheduler": {"last_epoch": 3}, "gradients": {"g": torch.ones(2)}}


def net(made: list[nn.Parameter]) -> nn.Module:
    return nn.ParameterList(made)


def write_as_site(home: str, steps: int) -> dict[str, Any]:
    """What a site writes, without the training around it."""
    site = Site.form(timeout=10.0)
    zero = sharded(site.commands)
    train(zero, steps)
    commands = LeaderCommands(site) if site.rank == 0 else None
    shards = SiteShards(site, Path(home), zero, commands)
    if commands is not None:
        shards.copy()
        state = {"state": {}, "param_groups": torch.optim.AdamW(groups(parameters())).state_dict()["param_groups"]}
        store = CheckpointStore(Path(home, "site"), "run")
        assert store.write(net(zero.parameters), {**state, "swarm": SWARM}, steps, shards=shards) is not None  # type: ignore[arg-type]
        commands.close()
    else:
        follower = CommandFollower(site, shards.handlers)
        follower.start()
        follower.join()
    shards.close()
    site.close()
    return plain(zero.local_state())


def read_as_site(home: str, paths: list[str]) -> dict[str, Any]:
    site = Site.form(timeout=10.0)
    zero = sharded(site.commands)
    before = plain(zero.local_state())
    try:
        checkpoint = load_newest(site, Path(home), zero, map(Path, paths if site.rank == 0 else []), "run")
    except CheckpointError as error:
        assert plain(zero.local_state()) == before == {}
        return {"error": str(error)}
    finally:
        site.close()
    return {
        "state": plain(zero.local_state()),
        "epoch": checkpoint.epoch if checkpoint else None,
        "own": checkpoint.optimizer["state"] if checkpoint else None,
        "swarm": checkpoint.optimizer["swarm"] if checkpoint else None,
    }


def write_alone(directory: Path, steps: int) -> Path:
    optimizer = reference(steps)
    made = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    path = CheckpointStore(directory, "run").write(net(made), {**optimizer.state_dict(), "swarm": SWARM}, steps)
    assert path is not None
    return path


def expected(steps: int) -> dict[int, Any]:
    return plain(reference(steps).state_dict()["state"])


def test_a_single_process_reads_what_a_site_wrote(worlds: Worlds, tmp_path: Path) -> None:
    worlds(4).run(write_as_site, str(tmp_path), 3)
    checkpoint = load_checkpoint(tmp_path / "site/epoch-000003", "run")
    assert differing(checkpoint.optimizer["state"], expected(3)) == []
    assert differing(checkpoint.optimizer["swarm"], SWARM) == []
    alone = torch.optim.AdamW(groups(parameters()))
    checkpoint.restore_model(net([parameter for group in alone.param_groups for parameter in group["params"]]))
    alone.load_state_dict(checkpoint.optimizer)
    train(alone, 1, first=3)
    after = reference(4).param_groups
    for ours, theirs in zip(alone.param_groups, after, strict=True):
        assert all(map(torch.equal, ours["params"], theirs["params"]))


def test_a_site_reads_what_a_single_process_wrote(worlds: Worlds, tmp_path: Path) -> None:
    path = write_alone(tmp_path, 2)
    told = worlds(2).run(read_as_site, str(tmp_path), [str(path)])
    assert differing(whole([each["state"] for each in told]), expected(2)) == []
    assert differing(told[0]["own"], told[0]["state"]) == []  # what rank 0's optimizer is to load
    assert [each["epoch"] for each in told] == [2, None]
    assert differing(told[0]["swarm"], SWARM) == []


@pytest.mark.parametrize("size", [1, 2, 4])
def test_a_site_reads_what_a_site_of_another_size_wrote(worlds: Worlds, tmp_path: Path, size: int) -> None:
    worlds(2).run(write_as_site, str(tmp_path), 3)
    told = worlds(size).run(read_as_site, str(tmp_path), [str(tmp_path / "site/epoch-000003")])
    assert differing(whole([each["state"] for each in told]), expected(3)) == []


def damage(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[-3] ^= 1
    file.write_bytes(data)


@pytest.mark.parametrize(
    "name", ["model.safetensors", "checkpoint.json", "shards/rank-00001.safetensors", "shards/complete.msgpack"]
)
def test_a_damaged_file_is_named_and_the_older_checkpoint_read(worlds: Worlds, tmp_path: Path, name: str) -> None:
    older = write_alone(tmp_path / "older", 2)
    worlds(2).run(write_as_site, str(tmp_path), 3)
    newer = tmp_path / "site/epoch-000003"
    damage(newer / name)
    told = worlds(2).run(read_as_site, str(tmp_path), [str(newer), str(older)])
    assert differing(whole([each["state"] for each in told]), expected(2)) == []
    for each in worlds(2).run(read_as_site, str(tmp_path), [str(newer)]):
        assert str(newer / name) in each["error"]
    with pytest.raises(CheckpointError, match=str(newer / name)):
        load_checkpoint(newer)


def test_statistics_larger_than_their_parameters_are_refused_at_all_ranks(worlds: Worlds, tmp_path: Path) -> None:
    optimizer = reference(1)
    state = optimizer.state_dict()
    state["state"][0]["exp_avg"] = torch.zeros(100, 100)
    path = CheckpointStore(tmp_path, "run").write(net(parameters()), state, 1)
    for each in worlds(2).run(read_as_site, str(tmp_path), [str(path)]):
        assert "0/exp_avg is larger than its parameter" in each["error"]
