"""`swarm init`: recipes that are in order, a few questions, and nothing written over."""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import pytest

from swarmcli.cli.init import init
from swarmcli.cli.validate import validate
from swarmcli.errors import HubError, RecipeError, UsageError
from swarmcli.recipe import Recipe, load_recipe
from swarmcli.recipe.offered import offered
from swarmcli.recipe.run_key import RunKey
from swarmcli.recipe.templates import SHIPPED, TASK_TEMPLATES, TEMPLATES, SizeName, TaskTemplateName
from swarmcli.shipped import make_data
from swarmcli.training import build_task, optimizer_factory, parameter_groups
from swarmcli.training.memory import HOST, Room
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


@pytest.mark.parametrize("template", get_args(SizeName))
def test_each_size_is_in_order_open_or_closed_and_with_each_kind_of_data(template: SizeName) -> None:
    for number, (data, kind) in enumerate([("stdlib", "stdlib"), ("my texts", "files"), ("owner/name", "huggingface")]):
        said(f"{template}-{number}", "--template", template, "--data", data, *(["--invite"] if number else []))
        recipe = load_recipe(f"{template}-{number}/recipe.yaml")
        assert (recipe.run_id, recipe.access) == (f"{template}-{number}", "invite" if number else "open")
        assert recipe.aggregator == ("mean" if number else "centered_clip")  # strangers may lie
        assert recipe.datasets[0].source == kind
        assert recipe.outer.takes_steps is (template == "slow-links")
        assert (recipe.compression.gradients != "none") is (TEMPLATES[template].volunteers is not None)
        assert bool(recipe.evaluation.every_epochs) is (kind != "huggingface")
    outline = build_task(load_recipe(f"{template}-0/recipe.yaml")).build_model(outline=True)
    assert sum(each.numel() for each in outline.parameters()) == TEMPLATES[template].parameters


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
    (here / "other" / ".git").mkdir(parents=True)
    (here / "other" / ".git" / "config").write_text("hidden files are no texts")
    (here / "other" / "empty.txt").touch()
    (here / "other" / "picture.png").write_bytes(b"\x89PNG\0\0\0")
    for named in ("other", "other/picture.png"):
        with pytest.raises(UsageError, match=f"{named} holds no text; put text files there"):
            said("missing.yaml", "--data", named)
    assert not (here / "missing.yaml").exists()


def a_step_of(recipe: Recipe) -> None:
    task = build_task(recipe)
    model = task.build_model()
    optimizer = optimizer_factory(recipe)(parameter_groups(recipe, model))
    before = [each.detach().clone() for each in model.parameters() if each.requires_grad]
    task.loss(model, next(iter(task.batches(1)))).backward()
    optimizer.step()
    after = [each for each in model.parameters() if each.requires_grad]
    assert any(not one.equal(other) for one, other in zip(before, after, strict=True))


@pytest.fixture
def few_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    every = make_data.sources
    monkeypatch.setattr(make_data, "sources", lambda: itertools.islice(every(), 0, None, 40))
    monkeypatch.setattr(make_data, "MOST", 80)


OF_TASKS = [name for name in get_args(TaskTemplateName) if name not in ("lora", "image-classification")]


@pytest.mark.parametrize("template", [*OF_TASKS, *soak(["image-classification"])])
def test_each_task_is_written_with_its_small_data_validated_and_trained_a_step(template: str, few_rows: None) -> None:
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
    assert (f"make_data DIRECTORY/data {TASK_TEMPLATES[template].toy}\n" in text) is bool(TASK_TEMPLATES[template].toy)
    validate(str(file), [], False, False)
    offered(recipe)
    a_step_of(recipe)


def test_small_data_are_made_once_and_written_over_by_nothing(few_rows: None) -> None:
    said("chat.yaml", "--template", "chat")
    before = Path("data/chats.jsonl").read_bytes()
    Path("data/names.jsonl").write_text("mine")
    said("names.yaml", "--template", "seq2seq")
    assert Path("data/names.jsonl").read_text() == "mine" and Path("data/chats.jsonl").read_bytes() == before
    assert {each.name for each in Path("data").iterdir()} == {"chats.jsonl", "names.jsonl"}


def test_templates_for_slow_lines_show_the_arithmetic_and_train_as_it_says() -> None:
    for template in ("home", "slow-links"):
        said(template, "--template", template)
    home, slow = (load_recipe(f"{name}/recipe.yaml") for name in ("home", "slow-links"))
    assert home.target_batch_size == TEMPLATES["medium"].target_batch_size == 512
    assert (slow.outer.optimizer, slow.outer.has_momentum) == ("sgd", False)  # plain means
    assert (slow.target_batch_size, slow.outer.inner_batch_size) == (15 * 512, 512 / 4)
    assert (slow.max_epochs, slow.lr_scheduler.warmup_epochs, slow.checkpoint.every_epochs) == (133, 6, 3)
    assert (home.optimizer.name, slow.optimizer.name, slow.optimizer.learning_rate) == ("adamw", "muon", 3e-3)
    text = Path("slow-links/recipe.yaml").read_text()
    assert "#   gradients in 8 bits: 11 MB, 66 s of sending beside 32 s of computing\n" in text
    assert "#   outer steps every 15 in 4 bits: 6.2 MB, 37 s of sending beside 8 min of computing\n" in text


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


@pytest.fixture
def paced(monkeypatch: pytest.MonkeyPatch) -> None:
    """This computer trains a sample in a hundredth of a second, however busy it is."""
    ticks = itertools.count(0, 0.16)  # of a micro-batch of 16
    monkeypatch.setattr("swarmcli.training.pace.time", SimpleNamespace(monotonic=lambda: next(ticks)))


@pytest.fixture
def short_texts(paced: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """No time is measured, so it is enough that a model computes at all."""

    def build(recipe: Recipe) -> Any:
        task: Any = build_task(recipe)
        batches = task.batches
        task.batches = lambda seed: iter([{name: each[:, :4] for name, each in next(batches(seed)).items()}])
        return task

    monkeypatch.setattr("swarmcli.training.pace.build_task", build)


def test_lines_and_volunteers_are_weighed_by_how_fast_this_computer_is(
    short_texts: None, few_rows: None, asked: Asked
) -> None:
    for words, reason in (
        (("--uplink", "quick"), "'quick' is no rate; write for example 2 MB/s"),
        (("--volunteers", "8"), "say how fast they are: --uplink 10Mbit/s"),
    ):
        with pytest.raises((UsageError, RecipeError), match=reason):
            said("run", "--yes", *words)
    assert not Path("run").exists()
    result = begin("run", "--yes", "--uplink", "2Mbit/s", "--volunteers", "8")
    recipe, text = load_recipe("run/recipe.yaml"), Path("run/recipe.yaml").read_text()
    assert recipe.outer.inner_batch_size == 64 and recipe.target_batch_size == 15 * 8 * 64
    assert (recipe.max_epochs, recipe.lr_scheduler.warmup_epochs) == (20, 1)  # no run of 4 rounds
    told = [
        "8 volunteers with 2.0 Mbit/s up and 100.0 samples a second each.",
        "In a round each sends 1.75 times what it brings: its own, and averages.",
        "  gradients in float32: 1.9 MB, 13 s of sending beside 0.6 s of computing",
        "  gradients in 8 bits: 472 kB, 3.3 s of sending beside 0.6 s of computing",
        "  gradients in 4 bits: 265 kB, 1.9 s of sending beside 0.6 s of computing",
        "  outer steps every 15 in 4 bits: 265 kB, 1.9 s of sending beside 9.6 s of computing",
    ]
    assert "\n".join(told) in result.stderr and "".join(f"# {line}\n" for line in told) in text
    said("quick", "--yes", "--uplink", "100Mbit/s")
    quick = load_recipe("quick/recipe.yaml")
    assert not quick.outer.takes_steps and quick.compression.gradients == "none" and quick.max_epochs == 60
    said("home", "--yes", "--template", "home", "--volunteers", "8")
    assert "# 8 volunteers with 10 Mbit/s up and 50.0 samples a second each.\n" in Path("home/recipe.yaml").read_text()
    said("task", "--yes", "--template", OF_TASKS[0], "--uplink", "100kB/s")
    task, shipped = load_recipe("task/recipe.yaml"), load_recipe(SHIPPED / f"{OF_TASKS[0]}.yaml")
    assert task.outer.takes_steps and task.target_batch_size >= 15 * shipped.target_batch_size
    assert task.optimizer == shipped.optimizer and task.max_epochs == 20
    asked.answers = iter(["slow", "home", "one", "16", "open"])
    said("f", "--run-id", "f", "--data", "stdlib", "--template", "small")
    assert asked[0].startswith("How are the volunteers connected?\n  1  network: all in one network, or not known yet")
    assert "16 volunteers with 10 Mbit/s up" in Path("f/recipe.yaml").read_text()


def test_what_cannot_be_trained_here_leaves_the_recipe_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swarmcli.training.memory.rooms", lambda compute: [Room(HOST, 1 << 20, 1 << 20)])
    result = begin("run", "--uplink", "1Mbit/s")
    assert result.exit_code == 0 and "not fitted to the volunteers' links: " in result.stderr
    assert not load_recipe("run/recipe.yaml").outer.takes_steps


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
    if TASK_TEMPLATES[template].labels:
        assert recipe.labels == ("blue", "red")
    validate("mine/recipe.yaml", [], False, False)
    offered(recipe)
    said("hub", "--template", template, "--data", "owner/name")
    dataset: Any = load_recipe("hub/recipe.yaml").datasets[0]
    assert (dataset.source, dataset.path, dataset.data_files) == ("huggingface", "owner/name", ())
    assert not list(Path().glob("*/data"))


def test_data_of_another_kind_than_the_task_reads_are_refused(here: Path) -> None:
    for template, named, reason in (
        (
            "chat",
            "my texts",
            "my texts is no file of rows, as chat reads them; name a .json, .jsonl, .ndjson, .parquet, .csv, .tsv",
        ),
        ("chat", "none.jsonl", r"none.jsonl is no file of rows \(.jsonl, .csv"),
        ("image-classification", "my texts", "my texts has no directory for each class below it"),
        ("masked-lm", "none", "none is no directory with texts on this computer"),
    ):
        with pytest.raises(UsageError, match=reason):
            said("run", "--template", template, "--data", named)
    (here / "rows.jsonl").write_text('{"text": "a", "label": 0}\n' * 3)
    result = begin("run", "--template", "sequence-classification", "--data", "rows.jsonl")
    assert "Write the names of the classes in your data into it: labels." in result.stderr
    assert "# write the names of the classes in your data" in Path("run/recipe.yaml").read_text()


def test_an_adapter_is_trained_beside_a_model_of_the_hub(hub: Hub, few_rows: None) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=16, n_positions=64, vocab_size=259)).save_pretrained("tiny")
    ByteTokenizer().save(Path("tiny"))
    commit = hub.push("acme/tiny", Path("tiny"))
    with pytest.raises(UsageError, match=r"lora trains beside a model that is there; .*--base-model owner/name"):
        said("mine", "--template", "lora")
    said("mine", "--template", "lora", "--base-model", "acme/tiny")
    file = Path("mine/recipe.yaml")
    assert "it tells the line frozen_weights" in file.read_text() and "recipes/" not in file.read_text()
    with pytest.raises(RecipeError, match=r"frozen_weights: [0-9a-f]{64}") as told:
        validate(str(file), [], False, False)
    line = "frozen_weights: " + str(told.value).partition("frozen_weights: ")[2][:64]
    file.write_text(f"{file.read_text()}{line}\n")
    validate(str(file), [], False, False)
    recipe = load_recipe(file)
    assert (recipe.base_model, recipe.revision, recipe.tokenizer) == ("acme/tiny", commit, None)
    assert (recipe.adapter, recipe.lora_target_modules) == ("lora", "all-linear")
    a_step_of(recipe)
    said("chat", "--template", "chat", "--base-model", "acme/tiny")
    chat = load_recipe("chat/recipe.yaml")
    assert (chat.base_model, chat.tokenizer, chat.chat_template, chat.optimizer.learning_rate) == (
        "acme/tiny", None, None, 2e-5,
    )  # fmt: skip


def test_questions_are_asked_at_a_terminal_and_those_that_are_answered_are_not(asked: Asked, few_rows: None) -> None:
    asked.answers = iter(["called-so", "1", "my texts", "medium", "network", "invited"])
    said("a")
    recipe = load_recipe("a/recipe.yaml")
    assert len(asked) == 6 and (recipe.run_id, recipe.access) == ("called-so", "invite")
    assert recipe.sequence_len == TEMPLATES["medium"].sequence_len
    assert asked[1].startswith(
        "What should the model learn?\n  1  text: continue texts\n  2  chat: follow instructions"
    )
    assert all(f"{name}: {template.learned}" in asked[1] for name, template in TASK_TEMPLATES.items())
    assert asked[2].startswith("Where are the data? A directory with texts")
    assert all(f"{name}: {template.about}" in asked[3] for name, template in TEMPLATES.items())
    asked.clear()
    asked.answers = iter(["e", "chat", "stdlib", "1", "open"])
    said("e")
    assert len(asked) == 5 and "A file of rows (.jsonl" in asked[2] and load_recipe("e/recipe.yaml").chat_template
    asked.clear()
    assert [*get_args(TaskTemplateName)] == [*TASK_TEMPLATES]
    asked.clear()
    asked.answers = iter(["open"])
    said("b", "--run-id", "b", "--data", "stdlib", "--template", "home")
    assert len(asked) == 1 and load_recipe("b/recipe.yaml").access == "open"
    said("c", "--yes")
    assert len(asked) == 1 and sys.stdin is not None and not load_recipe("c/recipe.yaml").outer.takes_steps


def test_an_answer_that_is_not_understood_is_asked_for_again_and_opens_no_run(asked: Asked) -> None:
    answers = ["no name!", "d", "poems", "s", "te", "?", "stdlib", "huge", "s", "sm", "n"]
    asked.answers = iter([*answers, "whom I invite", "", "private", "closed"])
    said("d")
    assert len(asked) == 15 and load_recipe("d/recipe.yaml").access == "invite"


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
