from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from swarmcli.checkpoints.looking import listing, verify
from swarmcli.checkpoints.shelf import Keep, Shelf

from .shelves import put


@pytest.fixture
def shelf(tmp_path: Path) -> Shelf:
    shelf = Shelf(tmp_path / "run" / "monitor-1" / "checkpoints", Keep(1, 0, 1))
    for epoch, loss in ((1, 1.0), (2, 2.0), (3, None)):
        put(shelf, epoch, loss)
    shelf.mend()
    return shelf


def test_a_list_tells_which_there_are_and_why_they_stay(tmp_path: Path, shelf: Shelf) -> None:
    put(Shelf(tmp_path / "run" / "trainer-1" / "checkpoints"), 9, run_id="other")
    found = listing(tmp_path)
    assert [(info.run_id, info.epoch, info.loss, info.kept, info.latest, info.best) for info in found] == [
        ("run", 3, None, ("newest",), True, False),
        ("run", 2, 2.0, (), False, False),
        ("run", 1, 1.0, ("best",), False, True),
        ("other", 9, None, ("newest",), True, False),
    ]
    assert found[0].written == 1_790_000_003 and found[0].bytes > 100 and not found[0].problem


def test_what_is_missing_or_cut_off_is_seen_at_once_and_what_is_changed_by_reading(shelf: Shelf) -> None:
    third, second, first = reversed(shelf.all())
    (third / "model.safetensors").unlink()
    (second / "model.safetensors").write_bytes(b"wei")
    (first / "model.safetensors").write_bytes(b"weighed")
    problems = [info.problem for info in listing(shelf.directory)]
    assert problems == ["model.safetensors is missing", "model.safetensors has 3 of 7 bytes", ""]
    assert "cannot be read" in verify(third)
    assert "is damaged: its content is not what was written" in verify(first)


def test_a_damaged_manifest_is_a_problem_and_no_error(shelf: Shelf) -> None:
    path = shelf.all()[0]
    assert verify(path) == ""
    (path / "checkpoint.json").write_text('{"format": 1}')
    (info,) = (info for info in listing(shelf.directory) if info.path == path)
    assert info.problem == verify(path) != "" and info.run_id == ""


def test_a_loss_that_no_float_holds_is_none(shelf: Shelf) -> None:
    (shelf.all()[0] / "evaluation.json").write_text(f'{{"loss": {"9" * 400}}}')
    assert listing(shelf.directory)[-1].loss is None


def test_a_name_that_no_file_can_have_is_a_problem_and_no_error(shelf: Shelf) -> None:
    path = shelf.all()[0]
    manifest = json.loads((path / "checkpoint.json").read_text())
    del manifest["digest"]
    manifest["sha256"]["a\0b"] = ""
    (path / "checkpoint.json").write_text(json.dumps(manifest))
    assert "cannot be read" in verify(path)


def test_what_is_removed_beside_a_look_at_it_is_left_out(shelf: Shelf, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its directory was seen, and is gone when it is read: a walk meets that before or behind the file's name."""
    first, second, third = shelf.all()
    scan, goes = os.scandir, {str(shelf.directory): first, str(second): second}

    def remove_behind(path: Any = ".") -> Any:
        found = scan(path)
        if (gone := goes.pop(str(path), None)) is not None:
            shutil.rmtree(gone)
        return found

    monkeypatch.setattr(os, "scandir", remove_behind)
    assert [info.path for info in listing(shelf.directory)] == [third]
