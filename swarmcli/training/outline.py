"""The shapes of a recipe's model, found out by a process of its own.

An auxiliary adds up tensors and computes with none: it needs shapes. Building even the outline of a model imports
transformers, which takes some hundred megabytes and seconds of a machine that may be small. The process that imports
it is gone again when the shapes are known.
"""

from __future__ import annotations

import subprocess
import sys

import msgspec
import torch
from torch import nn

from swarmcli.errors import RecipeError, SwarmError
from swarmcli.recipe import Recipe, parse_recipe


class Shape(msgspec.Struct, frozen=True):
    """One parameter."""

    size: list[int]
    dtype: str  # as torch calls it
    trained: bool


class Told(msgspec.Struct, frozen=True):
    """What the process says: the parameters in their order, or what is wrong with the recipe."""

    parameters: list[Shape] = []
    refused: str = ""


def outline_in_process(recipe: Recipe) -> nn.Module:
    """The recipe's parameters, on the meta device. Raises RecipeError as building the model would."""
    command = [sys.executable, "-m", "swarmcli.training.outline"]
    process = subprocess.run(command, input=msgspec.json.encode(recipe.source), capture_output=True)
    if process.returncode:
        words = process.stderr.decode(errors="replace").strip().splitlines()[-3:]
        raise SwarmError("the shapes of the model could not be found out:\n" + "\n".join(words))
    told = msgspec.json.decode(process.stdout, type=Told)
    if told.refused:
        raise RecipeError(told.refused)
    outline = nn.Module()
    for index, shape in enumerate(told.parameters):
        tensor = torch.empty(shape.size, dtype=getattr(torch, shape.dtype), device="meta")
        outline.register_parameter(str(index), nn.Parameter(tensor, requires_grad=shape.trained))
    return outline


def main() -> None:
    """Reads the recipe's source and writes the shapes, both as JSON."""
    from swarmcli.training.causal_lm import build_task

    text, overrides, name, directory = msgspec.json.decode(sys.stdin.buffer.read())
    try:
        model = build_task(parse_recipe(text, overrides, name=name, directory=directory)).build_model(outline=True)
        shapes = [Shape(list(p.shape), str(p.dtype).partition(".")[2], p.requires_grad) for p in model.parameters()]
        told = Told(shapes)
    except RecipeError as error:
        told = Told(refused=str(error))
    sys.stdout.buffer.write(msgspec.json.encode(told))


if __name__ == "__main__":
    main()
