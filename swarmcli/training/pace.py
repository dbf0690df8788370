"""How fast this computer trains a recipe's model, before there is a run."""

from __future__ import annotations

import time
from statistics import median

from swarmcli.recipe import Recipe
from swarmcli.training.device import choose_compute
from swarmcli.training.memory import averaged_numbers, check_memory
from swarmcli.training.task import samples_in
from swarmcli.training.tasks import build_task

# Other programs disturb single micro-batches, or all within a fraction of a second: so many are measured at least, and
# for so many seconds.
FEWEST, SECONDS = 5, 2.0


def numbers_and_pace(recipe: Recipe) -> tuple[int, float]:
    """Returns how many numbers peers average, and samples per second: the median of several forward and backward
    passes of one micro-batch.

    Raises RecipeError for what the memory has no room for, and what building the model and reading data raise.
    """
    compute, task = choose_compute(recipe), build_task(recipe)
    check_memory(recipe, task.build_model(outline=True), "trainer", compute)
    model = task.build_model().to(compute.device)
    batch = next(task.batches(recipe.seed))
    placed = compute.place(batch)

    def seconds() -> float:
        began = time.monotonic()
        with compute.autocast():
            loss = task.loss(model, placed)
        loss.backward()
        compute.wait()
        return time.monotonic() - began

    seconds()  # the first one also takes memory and makes kernels
    measured: list[float] = []
    while len(measured) < FEWEST or sum(measured) < SECONDS:
        measured.append(seconds())
    return averaged_numbers(recipe, model), samples_in(batch) / median(measured)
