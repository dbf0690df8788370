from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from swarmcli.cli.processes import Children


def test_no_child_outlives_its_block(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), Children() as children:
        child = children.start("version", ["log", "--follow", str(tmp_path / "none")], tmp_path / "log")
        raise ZeroDivisionError
    assert child.returncode is not None
    assert not psutil.pid_exists(child.pid)


def test_a_killed_child_shows_its_signal(tmp_path: Path) -> None:
    with Children() as children:
        child = children.start("help", ["--help"], tmp_path / "log")
        child.kill()
        assert child.returncode == -9


def test_last_words_are_the_end_of_the_log(tmp_path: Path) -> None:
    with Children() as children:
        child = children.start("wrong", ["jion"], tmp_path / "log")
        assert child.wait(60) == 2
        assert "jion" in child.last_words()
