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
STEPS = 4
LIGHT = ("micro_batch_size=4", "evaluation.samples=4")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Some dozen rows of each file, in the directory where datasets begin."""
    every, directory = make_data.sources, tmp_path_factory.mktemp("data")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(make_data, "MOST", 200)
        patch.setattr(make_data, "sources", lambda: itertools.islice(every(), 0, None, 8))
        make_data.main(directory / "data")
    return directory


def learned(recipe: Recipe) -> float:
    """By how much a few steps on a batch lower its loss."""
    torch.manual_seed(1)
    task = build_task(recipe)
    model = task.build_model()
    check_frozen(recipe, model)
    optimizer = optimizer_factory(recipe)(parameter_groups(recipe, model))
    batch, losses = next(task.batches(1)), []
    for _ in range(STEPS):
        loss = task.loss(model, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert len(task.evaluation_batches()) > 0
    return losses[0] - losses[-1]


TASKS = ("masked-lm", "sequence-classification", "token-classification", "seq2seq", "image-classification", "chat")


@pytest.mark.parametrize("name", TASKS)
def test_a_few_steps_of_a_task_lower_its_loss(name: str, data: Path) -> None:
    assert learned(load_recipe(RECIPES / f"{name}.yaml", [*LIGHT, f"local.data_dir={data}"])) > 0.1


def test_lora_learns_beside_a_base_that_is_there(data: Path, tmp_path: Path) -> None:
    base = build_task(load_recipe(RECIPES / "stdlib-lm.yaml"))
    model: Any = base.build_model()
    model.save_pretrained(tmp_path / "base")
    base.save_preprocessing(tmp_path / "base")
    overrides = [*LIGHT, f"base_model={tmp_path / 'base'}", f"local.data_dir={data}", "optimizer.learning_rate=0.02"]
    with pytest.raises(RecipeError, match=r"frozen_weights: [0-9a-f]{64}") as told:
        learned(load_recipe(RECIPES / "lora.yaml", overrides))
    digest = str(told.value).partition("frozen_weights: ")[2][:64]
    assert learned(load_recipe(RECIPES / "lora.yaml", [*overrides, f"frozen_weights={digest}"])) > 0.01
