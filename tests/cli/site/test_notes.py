from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from swarmcli.cli.site.notes import VARIABLE, Network, Notes


def test_a_process_that_swarm_did_not_start_has_no_notes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    assert Notes.found() is None
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    found = Notes.found()
    assert found is not None and found.directory == tmp_path


def test_before_anything_was_noted_nothing_is_known(tmp_path: Path) -> None:
    notes = Notes(tmp_path)
    assert notes.network == Network() and notes.launcher is None
    assert (notes.epoch, notes.home, notes.broken, notes.stop) == (0, None, set(), None)


def test_what_one_notes_the_other_reads(tmp_path: Path) -> None:
    notes, other = Notes(tmp_path), Notes(tmp_path)
    notes.epoch, notes.home, notes.stop = 7, tmp_path / "trainer-1", signal.SIGUSR1
    notes.launcher = 77
    assert other.launcher == 77
    notes.network = Network(31330, ("tcp://10.0.0.1:4",))
    notes.break_up()
    assert other.network == notes.network and other.network.port == 31330
    assert (other.epoch, other.home, other.broken) == (7, tmp_path / "trainer-1", {os.getpid()})
    assert other.stop == signal.SIGUSR1


def test_one_process_tells_in_each_life_of_a_site(tmp_path: Path) -> None:
    notes = Notes(tmp_path)
    notes.epoch = 3
    notes.break_up()
    assert not notes.told
    assert [notes.first_to_tell(), Notes(tmp_path).first_to_tell()] == [True, False]
    assert notes.told
    notes.begin()
    assert notes.first_to_tell()
    assert not notes.broken and notes.epoch == 3


def test_notes_whose_launcher_has_removed_them_are_nothing_to_fail_of(tmp_path: Path) -> None:
    notes = Notes(tmp_path / "removed")
    notes.break_up()
    notes.epoch = 3
    assert (notes.first_to_tell(), notes.told, notes.epoch, notes.broken) == (False, False, 0, set())
