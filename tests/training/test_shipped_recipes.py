"""The shipped recipes of tasks and of an adapter learn from the data that recipes/make_data.py makes."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

from swarmcli.errors import RecipeError
from swarmcli.recipe import Recipe, load_recipe
from swarmcli.shipped import make_data
from swarmcli.training import build_task, optimizer_factory, parameter_groups
from swarmcli.training.freezing import check_frozen

RECIPES = Path(__file__).parents[2] / "recipes"
STEPS = 24


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A few hundred rows of each file, in the directory where datasets begin."""
    every, directory = make_data.sources, tmp_path_factory.mktemp("data")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(make_data, "MOST", 600)
        patch.setattr(make_data, "sources", lambda: itertools.islice(every(), 0, None, 4))
        make_data.main(directory / "data")
    return directory


def losses(recipe: Recipe) -> list[float]:
    torch.manual_seed(1)
    task = build_task(recipe)
    model = task.build_model()
    check_frozen(recipe, model)
    optimizer = optimizer_factory(recipe)(parameter_groups(recipe, model))
    found = []
    for batch in itertools.islice(task.batches(1), STEPS):
        loss = task.loss(model, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    assert len(task.evaluation_batches()) > 0
    return found


def learned(recipe: Recipe) -> float:
    found = losses(recipe)
    return sum(found[:4]) / 4 - sum(found[-4:]) / 4


@pytest.mark.parametrize(
    ("name", "least"),
    [
        ("masked-lm", 1.0),
        ("sequence-classification", 0.05),
        ("token-classification", 0.3),
        ("seq2seq", 1.0),
        ("image-classification", 0.05),
        ("chat", 1.0),
    ],
)
def test_a_few_steps_of_a_task_lower_its_loss(name: str, least: float, data: Path) -> None:
    recipe = load_recipe(RECIPES / f"{name}.yaml", [f"local.data_dir={data}"])
    assert learned(recipe) > least


def test_lora_learns_beside_a_base_that_is_there(data: Path, tmp_path: Path) -> None:
    base = build_task(load_recipe(RECIPES / "stdlib-lm.yaml"))
    model: Any = base.build_model()
    model.save_pretrained(tmp_path / "base")
    base.save_preprocessing(tmp_path / "base")
    overrides = [f"base_model={tmp_path / 'base'}", f"local.data_dir={data}", "optimizer.learning_rate=0.02"]
    with pytest.raises(RecipeError, match=r"frozen_weights: [0-9a-f]{64}") as told:
        losses(load_recipe(RECIPES / "lora.yaml", overrides))
    digest = str(told.value).partition("frozen_weights: ")[2][:64]
    assert learned(load_recipe(RECIPES / "lora.yaml", [*overrides, f"frozen_weights={digest}"])) > 0.02
