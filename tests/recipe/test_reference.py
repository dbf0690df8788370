from __future__ import annotations

import re

import pytest

from swarmcli.recipe import Limits, Recipe, parse_recipe
from swarmcli.recipe.problems import all_keys

from . import reference
from .recipes import small


def page() -> str:
    return reference.PAGE.read_text(encoding="utf-8")


def test_the_page_shows_every_key_as_the_schema_has_it() -> None:
    assert reference.with_tables(page()) == page(), "run: python tests/recipe/reference.py"


def test_the_page_has_a_row_for_every_key() -> None:
    keys = {
        key.removeprefix("datasets.")
        for key in all_keys(Recipe)
        if "limits." not in key and "evaluation.dataset." not in key
    }
    rows = set(re.findall(r"^`([\w.]+): ", page(), re.MULTILINE))
    assert keys - rows == {"source"}
    for name in reference.tables():
        assert f"<!-- {name} -->\n" in page()
    limits = reference.PAGE.with_name("limits.md").read_text(encoding="utf-8")
    assert [key for key in Limits.model_fields if f"`{key}`" not in limits] == []


EXAMPLES = re.findall(r"```yaml\n(.*?)```", page(), re.DOTALL)


@pytest.mark.parametrize("example", EXAMPLES)
def test_the_examples_of_the_page_are_recipes(example: str) -> None:
    if "run_id" in example:
        assert parse_recipe(example).run_id
    else:  # a part of a recipe: it goes into the small one
        keys = set(re.findall(r"^(\w+):", example, re.MULTILINE))
        text = "".join(f"{key}: {value}\n" for key, value in SMALL_PARTS.items() if key not in keys)
        assert small(text=text + example)


SMALL_PARTS = {
    "run_id": "small",
    "base_model": "{model_type: gpt2}",
    "datasets": "[{source: stdlib}]",
    "sequence_len": 16,
    "target_batch_size": 32,
}


def test_the_overrides_of_the_page_can_be_given() -> None:
    overrides = re.findall(r"--set ('[^']+'|[\w.]+=[^\s`]+)", page().replace("--set key=value", ""))
    assert len(overrides) >= 3
    for override in overrides:
        assert small(override.strip("'"))
