"""The JSON schema of recipes: what editors take for right and wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from swarmcli.cli.schema import recipe_schema, schema
from swarmcli.recipe import Recipe, load_recipe
from swarmcli.recipe.document import parse_document, plain
from tests.cli.typed import typed

RECIPES = sorted((Path(__file__).parents[2] / "recipes").glob("*.yaml"))
WHOLE = {"run_id": "a", "base_model": "m", "datasets": [{"source": "stdlib"}], "target_batch_size": 8}
VALIDATOR = jsonschema.Draft202012Validator(recipe_schema())


def errors(recipe: dict[str, Any]) -> list[str]:
    return [error.message for error in VALIDATOR.iter_errors(recipe)]


@pytest.mark.parametrize("file", RECIPES, ids=lambda file: file.stem)
def test_recipes_that_load_fit_it_and_name_it_in_their_first_line(file: Path) -> None:
    load_recipe(file)
    text = file.read_text()
    assert text.startswith("# yaml-language-server: $schema=recipe.schema.json\n")
    assert errors(plain(parse_document(text, file.name), Recipe)) == []


def test_the_file_beside_the_recipes_is_what_the_verb_prints() -> None:
    printed = typed(schema)().output
    assert json.loads(printed) == recipe_schema()
    kept = json.loads((RECIPES[0].parent / "recipe.schema.json").read_text())
    assert kept == json.loads(printed), "run: swarm schema > recipes/recipe.schema.json"


def test_it_knows_right_from_wrong() -> None:
    for recipe in (
        {"lora_r": 4, "optimizer": {"momentum": 0.9}}, {"task": "their_task", "labels": ["a", "b"]},
        {"task": "masked_lm", "sample_packing": False},
        {"datasets": [{"path": "texts"}, {"path": "owner/name", "split": "train"}, {"source": "stdlib"}]},
        {"local": {"limits": {"upload": "2 MB/s", "hours": "22-8"}, "journal_size": "500 MB"}},
    ):  # fmt: skip
        assert errors(WHOLE | recipe) == [], recipe
    for recipe in (
        {"include": "base.yaml"},
        {"optimiser": {}}, {"optimizer": {"learning_rat": 1}}, {"micro_batch_size": "many"}, {"datasets": []},
        {"datasets": [{"path": "texts", "globb": "*"}]}, {"optimizer": {"name": "sgd", "betas": [0.9, 0.9]}},
        {"task": "masked_lm", "labels": ["a", "b"]}, {"adapter": None, "lora_r": 4},
        {"gradient_averaging": {"method": "topk", "rank": 4}}, {"lr_scheduler": {"name": "linear", "power": 2}},
    ):  # fmt: skip
        assert errors(WHOLE | recipe) != [], recipe
