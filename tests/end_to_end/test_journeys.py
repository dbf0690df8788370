"""What an owner and a volunteer do on their first evening, at real terminals, each with a home of their own."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

if sys.platform == "win32":
    pytest.skip("no pseudo-terminals here", allow_module_level=True)
from tests.end_to_end.terminal import Terminal

pytestmark = pytest.mark.e2e
SWARM = [sys.executable, "-m", "swarmcli"]
LINK = re.compile(r'swarm join "(swarm://\S+)"')


class Person:
    """Somebody with a computer account, in which nothing was ever done."""

    def __init__(self, place: Path) -> None:
        place.mkdir()
        self.place = place
        self.environment = {
            "HOME": str(place),
            "XDG_RUNTIME_DIR": str(place),
            "SWARM_RUNTIME_DIR": str(place / "runtime"),
            "SWARM_DATA_DIR": str(place / "data"),
            "SWARM_CONFIG": str(place / "config.yaml"),
        }

    def at(self, *words: str, columns: int = 100, lines: int = 30) -> Terminal:
        return Terminal(
            [*SWARM, *words], columns=columns, lines=lines, environment=self.environment, cwd=str(self.place)
        )

    def swarm(self, *words: str) -> str:
        """Runs a command that ends by itself, and returns its screen. Fails unless the command succeeds."""
        with self.at(*words) as terminal:
            code = terminal.end()
            assert code == 0, terminal.text
            return terminal.text


def test_from_nothing_to_a_run_with_a_volunteer_who_pauses_and_leaves(tmp_path: Path) -> None:
    owner, volunteer = Person(tmp_path / "owner"), Person(tmp_path / "volunteer")
    assert "swarm monitor my-run/recipe.yaml" in owner.swarm("init", "my-run")
    with owner.at("monitor", "my-run/recipe.yaml", "--web", "0", "--port", "0", columns=300) as monitor:
        found = LINK.search(monitor.until(LINK.search))
        assert found is not None
        contributes(volunteer, found[1])
        assert "trainer-1" not in monitor.text
        with owner.at("join", "my-run/recipe.yaml", columns=200) as beside:  # it is given no address
            beside.until(lambda text: "this one joins it there" in text)
            monitor.until(lambda text: re.search(r"\btrainer +\d+ ", text))
            beside.type("\x03")
            assert beside.end() == 130, beside.text
        monitor.type("\x03")
        assert monitor.end() == 130
    assert "my-run" in owner.swarm("log", "my-run/runs/my-run/monitor-1")


def contributes(volunteer: Person, link: str) -> None:
    """The question, the screen, a pause from another terminal, and goodbye."""
    with volunteer.at("join", link, "--name", "Ada") as trainer:
        trainer.until(lambda text: "Train along? [y/N]" in text)
        assert not (volunteer.place / "data").exists()  # nothing is written before the answer
        trainer.type("y\r")
        trainer.until(lambda text: re.search(r"mine .* in all", text))
        assert "Ada" in volunteer.swarm("status")
        volunteer.swarm("pause", "--for", "2h")
        trainer.until(lambda text: "trainer Ada  Paused: you asked for it, until" in text)
        volunteer.swarm("resume")
        trainer.until(lambda text: re.search(r"trainer Ada  (training|averaging)", shown(trainer.screen.display)))
        trainer.type("\x03")
        assert trainer.end() == 130, trainer.text
        assert "left at epoch" in trainer.text
    gone = subprocess.run([*SWARM, "status"], env={**volunteer.environment, "PATH": ""}, capture_output=True, text=True)
    assert "Ada" not in gone.stdout


def shown(display: Sequence[str]) -> str:
    return "\n".join(display)
