"""Makes the task that a recipe names; `recipe/task_names.py` lists those built in. Other installed packages add theirs
by the entry point group `swarmcli.tasks`:

    [project.entry-points."swarmcli.tasks"]
    word_count = "my_package:WordCount"

Such a task is made from the recipe, `WordCount(recipe)`, and has the methods of `swarmcli.training.task.Task`.
"""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import EntryPoint
from typing import Any

from swarmcli.errors import RecipeError
from swarmcli.recipe import Recipe
from swarmcli.recipe.task_names import BUILT_IN, CUSTOM, installed_tasks
from swarmcli.training.task import Task
from swarmcli.words import first_words


def build_task(recipe: Recipe) -> Task:
    """Returns the task that a recipe names. Raises RecipeError or DataError, each with the fix."""
    if recipe.task == CUSTOM:
        raise RecipeError(
            f"{recipe.origin('task')}: task: the task of this recipe comes with a script, which hands it to "
            "Collaboration(task=…); start that script instead"
        )
    if recipe.task in BUILT_IN:
        task: Task = built_in(recipe.task)(recipe)
        return task
    return _of_package(recipe, installed_tasks()[recipe.task])


def built_in(name: str) -> Any:
    """Returns the class of one of the tasks in BUILT_IN, a ModelTask."""
    module, _, kind = BUILT_IN[name].where.partition(":")
    return getattr(import_module(f"swarmcli.training.tasks.{module}"), kind)


def _of_package(recipe: Recipe, entry: EntryPoint) -> Task:
    try:
        kind = entry.load()
    except Exception as error:  # a package raises whatever its modules meet
        package = entry.dist.name if entry.dist is not None else entry.value
        raise RecipeError(
            f"{recipe.origin('task')}: task: {recipe.task!r} cannot be loaded from the package {package} "
            f"({first_words(error)}); mend or reinstall it"
        ) from error
    task: Task = kind(recipe)
    check_smoothing(recipe, task)
    return task


def check_smoothing(recipe: Recipe, task: Task) -> None:
    """Raises RecipeError for `label_smoothing_factor` where the task does not say that it smooths labels."""
    if recipe.label_smoothing_factor and not getattr(task, "smooths_labels", False):
        raise RecipeError(
            f"{recipe.origin('label_smoothing_factor')}: label_smoothing_factor: the loss of {type(task).__name__} is "
            "its own affair, and it does not say that it smooths labels (smooths_labels = True); remove it"
        )
