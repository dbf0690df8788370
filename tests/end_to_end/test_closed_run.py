"""A closed run of real processes: an owner, two strangers with links, one without, and one who has to go."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from swarmcli.cli.processes import Child, Children
from swarmcli.errors import JournalError
from swarmcli.journal import JOURNAL_NAME, JournalReader
from tests.end_to_end.forked import command
from tests.end_to_end.swarm import PATIENCE_SECONDS, TEXT

pytestmark = pytest.mark.e2e

WITHIN = 60.0  # seconds from a revocation to the end of all connections: what is promised


class Computer:
    """A directory that stands for a computer of its own, with one peer."""

    def __init__(self, directory: Path, children: Children) -> None:
        directory.mkdir()
        (directory / "text").mkdir()
        (directory / "text" / "lines.txt").write_text(TEXT)
        self.here, self.children = directory, children
        self.environment = {
            "SWARM_DATA_DIR": str(directory / "data"),
            "SWARM_RUNTIME_DIR": str(directory / "runtime"),
            "HOME": str(directory),
        }

    def start(self, name: str, *words: str) -> Child:
        settings = ["--home", str(self.here / name), "--name", name, "--set", "local.host=127.0.0.1"]
        return self.children.start(name, [*words, *settings], self.here / f"{name}.log", self.environment)

    def run(self, *words: str, code: int = 0) -> subprocess.CompletedProcess[str]:
        found = command(words, {**os.environ, **self.environment, "COLUMNS": "200"}, self.here)
        assert found.returncode == code, found.stdout + found.stderr
        return found

    def epoch(self, name: str) -> int:
        return max((each.epoch for each in self._read(name, lambda journal: journal.epochs("closed"))), default=0)

    def rounds(self, name: str) -> list[int]:
        """The number of members of each committed round."""
        found = self._read(name, lambda journal: journal.rounds("closed"))
        return [len(each.members) for each in found if each.outcome == "committed"]

    def _read(self, name: str, what: Callable[[JournalReader], list[Any]]) -> list[Any]:
        try:
            with JournalReader(self.here / name / JOURNAL_NAME) as journal:
                return what(journal)
        except JournalError:  # not there yet
            return []


def wait(condition: Callable[[], bool], what: str, seconds: float = PATIENCE_SECONDS) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds:g} s: {what}"
        time.sleep(0.2)


def test_an_owner_invites_two_refuses_a_third_and_revokes_one_while_the_run_goes_on(
    tmp_path: Path, children: Children
) -> None:
    owner, ada, joe, eve = (Computer(tmp_path / name, children) for name in ("owner", "ada", "joe", "eve"))
    assert "swarm monitor closed.yaml" in owner.run("init", "--invite", "closed.yaml").stdout
    recipe = owner.here / "closed.yaml"
    text = recipe.read_text().replace("- source: stdlib ", "- {source: files, path: text} ")
    text = text.replace("n_layer: 2", "n_layer: 1").replace("n_embd: 128", "n_embd: 32")
    recipe.write_text(text.replace("max_epochs: 60 ", "max_epochs: 5000 "))
    owner.run("invite", "closed.yaml", code=2)  # nobody runs yet

    monitor = owner.start("monitor", "monitor", str(recipe), "--port", "0", "--web", "0", "--web-host", "0.0.0.0")
    told_in = [owner.here / "monitor" / name for name in ("link", "peer.json")]
    wait(lambda: all(file.exists() for file in told_in), "the monitor has a link, and says where its page is")
    token = (owner.here / "monitor" / "dashboard.token").read_text()
    told = json.loads(told_in[1].read_text())
    assert f"?token={token}" in (owner.here / "monitor.log").read_text() and token not in json.dumps(told)
    assert httpx.get(told["dashboard"]).status_code == 401
    brought = {"authorization": f"Bearer {token}"}
    assert httpx.get(told["dashboard"] + "api/v1/status", headers=brought).status_code == 200

    links = [owner.run("invite", "closed.yaml", "--copyable", "--note", each).stdout.strip() for each in ("ada", "joe")]
    data = ["--yes", "--set", "local.threads=1"]
    peers = {
        each: computer.start(each, "join", link, *data, "--set", f"local.data_dir={computer.here}")
        for each, computer, link in (("ada", ada, links[0]), ("joe", joe, links[1]))
    }
    wait(lambda: 3 in ada.rounds("ada") and 3 in joe.rounds("joe"), "a round of all three")

    for link, words in ((links[0].partition("/invite=")[0], "this run is closed"), (links[0], "bound to another peer")):
        refusal = eve.run("join", link, "--yes", code=4)
        assert words in refusal.stderr and "n_layer" not in refusal.stdout + refusal.stderr
    assert not (eve.here / "data").exists()
    shown = owner.run("members", "closed.yaml").stdout
    assert "ada" in shown and "joe" in shown and "not reached" not in shown
    # A volunteer has no key of the run: its own peer keeps the book, with names once their owners have reported.
    wait(lambda: all(each in ada.run("members").stdout for each in ("ada", "joe")), "the volunteer's book has names")
    assert "This peer keeps count itself" in ada.run("members").stderr

    assert "revoked the peer" in owner.run("revoke", "closed.yaml", "joe").stdout
    began = time.monotonic()
    assert peers["joe"].wait(WITHIN) == 4
    assert time.monotonic() - began < WITHIN
    assert "revoked this peer's invitation" in (joe.here / "joe.log").read_text()
    before = ada.epoch("ada")
    wait(lambda: ada.epoch("ada") >= before + 3, "rounds go on without the one who had to go")
    assert ada.rounds("ada")[-1] == 2
    own = ["--home", str(joe.here / "joe"), "--set", f"local.data_dir={joe.here}"]
    again = joe.run("join", links[1], "--yes", *own, code=4)
    assert "revoked" in again.stderr
    assert monitor.returncode is None and peers["ada"].returncode is None
    secret = links[0].partition("/invite=")[2]
    files = [file for file in ada.here.rglob("*") if file.is_file() and secret in file.read_text(errors="replace")]
    assert [file.name for file in files] == ["invitation"] and files[0].stat().st_mode & 0o777 == 0o600
