"""A stranger who has a link and nothing else, as a real process in an empty directory."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from swarmcli.cli.processes import Child, Children
from tests.end_to_end.forked import command
from tests.end_to_end.swarm import TEXT, Swarm

pytestmark = pytest.mark.e2e

MakeSwarm = Callable[..., Swarm]


class Stranger:
    """A computer of its own: an empty directory to stand in, a data directory, and texts to learn from."""

    def __init__(self, directory: Path, children: Children) -> None:
        self._children = children
        self.here = directory
        self.data = directory / "data"
        self.texts = directory / "mine"
        (self.texts / "text").mkdir(parents=True)
        (self.texts / "text" / "lines.txt").write_text(TEXT)
        self.environment = {"SWARM_DATA_DIR": str(self.data), "HOME": str(directory)}

    def join(self, link: str, name: str, *words: str) -> Child:
        settings = ["--name", name, "--set", f"local.data_dir={self.texts}", *words]
        return self._children.start(name, ["join", link, *settings], self.here / f"{name}.log", self.environment)

    @property
    def homes(self) -> list[Path]:
        return sorted(self.data.glob("*/test-run/trainer-*"))

    def says(self, *words: str) -> str:
        found = command(words, {**os.environ, **self.environment})
        assert found.returncode == 0, found.stderr
        return found.stdout


@pytest.mark.soak
def test_a_stranger_with_a_link_alone_trains_along_and_comes_back_as_the_same_peer(
    swarm: MakeSwarm, tmp_path: Path
) -> None:
    run = swarm(5, target=2048)  # epochs in which there is time for the other to start
    monitor = run.start_monitor("--set", "optimizer.learning_rate=2e-3")  # which the stranger never types
    link = run.told("monitor")["link"]
    assert f'join with: swarm join "{link}"' in monitor.last_words(40)
    stranger = Stranger(tmp_path / "elsewhere", run.children)

    unasked = stranger.join(link, "unasked")
    run.wait_for_end(unasked, 2)
    assert "text files of this computer" in unasked.last_words(40) and "add --yes" in unasked.last_words(1)
    assert not stranger.data.exists()

    first = stranger.join(link, "first", "--yes")
    run.wait(lambda: any((home / "peer.json").exists() for home in stranger.homes), "the stranger is up", first)
    owner = run.start("join", "owner", "--set", "optimizer.learning_rate=2e-3")
    for trainer in (owner, first):
        run.wait_for_end(trainer)
    (home,) = stranger.homes
    summary = json.loads((home / "summary.json").read_text())
    assert summary["samples"] > 0 and summary["epoch"] == 5 and summary["digest"] == run.summary("owner")["digest"]
    assert any(len(each.members) == 3 for each in run.rounds("owner"))

    again = stranger.join(link, "again")  # asks no more: nobody has to agree twice
    run.wait_for_end(again)
    later = json.loads((home / "summary.json").read_text())
    assert stranger.homes == [home] and later["peer"] == summary["peer"] and later["digest"] == summary["digest"]
    assert stranger.says("link", link, "--copyable").strip() == link  # the monitor's, beside other tests' runs
    assert stranger.says("log", str(home))
