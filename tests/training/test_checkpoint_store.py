"""What stays in a store."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch import nn

from swarmcli.checkpoints.directory import Keep
from swarmcli.checkpoints.layout import find_checkpoint
from swarmcli.errors import CheckpointError
from swarmcli.events import Event, Events, Noticed
from swarmcli.training import CheckpointStore, load_checkpoint


@pytest.fixture
def events() -> Events:
    return Events()


@pytest.fixture
def store(tmp_path: Path, events: Events) -> CheckpointStore:
    return CheckpointStore(tmp_path, "run", keep=Keep(2), events=events)


def names(store: CheckpointStore) -> list[str]:
    return sorted(path.name for path in store.directory.iterdir() if path.name not in ("latest", "keep.json"))


def linked(store: CheckpointStore) -> str | None:
    """The checkpoint that `latest` names; None: there is no such link."""
    link = store.directory / "latest"
    return str(link.readlink()) if link.is_symlink() else None


def test_latest_follows_what_is_written_and_what_is_left_of_a_history_that_is_over(store: CheckpointStore) -> None:
    for epoch in (8, 9, 8):  # the last after --resume with an older one
        store.write(nn.Linear(2, 2), {}, epoch)
        assert linked(store) == f"epoch-{epoch:06d}"
        assert find_checkpoint(store.directory / "latest") == store.directory / f"epoch-{epoch:06d}"
    assert (store.directory / "latest" / "model.safetensors").is_file()
    for last, left in ((9, ["epoch-000008", "epoch-000009"]), (8, ["epoch-000008"]), (0, [])):
        store.remove_after(last)
        assert names(store) == left and linked(store) == (left[-1] if left and last != 9 else linked(store))
    assert linked(store) is None and not [each for each in store.directory.iterdir() if each.name.startswith(".")]
    CheckpointStore(store.directory / "none", "run").remove_after(0)


def test_without_symbolic_links_a_file_holds_the_name(store: CheckpointStore, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: Any, **options: Any) -> None:
        raise OSError("symbolic link privilege not held")

    monkeypatch.setattr(Path, "symlink_to", refuse)
    for epoch in (1, 2):
        store.write(nn.Linear(2, 2), {}, epoch)
        assert (store.directory / "latest").read_text() == f"epoch-{epoch:06d}\n"
    assert find_checkpoint(store.directory / "latest") == store.directory / "epoch-000002"
    (store.directory / "latest").write_text("../../elsewhere")
    with pytest.raises(CheckpointError, match="latest names no checkpoint; name one beside it"):
        find_checkpoint(store.directory / "latest")


def test_a_directory_called_latest_costs_the_link_only(
    store: CheckpointStore, caplog: pytest.LogCaptureFixture
) -> None:
    (store.directory / "latest").mkdir()
    assert store.write(nn.Linear(2, 2), {}, 1) is not None
    assert "latest does not name the newest checkpoint" in caplog.text
    assert not (store.directory / "latest").is_symlink() and names(store) == ["epoch-000001"]


def test_what_is_beside_the_model_is_no_part_of_what_training_goes_on_from(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def describe(directory: Path, epoch: int, samples: int | None) -> None:
        if samples is None:
            raise RuntimeError("Already borrowed")
        (directory / "README.md").write_text(f"epoch {epoch}, {samples} samples")

    store = CheckpointStore(tmp_path, "run", describe=describe)
    path = store.write(nn.Linear(2, 2), {"swarm": {"samples_seen": 77}}, 5)
    assert path is not None and (path / "README.md").read_text() == "epoch 5, 77 samples"
    (path / "README.md").write_text("edited")
    assert load_checkpoint(path).epoch == 5
    path = store.write(nn.Linear(2, 2), {}, 6)
    assert path is not None and load_checkpoint(path).epoch == 6
    assert "epoch 6 lacks its tokenizer or model card: Already borrowed" in caplog.text


def test_older_ones_make_room_within_the_limit_and_the_newest_stays(tmp_path: Path, events: Events) -> None:
    room, model, told = [1e9], nn.Linear(100, 100), list[Event]()
    events.subscribe(told.append)

    def left() -> float:
        return room[0] + 40_000 * (3 - len(store.checkpoints.all()))

    store = CheckpointStore(tmp_path, "run", keep=Keep(9), events=events, room=left)
    for epoch in (1, 2, 3):
        store.write(model, {}, epoch)
    room[0] = 1_000.0
    assert store.write(model, {}, 4) is not None
    assert names(store) == ["epoch-000002", "epoch-000003", "epoch-000004"]
    room[0] = -90_000.0
    assert store.write(model, {}, 5) is None and names(store) == ["epoch-000004"]
    assert any(isinstance(each, Noticed) and "limit for the disk" in each.text for each in told)
