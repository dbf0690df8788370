from __future__ import annotations

import pytest

from swarmcli.recipe import FilesDataset

from .recipes import SMALL, refused, small


def test_values_are_typed_like_the_file_and_the_last_of_several_wins() -> None:
    typed = ("optimizer.learning_rate=1e-2", "optimizer.betas=[0.8, 0.9]", "run_id=2024", "local.client_mode=yes")
    recipe = small(*typed, "max_epochs=null", "base_model.n_layer=3", "local.name=a=b", "seed=1", "seed=2")
    assert (recipe.optimizer.learning_rate, recipe.optimizer.betas) == (0.01, (0.8, 0.9))
    assert (recipe.run_id, recipe.max_epochs, recipe.seed) == ("2024", None, 2)
    assert (recipe.local.name, recipe.local.client_mode) == ("a=b", True)
    assert isinstance(recipe.base_model, dict) and recipe.base_model["n_layer"] == 3


def test_list_items_are_named_by_position_and_one_may_be_appended() -> None:
    recipe = small("datasets.0.weight=2", "datasets.1={source: files, path: texts}", "datasets.1.glob=*.md")
    first, second = recipe.datasets
    assert first.weight == 2 and isinstance(second, FilesDataset)
    assert (second.path, second.glob) == ("texts", "*.md")


def test_an_empty_section_can_be_filled_and_a_whole_one_replaced() -> None:
    recipe = small("local.port=5", "base_model={model_type: llama, hidden_size: 32}", text=SMALL + "local:\n")
    assert recipe.local.port == 5 and recipe.base_model == {"model_type": "llama", "hidden_size": 32}


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("seed", "--set seed: expected key=value; write for example"),
        ("a..b=1", "expected key=value"),
        ("seed=abc", "--set seed=abc: seed should be a whole number, not 'abc'"),
        ("optimizer.lr=1", "--set optimizer.lr=1: unknown key optimizer.lr; did you mean learning_rate?"),
        ("seed.x=1", "seed holds a single value at"),
        ("run_id.x.y=1", "run_id holds a single value at small.yaml:1"),
        ("datasets.first.path=x", "datasets is a list, so 'first' must be a position from 0 to 1"),
        ("datasets.²=x", "must be a position"),
    ],
)
def test_what_cannot_be_set_is_refused_by_name(override: str, words: str) -> None:
    first = () if override.split(".")[0] != "seed" else ("seed=1",)
    assert words in refused(SMALL, *first, override)
