"""Finds out the shapes of a recipe's model, in a process of its own.

An auxiliary adds up tensors and computes with none, so it needs shapes alone. Building even the outline of a model
imports transformers, which takes some hundred megabytes and seconds of a machine that may be small. The process that
imports it ends when the shapes are known.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import msgspec
import psutil
import torch
from torch import nn

from swarmcli.errors import RecipeError, SwarmError
from swarmcli.recipe import Recipe, digest_of, parse_recipe
from swarmcli.training.adapters import base_dtype
from swarmcli.training.checkpoint import saved_buffers
from swarmcli.training.memory import sizes_of_config
from swarmcli.training.schedule import parameter_groups


class Shape(msgspec.Struct, frozen=True):
    """One parameter or buffer."""

    size: list[int]
    dtype: str  # the name that torch gives it
    trained: bool


@dataclass(frozen=True, slots=True)
class OutlineBounds:
    """A stranger may have written the recipe. The outline of any model that volunteers can train takes a few seconds of
    the processor and less than a gigabyte; on a busy computer the seconds may be minutes by the clock."""

    seconds: float = 120.0  # of the processor
    memory: int = 3 << 30  # bytes
    patience: float = 900.0  # seconds by the clock: a process that computes nothing has to end as well


BOUNDS = OutlineBounds()
ITS_WORK = "from swarmcli.training.outline import main; main()"


class OutlineTold(msgspec.Struct, frozen=True):
    """What the process says: the parameters and buffers in their order, or what is wrong with the recipe."""

    parameters: list[Shape] = []
    config: dict[str, float] = {}  # the model's sizes, by which its memory is estimated
    refused: str = ""
    buffers: list[Shape] = []  # buffers that are saved with the weights
    groups: list[dict[str, Any]] = []  # of the recipe's optimizer; `params` are places in `parameters`


_told: dict[tuple[str, torch.dtype], OutlineTold] = {}  # kept, since joining by a link asks twice


def outline_of(recipe: Recipe, bounds: OutlineBounds = BOUNDS) -> nn.Module:
    """Returns the recipe's parameters on the meta device, as another process finds them out. Raises RecipeError as
    building the model would, and for a model whose outline takes too long or too much memory; SwarmError if the process
    fails."""
    key = digest_of(recipe), base_dtype(recipe)
    if key not in _told:
        _told[key] = _told_by_process(recipe, bounds)
    return module_of(_told[key])


def _told_by_process(recipe: Recipe, bounds: OutlineBounds) -> OutlineTold:
    command = [sys.executable, "-c", "from swarmcli import startup; startup.begin(); " + ITS_WORK]
    environment = os.environ | {"HF_HUB_OFFLINE": "1"}  # nothing is downloaded for an outline
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment
    ) as process:
        try:
            output, errors = _output_within(bounds, process, recipe)
        finally:
            process.kill()
    if process.returncode:
        words = errors.decode(errors="replace").strip().splitlines()[-3:]
        raise SwarmError("the shapes of the model could not be found out:\n" + "\n".join(words))
    told = msgspec.json.decode(output, type=OutlineTold)
    if told.refused:
        raise RecipeError(told.refused)
    return told


def module_of(told: OutlineTold) -> nn.Module:
    """Returns the shapes as a model on the meta device."""
    outline = nn.Module()
    for index, shape in enumerate([*told.parameters, *told.buffers]):
        tensor = torch.empty(shape.size, dtype=getattr(torch, shape.dtype), device="meta")
        if index < len(told.parameters):
            outline.register_parameter(str(index), nn.Parameter(tensor, requires_grad=shape.trained))
        else:
            outline.register_buffer(str(index), tensor)
    own = list(outline.parameters())
    outline.optimizer_groups = [  # type: ignore[assignment]  # no module, as modules may hold
        {**group, "params": [own[place] for place in group["params"]]} for group in told.groups
    ]
    outline.config = SimpleNamespace(**told.config)  # type: ignore[assignment]  # as models of transformers have it
    return outline


def told_of(recipe: Recipe, model: nn.Module) -> OutlineTold:
    """The shapes of the recipe's model, or of its outline."""

    def shapes(tensors: Iterable[torch.Tensor]) -> list[Shape]:
        return [Shape(list(t.shape), str(t.dtype).partition(".")[2], t.requires_grad) for t in tensors]

    places = {id(parameter): place for place, parameter in enumerate(model.parameters())}
    groups = [
        {**group, "params": [places[id(each)] for each in group["params"]]} for group in parameter_groups(recipe, model)
    ]
    buffers = shapes(saved_buffers(model))
    return OutlineTold(shapes(model.parameters()), sizes_of_config(model), buffers=buffers, groups=groups)


def _output_within(bounds: OutlineBounds, process: subprocess.Popen[bytes], recipe: Recipe) -> tuple[bytes, bytes]:
    """Returns what the process writes. A model that cannot be outlined within the bounds is refused."""
    deadline = time.monotonic() + bounds.patience
    source: bytes | None = msgspec.json.encode(recipe.source)
    while True:
        try:
            return process.communicate(source, timeout=0.1)
        except subprocess.TimeoutExpired:
            source = None  # it has been given
        seconds, nbytes = _taken_by(process.pid)
        if time.monotonic() > deadline or seconds > bounds.seconds or nbytes > bounds.memory:
            raise RecipeError(
                f"{recipe.origin('base_model')}: base_model: its outline alone takes more than {bounds.seconds:g} s of "
                f"the processor or {bounds.memory >> 30} GiB; lower its sizes"
            )


def _taken_by(pid: int) -> tuple[float, int]:
    """Seconds of the processor, and bytes of memory."""
    try:
        process = psutil.Process(pid)
        times = process.cpu_times()
        return times.user + times.system, int(process.memory_info().rss)
    except psutil.Error:  # it has just ended
        return 0.0, 0


def main() -> None:
    """Reads the recipe's source and writes the shapes, both as JSON."""
    from swarmcli.training.tasks import build_task

    text, overrides, name, directory = msgspec.json.decode(sys.stdin.buffer.read())
    try:
        recipe = parse_recipe(text, overrides, name=name, directory=directory)
        told = told_of(recipe, build_task(recipe).build_model(outline=True))
    except RecipeError as error:
        told = OutlineTold(refused=str(error))
    sys.stdout.buffer.write(msgspec.json.encode(told))
