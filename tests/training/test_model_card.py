"""The card of a checkpoint tells what the recipe says, and nothing in a recipe can make it say something else."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from huggingface_hub import ModelCard
from hypothesis import given
from hypothesis import strategies as st

from swarmcli.events import Evaluated
from swarmcli.recipe import Recipe, parse_recipe
from swarmcli.training.model_card import _code, model_card

from .small_tasks import SMALL

MEASURED = Evaluated(12, 2.0, 256, {"accuracy": 0.9})


def recipe(**changes: Any) -> Recipe:
    """The small recipe with other values; as YAML, since a hostile text need not survive `--set`."""
    return parse_recipe(yaml.safe_dump(yaml.safe_load(SMALL) | changes), name="small.yaml", directory=Path("/home/me"))


def read(card: str) -> tuple[dict[str, Any], str]:
    _, header, body = card.split("---\n", 2)
    return yaml.safe_load(header), body


def test_it_tells_the_run_the_data_how_far_it_came_how_good_it_is_and_what_is_not_known() -> None:
    datasets = [
        {"source": "stdlib"},
        {"source": "files", "path": "texts", "glob": "*.md", "weight": 2},
        {"source": "huggingface", "path": "owner/name", "name": "en", "revision": "v1"},
    ]
    header, body = read(model_card(recipe(datasets=datasets), 12, 34567, 3))
    assert header["license"] == "unknown" and header["library_name"] == "transformers"
    assert header["datasets"] == ["owner/name"]
    for words in (
        "# `small`, epoch 12",
        "- samples: 34,567, of all peers together",
        "- sequence length: 16 tokens a sample",
        "- trainers: 3 when this was written",
        "- began with: random `gpt2`",
        "- tokenizer: `bytes`",
        "- licence: `unknown; ask",
        "- the sources of Python's standard library, weight 1",
        "- text files `*.md` of `texts`, weight 2",
        "- dataset `owner/name`, split `train`, configuration `en`, revision `v1`, weight 1",
        "AutoTokenizer.from_pretrained(directory)",
    ):
        assert words in body, words
    _, body = read(model_card(recipe(), 12, 34567, 3, measured=MEASURED, began="epoch 7 of the run old"))
    assert "- on data kept aside: `loss 2.0000, accuracy 0.9000`" in body
    assert "- went on from: `epoch 7 of the run old`" in body
    _, body = read(model_card(recipe(), 1, None, None))
    assert "- samples: unknown" in body and "- trainers: unknown" in body and "kept aside" not in body


def test_the_hub_reads_licence_language_tags_and_the_evaluation_of_it() -> None:
    card = model_card(recipe(license="mit", language=["en", "de"], tags=["code"]), 12, 1, 1, measured=MEASURED)
    data = ModelCard(card).data
    assert (data.license, data.language, data.tags) == ("mit", ["en", "de"], ["swarm", "code"])
    told = {each.metric_type: each.metric_value for each in data.eval_results or []}
    assert data.model_name == "small" and told == {"loss": 2.0, "accuracy": 0.9}
    assert "- licence: `mit`" in card
    endless = replace(MEASURED, loss=math.nan)
    assert [
        each.metric_type for each in ModelCard(model_card(recipe(), 1, 1, 1, measured=endless)).data.eval_results or []
    ] == ["accuracy"]


@pytest.mark.parametrize(
    ("path", "shown"),
    [
        ("/home/me/secret/texts", "texts"),
        ("~/secret/texts", "texts"),
        ("../../secret/texts", "texts"),
        (r"C:\Users\secret\texts", "texts"),
        ("data/texts", "data/texts"),
    ],
)
def test_directories_of_a_machine_are_not_told(path: str, shown: str) -> None:
    files = {**_hub("json"), "data_files": [path, "https://me:secret@host:81/a.json?key=secret"]}
    made = recipe(base_model=path, tokenizer=path, datasets=[{"source": "files", "path": path}, files])
    card = model_card(made, 1, 1, 1)
    assert "secret" not in card and "/home" not in card
    for told in (f"of `{shown}`", f"- tokenizer: `{shown}`", f"weights of `{shown}`", "`https://host:81/a.json`"):
        assert told in card


HOSTILE = [
    "x`\n---\nlicense: mit\n---\n# owned",
    "``` <script>alert(1)</script>",
    "a\r\n\r\n[click](https://evil)",
    "`" * 300,
    "\u202egnp.exe\x1b[2J\0",
    "x" * 10_000,
    "'; - [ {",
]


@pytest.mark.parametrize("text", HOSTILE)
def test_texts_of_a_recipe_stay_quoted(text: str) -> None:
    harmless = recipe(datasets=[{"source": "files", "path": "p", "glob": "g"}, _hub("json"), _hub("json", name="n")])
    hostile = recipe(
        datasets=[{"source": "files", "path": text, "glob": text}, _hub(text), _hub("json", name=text, split=text)]
    )
    card, like = model_card(hostile, 1, 1, 1), model_card(harmless, 1, 1, 1)
    header, body = read(card)
    assert header == read(like)[0]
    assert len(body.splitlines()) == len(read(like)[1].splitlines()) and len(card) < len(like) + 5000
    assert "\x1b" not in card and "\u202e" not in card and "\0" not in card


def _hub(path: str, **more: str) -> dict[str, Any]:
    return {"source": "huggingface", "path": path, **more}


def test_a_long_list_of_data_is_cut() -> None:
    files = [f"{n}.json" for n in range(300)]
    card = model_card(recipe(datasets=[{**_hub("json"), "data_files": files}] * 50), 1, 1, 1)
    assert "and 280 more" in card and "- and 30 more" in card and len(card) < 20_000


@given(st.text(max_size=60))
def test_no_text_leaves_its_code_span(text: str) -> None:
    quoted = _code(text)
    assert "\n" not in quoted and quoted.isprintable()
    fence = quoted[: len(quoted) - len(quoted.lstrip("`"))]
    inside = quoted[len(fence) : -len(fence)]
    assert fence and quoted.endswith(fence) and inside and inside[0] != "`" and inside[-1] != "`"
    assert fence not in inside


@pytest.mark.parametrize(
    ("task", "name", "head"),
    [
        ("causal_lm", "AutoModelForCausalLM", ""),
        ("seq2seq", "AutoModelForSeq2SeqLM", ""),
        ("sequence_classification", "AutoModelForSequenceClassification", "config=config, ignore_mismatched"),
    ],
)
def test_the_code_of_an_adapters_card_is_python_that_names_the_class(task: str, name: str, head: str) -> None:
    labels = {"labels": ["a", "b"]} if head else {}
    made = recipe(task=task, adapter="lora", datasets=[_hub("a/b")], **labels)
    code = model_card(made, 1, 1, 1).partition("```python\n")[2].partition("```")[0]
    assert code.count(name) == 2 and head in code
    compile(code, "card", "exec")
