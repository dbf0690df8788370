"""`swarm init`: recipes that are in order, four questions, and nothing written over."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import pytest
import typer
from typer.testing import CliRunner

from swarmcli.cli.init import init
from swarmcli.errors import HubError, UsageError
from swarmcli.recipe import load_recipe
from swarmcli.recipe.offered import offered
from swarmcli.recipe.run_key import RunKey
from swarmcli.recipe.templates import TEMPLATES, TemplateName
from tests.hub_stand_in import Hub, hub

__all__ = ["hub"]

app = typer.Typer()
app.command()(init)


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "my texts").mkdir()
    (tmp_path / "my texts" / "a.txt").write_text("text")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def said(*words: str, answers: str | None = None) -> str:
    return CliRunner().invoke(app, list(words), input=answers, catch_exceptions=False).stdout.strip()


def test_a_run_is_begun_with_a_recipe_that_is_in_order_and_nothing_is_written_over() -> None:
    assert said("open.yaml") == "swarm monitor open.yaml"
    assert (load_recipe("open.yaml").access, load_recipe("open.yaml").trust) == ("open", "strangers")
    assert not list(Path().glob("*.run-key"))
    assert said("--invite", "--run-id", "lab", "closed.yaml") == "swarm monitor closed.yaml"
    recipe = load_recipe("closed.yaml")
    assert (recipe.run_id, recipe.access, recipe.trust) == ("lab", "invite", "members")
    assert recipe.run_key == RunKey.load(Path("lab.run-key")).public.text
    before = Path("closed.yaml").read_text()
    with pytest.raises(UsageError, match="is there already"):
        said("--invite", "closed.yaml")
    with pytest.raises(UsageError, match="no name for a run"):
        said("--run-id", "no name!", "other.yaml")
    assert Path("closed.yaml").read_text() == before and not Path("other.yaml").exists()


@pytest.mark.parametrize("template", get_args(TemplateName))
def test_each_template_is_in_order_open_or_closed_and_with_each_kind_of_data(template: TemplateName) -> None:
    for number, (data, kind) in enumerate([("stdlib", "stdlib"), ("my texts", "files"), ("owner/name", "huggingface")]):
        said(f"{template}-{number}", "--template", template, "--data", data, *(["--invite"] if number else []))
        recipe = load_recipe(f"{template}-{number}/recipe.yaml")
        assert (recipe.run_id, recipe.access) == (f"{template}-{number}", "invite" if number else "open")
        assert recipe.aggregator == ("mean" if number else "centered_clip")  # strangers may lie
        assert recipe.datasets[0].source == kind
        assert recipe.local_updates.enabled is TEMPLATES[template].local_updates
        assert bool(recipe.evaluation.every_epochs) is (kind != "huggingface")


def test_texts_lie_where_the_recipe_says_and_the_recipe_can_travel_in_a_link(here: Path) -> None:
    said("run", "--data", "my texts")
    said("beside.yaml", "--data", "my texts")
    for file in ("run/recipe.yaml", "beside.yaml"):
        recipe = load_recipe(file)
        path = recipe.datasets[0].path  # type: ignore[union-attr]
        assert path == "./my texts" and recipe.locate(path, data=True) == here / "my texts"
        offered(recipe)  # raises RecipeError for one that no link can lead to
    assert "data_dir" not in Path("beside.yaml").read_text()
    with pytest.raises(UsageError, match="no directory with texts"):
        said("missing.yaml", "--data", "./missing")


class Asked(list[str]):
    """The questions so far, and what is answered to the next ones."""

    answers: Iterator[str] = iter(())

    def __call__(self, question: str, default: str) -> str:
        self.append(question)
        return next(self.answers)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Asked:
    class Terminal:
        def isatty(self) -> bool:
            return True

    monkeypatch.setattr("swarmcli.cli.init.sys", type("sys", (), {"stdin": Terminal()}))
    asked = Asked()
    monkeypatch.setattr("swarmcli.cli.init._prompt", asked)
    return asked


def test_a_directory_without_text_is_refused_before_anything_is_written(here: Path) -> None:
    texts = here / "other"
    (texts / ".git").mkdir(parents=True)
    (texts / ".git" / "config").write_text("hidden files are no texts")
    (texts / "empty.txt").touch()
    (texts / "picture.png").write_bytes(b"\x89PNG\0\0\0")
    for named in ("other", "other/picture.png"):
        with pytest.raises(UsageError, match=f"{named} holds no text; put text files there"):
            said("run", "--data", named)
    assert not (here / "run").exists()
    (texts / "below").mkdir()
    (texts / "below" / "a.txt").write_text("text")
    assert said("run", "--data", "other")


def test_four_questions_are_asked_at_a_terminal_and_those_that_are_answered_are_not(asked: Asked) -> None:
    asked.answers = iter(["called-so", "my texts", "medium", "invited"])
    said("a")
    recipe = load_recipe("a/recipe.yaml")
    assert len(asked) == 4 and (recipe.run_id, recipe.access) == ("called-so", "invite")
    assert recipe.sequence_len == TEMPLATES["medium"].sequence_len
    assert all(f"{name}: {template.about}" in asked[2] for name, template in TEMPLATES.items())
    asked.clear()
    asked.answers = iter(["open"])
    said("b", "--run-id", "b", "--data", "stdlib", "--template", "small")
    assert len(asked) == 1 and load_recipe("b/recipe.yaml").access == "open"
    said("c", "--yes")
    assert len(asked) == 1 and sys.stdin is not None


def test_an_answer_that_is_not_understood_is_asked_for_again_and_opens_no_run(asked: Asked) -> None:
    asked.answers = iter(
        ["no name!", "d", "?", "stdlib", "huge", "s", "sm", "only whom I invite", "", "private", "closed"]
    )
    said("d")
    assert len(asked) == 11 and load_recipe("d/recipe.yaml").access == "invite"


def test_of_a_closed_run_it_does_not_promise_that_its_link_is_enough() -> None:
    open_run = CliRunner().invoke(app, ["open"]).stderr
    closed = CliRunner().invoke(app, ["closed", "--invite"]).stderr
    assert "prints the link by which they join" in open_run and "prints the link" not in closed
    assert "swarm invite closed/recipe.yaml" in closed


def test_a_model_of_the_hub_is_written_with_its_commit(hub: Hub) -> None:
    commit = hub.push("acme/tiny", {"config.json": b"{}"})
    said("tiny.yaml", "--base-model", "acme/tiny")
    recipe = load_recipe("tiny.yaml")
    assert (recipe.base_model, recipe.revision, recipe.tokenizer) == ("acme/tiny", commit, None)
    with pytest.raises(UsageError, match="no model of the Hugging Face Hub: those are called owner/name"):
        said("other.yaml", "--base-model", "./here")
    with pytest.raises(HubError, match="the Hub has no model acme/none"):
        said("other.yaml", "--base-model", "acme/none")
    assert not Path("other.yaml").exists()
