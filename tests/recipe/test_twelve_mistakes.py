"""A recipe with one mistake: what `swarm validate` says of it names the line, the key, the value and the fix."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from swarmcli.cli.validate import validate
from swarmcli.errors import RecipeError
from swarmcli.recipe import load_recipe
from swarmcli.training.tokenizer import ByteTokenizer
from tests.hub_stand_in import hub
from tests.training.small_tasks import ENDLESS

__all__ = ["hub"]

RIGHT = {
    "run_id": "mine",
    "task": "causal_lm",
    "base_model": "{model_type: gpt2, n_layer: 1, n_head: 2, n_embd: 16}",
    "datasets": "[{path: texts}]",
    "sequence_len": "16",
    "target_batch_size": "8",
    "local": "{device: cpu}",
}
BERT = "{model_type: bert, hidden_size: 16, num_hidden_layers: 1, num_attention_heads: 2, intermediate_size: 16}"
SORTS = {"task": "sequence_classification", "base_model": BERT, "labels": "[red, blue]"}
CHAT = {"datasets": "[{path: chats.jsonl, type: chat_template}]"}
MISTAKES: dict[str, tuple[dict[str, str], str, list[str]]] = {  # changed keys, the one to point at, words
    "a column that is not there": (
        {**SORTS, "datasets": "[{path: rows.jsonl}]"},
        "datasets",
        ["datasets.0 (rows.jsonl): of 40 rows, 40 left out", "no column 'text' for text; it has label, review: name"],
    ),
    "a column of texts that is not there": (
        {"datasets": "[{path: rows.jsonl}]"},
        "datasets",
        ["no text can be read", "rows.jsonl, row ", "it has no column 'text'", "set field to one of label, review"],
    ),
    "a template whose masks cannot be derived": (
        {**CHAT, "chat_template": json.dumps(ENDLESS)},
        "chat_template",
        ["chat_template: ", "ends a message of assistant with", "by {% generation %}", "`chat_template: chatml`"],
    ),
    "a tokenizer of another model": (
        {"base_model": "small", "tokenizer": "bytes"},
        "tokenizer",
        ["tokenizer: the model knows 40 tokens, the tokenizer has 259", "remove tokenizer"],
    ),
    "a module that does not exist": (
        {"base_model": "base", "adapter": "lora", "lora_target_modules": "[q_proj]"},
        "lora_target_modules",
        ["lora_target_modules: the base has no module 'q_proj'", "did you mean c_proj?"],
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Texts, rows, conversations and two saved models, with which RIGHT and all corrected recipes are in order."""
    from transformers import GPT2Config, GPT2LMHeadModel

    here = tmp_path_factory.mktemp("mistakes")
    (here / "texts").mkdir()
    (here / "texts" / "a.txt").write_text("some text " * 20_000)
    rows: list[dict[str, Any]] = [{"review": f"a {n}", "label": "red"} for n in range(40)]
    said = [[{"role": "user", "content": f"a {n}"}, {"role": "assistant", "content": "b"}] for n in range(40)]
    (here / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (here / "chats.jsonl").write_text("".join(json.dumps({"messages": talk}) + "\n" for talk in said))
    for name, words in (("base", 259), ("small", 40)):
        config = GPT2Config(n_layer=1, n_head=2, n_embd=16, n_positions=32, vocab_size=words)
        GPT2LMHeadModel(config).save_pretrained(here / name)
    ByteTokenizer().save(here / "base")
    return here


def written(place: Path, changes: dict[str, str]) -> tuple[Path, list[str]]:
    lines = [f"{key}: {value}" for key, value in (RIGHT | changes).items()]
    file = place / "recipe.yaml"
    file.write_text("\n".join(lines) + "\n")
    return file, list(RIGHT | changes)


@pytest.mark.parametrize("mistake", MISTAKES)
def test_one_mistake_is_told_with_its_line_key_value_and_fix(mistake: str, place: Path) -> None:
    changes, key, words = MISTAKES[mistake]
    file, keys = written(place, changes)
    with pytest.raises(RecipeError) as told:
        validate(str(file), [], False, False)
    assert str(told.value).startswith(f"{file}:{keys.index(key) + 1}: ")
    for each in words:
        assert each in str(told.value)
    assert str(told.value).count(str(file)) <= 2, "the line once, and a file of data below the same directory"


def test_without_the_mistake_it_is_in_order(place: Path) -> None:
    right = {**SORTS, "datasets": "[{path: rows.jsonl, field: review}]"}
    for changes in (right, {**CHAT, "chat_template": "chatml", "sequence_len": "128"}):
        validate(str(written(place, changes)[0]), [], False, False)


def test_an_evaluation_that_never_comes_is_told_and_stops_nobody(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    changes = {"max_epochs": "5", "evaluation": "{every_epochs: 50, held_out: 0.5}"}
    file, keys = written(place, changes)
    validate(str(file), [], True, False)
    assert (
        f"note: {file}:{keys.index('evaluation') + 1}: evaluation.every_epochs is 50, and the run ends at 5: "
        "nothing is evaluated; lower it"
    ) in capsys.readouterr().out
    assert load_recipe(written(place, changes | {"max_epochs": "50"})[0]).notes == ()
