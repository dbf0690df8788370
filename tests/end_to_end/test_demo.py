"""The demo's own promises, kept with a model small enough for a test."""

from __future__ import annotations

from pathlib import Path

import pytest

from swarmcli.cli import demo_run
from swarmcli.cli.demo_run import ActorReport, DemoPlan, DemoRun, expectations
from swarmcli.errors import SwarmError
from tests.end_to_end.forked import ForkedChildren
from tests.end_to_end.swarm import RECIPE, TEXT


def write_recipe(directory: Path, max_epochs: int) -> Path:
    recipe = directory / "recipe.yaml"
    recipe.write_text(RECIPE.format(max_epochs=max_epochs, target=1024, host="127.0.0.1", rate=3e-3))
    (directory / "text").mkdir()
    (directory / "text" / "lines.txt").write_text(TEXT)
    return recipe


@pytest.mark.e2e
def test_the_demo_keeps_its_promises(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo_run, "Children", ForkedChildren)
    plan, told = DemoPlan.for_epochs(40), []
    recipe = write_recipe(tmp_path, plan.last)
    stage = tmp_path / "stage"
    stage.mkdir()
    actors = DemoRun(recipe, "test-run", plan, stage, told.append, limit_seconds=480.0).perform()
    verdict = expectations(actors, plan)
    assert [check for check in verdict if not check.holds] == []
    assert "trainer-2 is killed with SIGKILL" in told
    assert next(actor.fate for actor in actors if actor.name == "trainer-2").startswith("killed")


@pytest.mark.e2e
def test_the_demo_names_an_actor_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo_run, "Children", ForkedChildren)
    recipe = write_recipe(tmp_path, 60)
    stage = tmp_path / "stage"
    stage.mkdir()
    run = DemoRun(recipe, "test-run", DemoPlan.for_epochs(60), stage, lambda _: None, overrides=["sequence_len=0"])
    with pytest.raises(SwarmError, match=r"(?s)monitor ended with exit code 2.*sequence_len"):
        run.perform()


def survivors(**changes: str) -> list[ActorReport]:
    digests = {"monitor": "a", "trainer-1": "a", "trainer-3": "a", **changes}
    actors = [
        ActorReport(name, name.partition("-")[0], "ended", summary={"digest": digest, "epoch": 9, "downloads": 1,
                    "bytes_sent": 0, "bytes_received": 1})
        for name, digest in digests.items()
    ]  # fmt: skip
    auxiliary = ActorReport("auxiliary", "auxiliary", "ended", summary={"bytes_sent": 1, "bytes_received": 1})
    return [*actors, auxiliary, ActorReport("trainer-2", "trainer", "killed, epoch 3")]


def test_one_different_bit_is_a_broken_promise() -> None:
    claim = "all survivors hold bit-identical parameters"
    assert {check.claim: check.holds for check in expectations(survivors(), DemoPlan(2, 9))}[claim]
    differing = expectations(survivors(**{"trainer-3": "b"}), DemoPlan(2, 9))
    assert not {check.claim: check.holds for check in differing}[claim]
