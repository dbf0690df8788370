"""What stays in a store, and how it has the processes of a site write with it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from torch import nn

from swarmcli.errors import CheckpointError, SiteError
from swarmcli.events import Event, Events, Noticed
from swarmcli.training import CheckpointStore


class FakeShards:
    """Processes that write a file each, or fail."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error
        self.settled: list[tuple[str, str, list[str]]] = []

    def copy(self) -> None:
        pass

    def write(self, directory: Path, epoch: int) -> str:
        assert directory.name == "shards"
        if self.error is not None:
            raise self.error
        directory.mkdir()
        (directory / "rank-00000.safetensors").write_bytes(b"x" * 100)
        return "ab" * 32

    def settle(self, directory: Path, name: str, kept: Sequence[str]) -> None:
        self.settled.append((directory.name.rpartition("-")[0], name, list(kept)))


@pytest.fixture
def events() -> Events:
    return Events()


@pytest.fixture
def store(tmp_path: Path, events: Events) -> CheckpointStore:
    return CheckpointStore(tmp_path, "run", keep=2, events=events)


def names(store: CheckpointStore) -> list[str]:
    return sorted(path.name for path in store.directory.iterdir())


def test_the_checkpoint_holds_the_shards_and_the_processes_hear_its_name(store: CheckpointStore) -> None:
    shards = FakeShards()
    for epoch in (1, 2, 3):
        path = store.write(nn.Linear(2, 2), {"state": {0: {"x": 1.0}}}, epoch, shards=shards)
    assert path is not None
    assert (path / "shards/rank-00000.safetensors").exists()
    assert '"x"' not in (path / "checkpoint.json").read_text()  # the statistics are in the shards alone
    assert shards.settled[-1] == (".epoch-000003", "epoch-000003", ["epoch-000002", "epoch-000003"])
    assert names(store) == ["epoch-000002", "epoch-000003"]


def test_a_process_that_cannot_write_costs_the_checkpoint(store: CheckpointStore, events: Events) -> None:
    seen: list[Event] = []
    events.subscribe(seen.append)
    shards = FakeShards(CheckpointError("rank 1 could not write: no space"))
    assert store.write(nn.Linear(2, 2), {}, 1, shards=shards) is None
    assert isinstance(seen[-1], Noticed) and "no space" in seen[-1].text
    assert shards.settled == [(".epoch-000001", "", [])]
    assert names(store) == []


def test_a_process_that_is_gone_is_the_callers_affair_and_leaves_nothing(store: CheckpointStore) -> None:
    with pytest.raises(SiteError, match="rank 1 is gone"):
        store.write(nn.Linear(2, 2), {}, 1, shards=FakeShards(SiteError("rank 1 is gone")))
    assert names(store) == []


def test_what_was_just_written_stays_beside_later_epochs(store: CheckpointStore) -> None:
    # A run that was set back, say by --resume with an older checkpoint.
    for epoch in (8, 9, 3, 4):
        assert store.write(nn.Linear(2, 2), {}, epoch) is not None
        assert f"epoch-{epoch:06d}" in names(store)
    assert names(store) == ["epoch-000004", "epoch-000009"]


def test_checkpoints_of_a_history_that_is_over_are_removed(store: CheckpointStore) -> None:
    for epoch in (8, 9):
        store.write(nn.Linear(2, 2), {}, epoch)
    store.remove_after(8)
    assert names(store) == ["epoch-000008"]
    store.remove_after(0)
    assert store.all() == []
    CheckpointStore(store.directory / "none", "run").remove_after(0)
