from __future__ import annotations

import json
import math
import os
import shutil
from pathlib import Path

import pytest

from swarmcli.checkpoints.directory import CheckpointDirectory, Keep, kept, rules_of
from swarmcli.checkpoints.layout import find_checkpoint, read_manifest

from .small_checkpoints import fill, put


@pytest.fixture
def checkpoints(tmp_path: Path) -> CheckpointDirectory:
    return CheckpointDirectory(tmp_path / "checkpoints", Keep(2, 0, 1))


def names(checkpoints: CheckpointDirectory) -> list[str]:
    return [path.name[-1] for path in checkpoints.all()]


def test_the_best_stays_and_has_a_link(checkpoints: CheckpointDirectory) -> None:
    for epoch, loss in ((1, 3.0), (2, 1.0), (3, 2.0), (4, 2.5)):
        put(checkpoints, epoch, loss)
        checkpoints.prune()
    assert names(checkpoints) == ["2", "3", "4"]
    assert (checkpoints.linked("best"), checkpoints.linked("latest")) == ("epoch-000002", "epoch-000004")
    assert find_checkpoint(checkpoints.path / "best").name == "epoch-000002"
    assert checkpoints.remember_loss(put(checkpoints, 5), 0.5, 256), "it says that this is the best one now"
    assert [path.name for path in checkpoints.prune()] == ["epoch-000002", "epoch-000003"]


def test_another_checkpoint_of_the_best_epoch_has_not_its_loss(checkpoints: CheckpointDirectory) -> None:
    for epoch, loss in ((1, 3.0), (2, 1.0)):
        put(checkpoints, epoch, loss)
    put(checkpoints, 2)
    assert checkpoints.linked("best") == "epoch-000001"
    put(checkpoints, 3, float("nan"))
    (checkpoints.path / "epoch-000002" / "evaluation.json").write_text('{"loss": "0", "samples"')
    assert checkpoints.linked("best") == "epoch-000001" and not checkpoints.prune(), "what is no number is no best one"


def test_links_move_before_what_they_name_is_removed(checkpoints: CheckpointDirectory) -> None:
    for epoch, loss in ((1, 3.0), (2, 1.0)):
        put(checkpoints, epoch, loss)
    checkpoints.remove([checkpoints.path / "epoch-000002"])
    assert (checkpoints.linked("best"), checkpoints.linked("latest")) == ("epoch-000001", "epoch-000001")
    checkpoints.remove(checkpoints.all())
    assert (checkpoints.linked("best"), checkpoints.linked("latest")) == (None, None)


def test_who_looks_at_the_directory_knows_what_stays_there(checkpoints: CheckpointDirectory) -> None:
    put(checkpoints, 1)
    checkpoints.mend()
    assert CheckpointDirectory(checkpoints.path).keep == Keep(2, 0, 1)
    for damaged in ("{", '{"newest": -1, "every": 0, "best": 0}', "[]", json.dumps({"newest": "a"})):
        (checkpoints.path / "keep.json").write_text(damaged)
        assert rules_of(checkpoints.path) == Keep()


def test_a_checkpoint_that_made_way_for_one_that_never_came_has_its_name_again(
    checkpoints: CheckpointDirectory,
) -> None:
    put(checkpoints, 1)
    (checkpoints.path / "epoch-000001").rename(checkpoints.path / "epoch-000001.replaced")
    assert find_checkpoint(checkpoints.path).name == "epoch-000001.replaced"
    checkpoints.mend()
    assert names(checkpoints) == ["1"] and checkpoints.linked("latest") == "epoch-000001"
    fill(checkpoints.path / "epoch-000001.replaced", 1)
    checkpoints.mend()
    assert not (checkpoints.path / "epoch-000001.replaced").exists()


def test_a_link_that_was_not_moved_in_time_is_moved(checkpoints: CheckpointDirectory) -> None:
    for epoch in (1, 2):
        put(checkpoints, epoch)
    checkpoints._point("latest", checkpoints.path / "epoch-000001")
    checkpoints.mend()
    assert checkpoints.linked("latest") == "epoch-000002"
    # The run was set back: what was written last is an older epoch.
    os.utime(put(checkpoints, 1) / "checkpoint.json", (1_790_000_009, 1_790_000_009))
    checkpoints.mend()
    assert checkpoints.linked("latest") == "epoch-000001"


def test_a_link_that_a_copying_program_made_a_directory_of_is_a_link_again(checkpoints: CheckpointDirectory) -> None:
    place = put(checkpoints, 1)
    (checkpoints.path / "latest").unlink()
    shutil.copytree(place, checkpoints.path / "latest")
    put(checkpoints, 2)
    checkpoints.mend()
    assert names(checkpoints) == ["1", "2"] and read_manifest(checkpoints.path / "latest")["epoch"] == 2
    checkpoints.remove(checkpoints.all())
    fill(checkpoints.path / "latest", 3)
    checkpoints.mend()
    assert names(checkpoints) == ["3"] and checkpoints.linked("latest") == "epoch-000003", "nothing else was copied"


def test_what_a_killed_process_left_goes(checkpoints: CheckpointDirectory) -> None:
    put(checkpoints, 1)
    left = [".epoch-000002-999999999", f".latest-{os.getpid()}", ".keep.json.my-host-999999999"]
    fill(checkpoints.path / left[0], 2)
    for name in left[1:]:
        (checkpoints.path / name).write_text("x")
    checkpoints.mend()
    assert sorted(path.name for path in checkpoints.path.iterdir()) == ["epoch-000001", "keep.json", "latest"]
    assert read_manifest(checkpoints.path / "latest")["epoch"] == 1


def epochs(*numbers: int) -> dict[int, float | None]:
    return dict.fromkeys(numbers)


@pytest.mark.parametrize(
    ("found", "rules", "latest", "expected"),
    [
        (epochs(1, 2, 9, 10), Keep(2), None, {9: ("of the newest 2",), 10: ("of the newest 2",)}),
        (epochs(8, 9, 3), Keep(2), 3, {3: ("of the newest 2",), 9: ("of the newest 2",)}),  # the run was set back
        (epochs(10, 100, 110, 205, 210, 300), Keep(1, 100), None, {100: 1, 205: 1, 300: 2}),
        (
            {1: 1.0, 2: 2.0, 3: math.nan, 4: 1.0, 5: None},  # of equal losses the later is better, none is no number
            Keep(1, 0, 1),
            None,
            {4: ("best",), 5: ("newest",)},
        ),
        (epochs(), Keep(), None, {}),
    ],
)
def test_what_stays_and_why(
    found: dict[int, float | None], rules: Keep, latest: int | None, expected: dict[int, object]
) -> None:
    staying = kept(found, rules, latest)
    counts = {epoch: len(why) for epoch, why in staying.items()}
    assert staying == expected or counts == expected
