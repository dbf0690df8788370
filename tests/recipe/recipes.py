"""A small recipe that tests change in one place each."""

from __future__ import annotations

from pathlib import Path

import pytest

from swarmcli.errors import RecipeError
from swarmcli.recipe import Recipe, parse_recipe

SMALL = """\
run_id: small
base_model:
  model_type: gpt2
  n_layer: 1
  n_head: 2
  n_embd: 16
datasets:
  - source: stdlib
sequence_len: 16
target_batch_size: 32
"""


def small(*overrides: str, text: str = SMALL, directory: Path | None = None) -> Recipe:
    return parse_recipe(text, overrides, name="small.yaml", directory=directory)


def refused(text: str, *overrides: str) -> str:
    """What is said about a recipe that must not be accepted."""
    with pytest.raises(RecipeError) as caught:
        parse_recipe(text, overrides, name="small.yaml")
    return str(caught.value)
