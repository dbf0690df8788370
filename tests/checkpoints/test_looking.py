from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from swarmcli.checkpoints.directory import CheckpointDirectory, Keep
from swarmcli.checkpoints.looking import listing, verify

from .small_checkpoints import put


@pytest.fixture
def checkpoints(tmp_path: Path) -> CheckpointDirectory:
    checkpoints = CheckpointDirectory(tmp_path / "run" / "monitor-1" / "checkpoints", Keep(1, 0, 1))
    for epoch, loss in ((1, 1.0), (2, 2.0), (3, None)):
        put(checkpoints, epoch, loss)
    checkpoints.mend()
    return checkpoints


def test_what_is_missing_or_cut_off_is_seen_at_once_and_what_is_changed_by_reading(
    checkpoints: CheckpointDirectory,
) -> None:
    third, second, first = reversed(checkpoints.all())
    (third / "model.safetensors").unlink()
    (second / "model.safetensors").write_bytes(b"wei")
    (first / "model.safetensors").write_bytes(b"weighed")
    problems = [info.problem for info in listing(checkpoints.path)]
    assert problems == ["model.safetensors is missing", "model.safetensors has 3 of 7 bytes", ""]
    info = listing(checkpoints.path)[0]
    assert info.written == 1_790_000_003 and info.bytes > 10
    assert "cannot be read" in verify(third)
    assert "is damaged: its content is not what was written" in verify(first)


def test_a_damaged_manifest_is_a_problem_and_no_error(checkpoints: CheckpointDirectory) -> None:
    path = checkpoints.all()[0]
    assert verify(path) == ""
    (path / "checkpoint.json").write_text('{"format": 1}')
    (info,) = (info for info in listing(checkpoints.path) if info.path == path)
    assert info.problem == verify(path) != "" and info.run_id == ""


def test_a_name_that_no_file_can_have_is_a_problem_and_no_error(checkpoints: CheckpointDirectory) -> None:
    path = checkpoints.all()[0]
    manifest = json.loads((path / "checkpoint.json").read_text())
    del manifest["digest"]
    manifest["sha256"]["a\0b"] = ""
    (path / "checkpoint.json").write_text(json.dumps(manifest))
    assert "cannot be read" in verify(path)
    (path / "evaluation.json").write_text(f'{{"loss": {"9" * 400}}}')
    assert listing(checkpoints.path)[-1].loss is None, "no float holds it"


def test_what_is_removed_beside_a_look_at_it_is_left_out(
    checkpoints: CheckpointDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its directory was seen, and is gone when it is read: a walk meets that before or behind the file's name."""
    first, second, third = checkpoints.all()
    scan, goes = os.scandir, {str(checkpoints.path): first, str(second): second}

    def remove_behind(path: Any = ".") -> Any:
        found = scan(path)
        if (gone := goes.pop(str(path), None)) is not None:
            shutil.rmtree(gone)
        return found

    monkeypatch.setattr(os, "scandir", remove_behind)
    assert [info.path for info in listing(checkpoints.path)] == [third]
