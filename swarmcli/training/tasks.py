"""The tasks that a recipe can name."""

from __future__ import annotations

from swarmcli.recipe import Recipe
from swarmcli.training.causal_lm import CausalLanguageModelling
from swarmcli.training.task import Task

_TASKS = {"causal_lm": CausalLanguageModelling.from_recipe}


def build_task(recipe: Recipe) -> Task:
    """The task that a recipe names. Raises RecipeError or DataError, each with the fix."""
    return _TASKS[recipe.task](recipe)
