"""`swarm limits`, with peers that answer as the test says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from swarmcli.cli import limits
from swarmcli.errors import ControlError, RecipeError
from swarmcli.machine.registry import LocalPeer
from swarmcli.recipe.limit_store import LimitStore

ADA = LocalPeer(1, 1.0, "trainer", "a-run", "/home/trainer-1", "Ada", "http://127.0.0.1:1")


class Computer:
    """Its peers, the file of its user, and what the peers were asked."""

    def __init__(self, file: Path) -> None:
        self.file, self.running, self.asked = file.with_name("config.limits.json"), [ADA], list[Any]()
        self.store = LimitStore(None, file)
        self.broken = False

    def peers(self) -> list[LocalPeer]:
        return self.running

    def get(self, peer: LocalPeer, path: str, **_: Any) -> Any:
        return {"limits": self.store.shown()}

    def patch(self, peer: LocalPeer, path: str, body: dict[str, Any], **_: Any) -> Any:
        if self.broken:
            raise ControlError("it does not answer")
        self.asked.append(body)
        self.store.change(body["changes"], keep=body["keep"])

    def do(self, *words: str, code: int = 0) -> str:
        done = CliRunner().invoke(limits.app, words, catch_exceptions=True)
        if isinstance(done.exception, RecipeError | ControlError):
            raise done.exception
        assert done.exit_code == code, done.output
        return done.output


@pytest.fixture
def computer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Computer:
    made = Computer(tmp_path / "config.yaml")
    monkeypatch.setattr(limits, "LocalPeers", lambda: made)
    monkeypatch.setattr(limits, "client", made)
    return made


def test_a_limit_is_set_at_once_and_kept(computer: Computer) -> None:
    said = computer.do("set", "upload=2MB/s", "hours=22:00-08:00, sat-sun")
    assert computer.asked[0]["keep"] is True and "holds at once for Ada (trainer of a-run)" in said
    assert json.loads(computer.file.read_text()) == {"hours": "22:00-08:00, sat-sun", "upload": "2 MB/s"}
    shown = computer.do("show")
    assert "Ada (trainer of a-run):" in shown and f"upload          2 MB/s  ({computer.file})" in shown
    assert json.loads(computer.do("show", "--json"))[0]["limits"]["upload"]["value"] == 2e6
    computer.do("reset", "upload")
    assert "upload" not in computer.file.read_text() and computer.store.limits.upload is None
    computer.broken = True
    assert "does not answer" in computer.do("set", "processor=10%", code=1)


def test_a_value_is_read_as_it_is_shown_with_its_space(computer: Computer) -> None:
    computer.do("set", "upload=1", "MB/s", "only_when_idle=10", "min", "hours=22:00-08:00,", "sat-sun")
    assert (computer.store.limits.upload, computer.store.limits.only_when_idle) == (1e6, 10.0)
    assert computer.store.limits.hours == "22:00-08:00, sat-sun"


def test_for_now_only_nothing_is_kept(computer: Computer) -> None:
    computer.do("set", "upload=2MB/s", "--now-only")
    assert not computer.file.exists() and computer.store.limits.upload == 2e6
    computer.running = []
    with pytest.raises(ControlError, match="no peer of yours"):
        computer.do("set", "upload=2MB/s", "--now-only")


def test_without_peers_the_next_ones_are_meant(computer: Computer) -> None:
    computer.running = []
    assert "no limits" in computer.do("show")
    computer.do("set", "processor=20%")
    assert "peers that you start now" in computer.do("show") and "processor       20%" in computer.do("show")
    assert "goes on when it is 5 °C cooler" in computer.do("show", "--all")
    assert "all limits that you had set are forgotten" in computer.do("reset")
    assert "no limits" in computer.do("show") and computer.asked == []


def test_what_is_wrong_is_told_before_anything_changes(computer: Computer) -> None:
    for wrong, said in (
        ("uplod=3", "did you mean upload"),
        ("upload=fast", "2 MB/s"),
        ("upload", "expected key=value"),
    ):
        with pytest.raises(RecipeError, match=said):
            computer.do("set", "processor=10%", wrong)
    with pytest.raises(RecipeError, match="there is no limit"):
        computer.do("reset", "everything")
    assert computer.asked == [] and not computer.file.exists()


def test_a_damaged_file_is_told_before_anything_changes_and_a_reset_makes_it_anew(computer: Computer) -> None:
    computer.do("set", "processor=20%")
    computer.file.write_text("")
    with pytest.raises(RecipeError, match="swarm limits reset"):
        computer.do("set", "upload=3MB/s")
    assert len(computer.asked) == 1 and computer.store.limits.processor == 0.2
    computer.do("reset")
    assert json.loads(computer.file.read_text()) == {} and computer.store.limits.processor is None
