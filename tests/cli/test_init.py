"""`swarm init`: recipes that are in order, and nothing written over."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from swarmcli.cli.init import init
from swarmcli.cli.validate import validate
from swarmcli.errors import HubError, RecipeError, UsageError
from swarmcli.recipe import load_recipe
from swarmcli.recipe.offered import offered
from swarmcli.recipe.run_key import RunKey
from swarmcli.recipe.templates import SHIPPED, TemplateName, small_data_of
from swarmcli.shipped import make_data
from swarmcli.training import build_task
from swarmcli.training.tokenizer import ByteTokenizer
from tests.cli.typed import typed
from tests.hub_stand_in import Hub, hub
from tests.suites import soak

__all__ = ["hub"]

begin = typed(init)


@pytest.fixture(autouse=True)
def my_texts(here: Path) -> None:
    (here / "my texts").mkdir()
    (here / "my texts" / "a.txt").write_text("text")


def said(*words: str, answers: str | None = None) -> str:
    return begin(*words, answers=answers).stdout.strip()


def test_a_run_is_begun_with_a_recipe_that_is_in_order_and_nothing_is_written_over() -> None:
    opened, closed = begin("open.yaml"), begin("--invite", "--run-id", "lab", "closed.yaml")
    assert (opened.stdout, closed.stdout) == ("swarm monitor open.yaml\n", "swarm monitor closed.yaml\n")
    assert "prints the link by which they join" in opened.stderr
    assert "prints the link" not in closed.stderr and "swarm invite closed.yaml" in closed.stderr, "it is not enough"
    assert (load_recipe("open.yaml").access, load_recipe("open.yaml").trust) == ("open", "strangers")
    assert [file.name for file in Path().glob("*.run-key")] == ["lab.run-key"]
    recipe = load_recipe("closed.yaml")
    assert (recipe.run_id, recipe.access, recipe.trust) == ("lab", "invite", "members")
    assert recipe.run_key == RunKey.load(Path("lab.run-key")).public.text
    before = Path("closed.yaml").read_text()
    with pytest.raises(UsageError, match="is there already"):
        said("--invite", "closed.yaml")
    with pytest.raises(UsageError, match="no name for a run"):
        said("--run-id", "no name!", "other.yaml")
    assert Path("closed.yaml").read_text() == before and not Path("other.yaml").exists()


PARAMETERS = {"small": 471_296, "medium": 10_944_768, "gpt2": 86_240_256, "home": 10_944_768, "slow-links": 10_944_768}


@pytest.mark.parametrize("template", PARAMETERS)
def test_each_size_is_in_order_open_or_closed_and_with_each_kind_of_data(template: TemplateName) -> None:
    for number, (data, kind) in enumerate([("stdlib", "stdlib"), ("my texts", "files"), ("owner/name", "huggingface")]):
        said(f"{template}-{number}", "--template", template, "--data", data, *(["--invite"] if number else []))
        recipe = load_recipe(f"{template}-{number}/recipe.yaml")
        assert (recipe.run_id, recipe.access) == (f"{template}-{number}", "invite" if number else "open")
        assert recipe.aggregator == ("mean" if number else "centered_clip")  # strangers may lie
        assert recipe.datasets[0].source == kind
        assert recipe.outer.takes_steps is (template == "slow-links")
        assert (recipe.compression.gradients != "none") is (template in ("home", "slow-links"))
    outline = build_task(load_recipe(f"{template}-0/recipe.yaml")).build_model(outline=True)
    assert sum(each.numel() for each in outline.parameters()) == PARAMETERS[template]


def test_texts_lie_where_the_recipe_says_and_the_recipe_can_travel_in_a_link(here: Path) -> None:
    said("run", "--data", "my texts")
    assert "Each volunteer needs a copy of these data" in begin("beside.yaml", "--data", "./my texts").stderr
    for file in ("run/recipe.yaml", "beside.yaml"):
        recipe = load_recipe(file)
        path = recipe.datasets[0].path  # type: ignore[union-attr]
        assert path == "./my texts" and recipe.locate(path, data=True) == here / "my texts"
        offered(recipe)  # raises RecipeError for one that no link can lead to
    assert "data_dir" not in Path("beside.yaml").read_text()
    with pytest.raises(UsageError, match=r"\./missing is nothing on this computer, nor the name of a dataset"):
        said("missing.yaml", "--data", "./missing")
    assert not (here / "missing.yaml").exists()


@pytest.fixture
def few_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    every = make_data.sources
    monkeypatch.setattr(make_data, "sources", lambda: itertools.islice(every(), 0, None, 40))
    monkeypatch.setattr(make_data, "MOST", 80)


OF_TASKS = ["chat", "sequence-classification", "token-classification", "seq2seq", "masked-lm"]


@pytest.mark.parametrize("template", [*OF_TASKS, *soak(["image-classification"])])
def test_each_task_is_written_with_its_small_data_and_is_in_order(template: TemplateName, few_rows: None) -> None:
    said("run", "--template", template, "--invite")
    file, shipped = Path("run/recipe.yaml"), load_recipe(SHIPPED / f"{template}.yaml")
    recipe = load_recipe(file)
    assert (recipe.run_id, recipe.access, recipe.task) == ("run", "invite", shipped.task)
    assert (recipe.base_model, recipe.optimizer, recipe.datasets) == (
        shipped.base_model, shipped.optimizer, shipped.datasets,
    )  # fmt: skip
    assert recipe.output_dir == file.parent.absolute() / "runs"
    text = file.read_text()
    assert "# Of real size: " in text and "recipes/" not in text
    made = small_data_of(template)
    assert (f"make_data DIRECTORY/data {made}\n" in text) is bool(made) is (template != "masked-lm")
    validate(str(file), [], False, False)
    offered(recipe)


def test_small_data_are_made_once_and_written_over_by_nothing(few_rows: None) -> None:
    said("chat.yaml", "--template", "chat")
    before = Path("data/chats.jsonl").read_bytes()
    Path("data/names.jsonl").write_text("mine")
    said("names.yaml", "--template", "seq2seq")
    assert Path("data/names.jsonl").read_text() == "mine" and Path("data/chats.jsonl").read_bytes() == before
    assert {each.name for each in Path("data").iterdir()} == {"chats.jsonl", "names.jsonl"}


ROW: dict[str, dict[str, Any]] = {
    "chat": {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]},
    "sequence-classification": {"text": "a", "label": "red"},
    "token-classification": {"tokens": ["a", "b"], "tags": ["red", "blue"]},
    "seq2seq": {"source": "a", "target": "b"},
}


@pytest.mark.parametrize("template", [*OF_TASKS, "image-classification"])
def test_data_of_ones_own_take_the_place_of_the_small_ones(template: str, here: Path) -> None:
    from PIL import Image

    rows = [json.dumps({**ROW.get(template, {}), **more}) for more in ({}, {"label": "blue"})]
    data = {"masked-lm": "my texts", "image-classification": "pictures"}.get(template, "rows.jsonl")
    lines = (row.replace('"a"', f'"a{number}"') + "\n" for number in range(40) for row in rows)
    (here / "rows.jsonl").write_text("".join(lines))
    for name in ("red", "blue"):
        (here / "pictures" / name).mkdir(parents=True)
        for number in range(20):
            Image.new("RGB", (32, 32 + number), name).save(here / "pictures" / name / f"{number}.png")
    (here / "my texts" / "a.txt").write_text("some text of mine " * 20_000)
    said("mine", "--template", template, "--data", data)
    recipe = load_recipe("mine/recipe.yaml")
    if template.endswith("-classification"):
        assert recipe.labels == ("blue", "red")
    validate("mine/recipe.yaml", [], False, False)
    offered(recipe)
    said("hub", "--template", template, "--data", "owner/name")
    dataset: Any = load_recipe("hub/recipe.yaml").datasets[0]
    assert (dataset.source, dataset.path, dataset.data_files) == ("huggingface", "owner/name", ())
    assert not list(Path().glob("*/data"))


def test_data_of_another_kind_than_the_task_reads_are_refused(here: Path) -> None:
    for template, named, reason in (
        ("chat", "my texts", "my texts is no file of rows, as chat reads them; name a .json, .jsonl, .ndjson, .parq"),
        ("chat", "none.jsonl", "none.jsonl is nothing on this computer"),
    ):
        with pytest.raises(UsageError, match=reason):
            said("run", "--template", template, "--data", named)
    assert not Path("run").exists()
    (here / "rows.jsonl").write_text('{"text": "a", "label": 0}\n' * 3)
    result = begin("run", "--task", "sequence_classification", "--data", "rows.jsonl")
    assert "Write the names of the classes in your data into it: labels." in result.stderr
    assert "# write the names of the classes in your data" in Path("run/recipe.yaml").read_text()


def test_a_task_names_the_template_too() -> None:
    said("a", "--task", "masked_lm")
    said("b", "--task", "causal_lm", "--template", "medium")
    assert load_recipe("a/recipe.yaml").task == "masked_lm" and load_recipe("b/recipe.yaml").sequence_len == 256
    for words, reason in (
        (("--task", "poetry"), "there is no template of task 'poetry'; name one of causal_lm, "),
        (("--task", "seq2seq", "--template", "small"), "the template small is of another task than seq2seq"),
    ):
        with pytest.raises(UsageError, match=reason):
            said("c", *words)


def test_an_adapter_is_trained_beside_a_model_of_the_hub(hub: Hub, few_rows: None) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=16, n_positions=64, vocab_size=259)).save_pretrained("tiny")
    ByteTokenizer().save(Path("tiny"))
    commit = hub.push("acme/tiny", Path("tiny"))
    with pytest.raises(UsageError, match=r"lora trains beside a model that is there; .*--base-model owner/name"):
        said("mine", "--template", "lora")
    said("mine", "--template", "lora", "--base-model", "acme/tiny")
    file = Path("mine/recipe.yaml")
    assert "prints the line frozen_weights" in file.read_text() and "recipes/" not in file.read_text()
    with pytest.raises(RecipeError, match=r"frozen_weights: [0-9a-f]{64}") as told:
        validate(str(file), [], False, False)
    line = "frozen_weights: " + str(told.value).partition("frozen_weights: ")[2][:64]
    file.write_text(f"{file.read_text()}{line}\n")
    validate(str(file), [], False, False)
    recipe = load_recipe(file)
    assert (recipe.base_model, recipe.revision, recipe.tokenizer) == ("acme/tiny", commit, None)
    assert (recipe.adapter, recipe.lora_target_modules) == ("lora", "all-linear")
    said("chat", "--template", "chat", "--base-model", "acme/tiny")
    chat = load_recipe("chat/recipe.yaml")
    assert (chat.base_model, chat.tokenizer, chat.chat_template, chat.optimizer.learning_rate) == (
        "acme/tiny", None, None, 2e-5,
    )  # fmt: skip


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
