"""The shapes of a recipe's model, found out by a process of its own.

An auxiliary adds up tensors and computes with none: it needs shapes. Building even the outline of a model imports
transformers, which takes some hundred megabytes and seconds of a machine that may be small. The process that imports
it is gone again when the shapes are known.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from types import SimpleNamespace

import msgspec
import psutil
import torch
from torch import nn

from swarmcli.errors import RecipeError, SwarmError
from swarmcli.recipe import Recipe, parse_recipe


class Shape(msgspec.Struct, frozen=True):
    """One parameter."""

    size: list[int]
    dtype: str  # as torch calls it
    trained: bool


# Of a recipe that a stranger wrote: building the outline of any model that volunteers can train takes a few seconds and
# less than a gigabyte.
MOST_SECONDS, MOST_BYTES = 120.0, 3 << 30
POLL_SECONDS = 0.1


class Told(msgspec.Struct, frozen=True):
    """What the process says: the parameters in their order, or what is wrong with the recipe."""

    parameters: list[Shape] = []
    config: dict[str, float] = {}  # the model's sizes, by which its memory is estimated
    refused: str = ""


def outline_in_process(recipe: Recipe) -> nn.Module:
    """The recipe's parameters, on the meta device. Raises RecipeError as building the model would, and for a model that
    takes too long or too much to outline."""
    command = [sys.executable, "-m", "swarmcli.training.outline"]
    environment = os.environ | {"HF_HUB_OFFLINE": "1"}  # nothing is downloaded for an outline
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment
    ) as process:
        try:
            output, errors = _output_within_bounds(process, recipe)
        finally:
            process.kill()
    if process.returncode:
        words = errors.decode(errors="replace").strip().splitlines()[-3:]
        raise SwarmError("the shapes of the model could not be found out:\n" + "\n".join(words))
    told = msgspec.json.decode(output, type=Told)
    if told.refused:
        raise RecipeError(told.refused)
    outline = nn.Module()
    for index, shape in enumerate(told.parameters):
        tensor = torch.empty(shape.size, dtype=getattr(torch, shape.dtype), device="meta")
        outline.register_parameter(str(index), nn.Parameter(tensor, requires_grad=shape.trained))
    outline.config = SimpleNamespace(**told.config)  # type: ignore[assignment]  # as models of transformers have it
    return outline


def _output_within_bounds(process: subprocess.Popen[bytes], recipe: Recipe) -> tuple[bytes, bytes]:
    """What the process says; a model that cannot be outlined within the bounds is refused, and the process killed."""
    deadline = time.monotonic() + MOST_SECONDS
    source: bytes | None = msgspec.json.encode(recipe.source)
    while True:
        try:
            return process.communicate(source, timeout=POLL_SECONDS)
        except subprocess.TimeoutExpired:
            source = None  # it has been given
        if time.monotonic() > deadline or _resident(process.pid) > MOST_BYTES:
            raise RecipeError(
                f"{recipe.origin('base_model')}: base_model: its outline alone takes more than {MOST_SECONDS:g} s or "
                f"{MOST_BYTES >> 30} GiB; lower its sizes"
            )


def _resident(pid: int) -> int:
    try:
        return int(psutil.Process(pid).memory_info().rss)
    except psutil.Error:  # it has just ended
        return 0


def main() -> None:
    """Reads the recipe's source and writes the shapes, both as JSON."""
    from swarmcli.training.causal_lm import build_task
    from swarmcli.training.memory import sizes_of_config

    text, overrides, name, directory = msgspec.json.decode(sys.stdin.buffer.read())
    try:
        model = build_task(parse_recipe(text, overrides, name=name, directory=directory)).build_model(outline=True)
        shapes = [Shape(list(p.shape), str(p.dtype).partition(".")[2], p.requires_grad) for p in model.parameters()]
        told = Told(shapes, sizes_of_config(model))
    except RecipeError as error:
        told = Told(refused=str(error))
    sys.stdout.buffer.write(msgspec.json.encode(told))


if __name__ == "__main__":
    main()
