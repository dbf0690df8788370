"""The demo's own promises, kept with a model small enough for a test."""

from __future__ import annotations

from pathlib import Path

import pytest

from swarmcli.cli import demo
from swarmcli.cli.demo import Demo, expectations
from swarmcli.errors import SwarmError
from tests.end_to_end.forked import ForkedChildren
from tests.end_to_end.swarm import RECIPE, TEXT


@pytest.fixture
def stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty directory, beside a recipe with its data."""
    monkeypatch.setattr(demo, "Children", ForkedChildren)
    (tmp_path / "recipe.yaml").write_text(RECIPE.format(max_epochs=40, target=1024, host="127.0.0.1", rate=3e-3))
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "lines.txt").write_text(TEXT)
    (tmp_path / "stage").mkdir()
    return tmp_path / "stage"


@pytest.mark.e2e
def test_the_demo_keeps_its_promises(stage: Path) -> None:
    told: list[str] = []
    played = Demo(stage.parent / "recipe.yaml", "test-run", 40, stage, told.append, limit_seconds=480.0)
    assert [check for check in expectations(*played.perform(), 40) if not check.holds] == []
    assert "trainer-2 is killed with SIGKILL" in told


@pytest.mark.e2e
def test_the_demo_names_an_actor_that_fails(stage: Path) -> None:
    played = Demo(stage.parent / "recipe.yaml", "test-run", 40, stage, lambda _: None, ["sequence_len=0"])
    with pytest.raises(SwarmError, match=r"(?s)monitor ended with exit code 2.*sequence_len"):
        played.perform()


def test_one_different_bit_is_a_broken_promise() -> None:
    def held(**digests: str) -> bool:
        summaries = {name: {"digest": digests.get(name, "a")} for name in ("monitor", "trainer_1", "trainer_3")}
        named = {name.replace("_", "-"): summary for name, summary in summaries.items()}
        (check,) = (each for each in expectations(named, [], 9) if "bit-identical" in each.claim)
        return check.holds

    assert held() and not held(trainer_3="b") and not held(trainer_1="")
