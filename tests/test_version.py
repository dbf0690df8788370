from __future__ import annotations

import subprocess
from importlib import metadata
from pathlib import Path

import pytest

import swarmcli
from swarmcli.version import build, unlike

PROJECT = '[project]\nname = "swarmcli"\nversion = "7.1"\n'


def git(*words: str | Path) -> str:
    named = ("-c", "user.name=a", "-c", "user.email=a@example.org")
    return subprocess.run(["git", *named, *map(str, words)], capture_output=True, text=True, check=True).stdout.strip()


def test_it_is_that_of_pyproject_with_the_commit_where_git_knows_it(tmp_path: Path) -> None:
    origin, shallow, copy = tmp_path / "origin", tmp_path / "shallow", tmp_path / "origin" / "copy"
    git("init", "-q", origin)
    (origin / "pyproject.toml").write_text(PROJECT)
    git("-C", origin, "add", ".")
    for text in ("first", "second"):
        git("-C", origin, "commit", "-q", "--allow-empty", "-m", text)
    git("clone", "-q", "--depth", "1", f"file://{origin}", shallow)
    commit = git("-C", origin, "rev-parse", "--short=8", "HEAD")
    assert build(origin) == build(shallow) == f"7.1+g{commit}"
    copy.mkdir()  # within somebody else's repository
    (copy / "pyproject.toml").write_text(PROJECT)
    assert build(copy) == "7.1"


def test_without_git_and_as_a_wheel_it_is_the_release(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert build(tmp_path / "site-packages") == metadata.version("swarmcli")
    (tmp_path / ".git").mkdir()  # git finds none in it, and then there is no git
    (tmp_path / "pyproject.toml").write_text(PROJECT)
    assert build.__wrapped__(tmp_path) == "7.1"
    monkeypatch.setenv("PATH", str(tmp_path))
    assert build.__wrapped__(tmp_path) == "7.1"
    assert build().partition("+")[0] == swarmcli.__version__ and unlike(build()) == ""
