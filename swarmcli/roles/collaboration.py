"""From a recipe to a model and an optimizer whose steps the whole run takes together: the same for every role."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn

from swarmcli.compression import (
    BFloat16Compression,
    BlockwiseQuantization,
    CompressionBase,
    Float16Compression,
    NoCompression,
    Quantile8BitQuantization,
    ScaledFloat16Compression,
    Uniform8BitQuantization,
)
from swarmcli.errors import CheckpointError
from swarmcli.optim import Optimizer
from swarmcli.recipe import Recipe
from swarmcli.roles.peer import RunPeer
from swarmcli.training import (
    Checkpoint,
    Compute,
    Task,
    build_optimizer,
    build_scheduler,
    build_task,
    choose_compute,
    find_checkpoint,
    load_checkpoint,
)

COMPRESSIONS: Mapping[str, CompressionBase] = {
    "none": NoCompression(),
    "float16": Float16Compression(),
    "bfloat16": BFloat16Compression(),
    "scaled_float16": ScaledFloat16Compression(),
    "uniform_8bit": Uniform8BitQuantization(),
    "quantile_8bit": Quantile8BitQuantization(),
    "blockwise_8bit": BlockwiseQuantization(),
}
LINGER_SECONDS = 30.0  # at the end of a run, for peers that are still behind


class Collaboration:
    """A peer's model, task and collaborative optimizer. Made in the main thread; `close` says goodbye to the run."""

    def __init__(self, peer: RunPeer, *, resume: str | None = None, auxiliary: bool = False) -> None:
        """Builds the model (from the checkpoint `resume`, if given) and makes the peer known to the run.

        Raises RecipeError, DataError or CheckpointError with the fix, before anything is told to others.
        """
        recipe = peer.recipe
        self.peer = peer
        self.compute: Compute = choose_compute(recipe)
        self.task: Task = build_task(recipe)
        checkpoint = find_resumed(recipe, resume) if resume else None
        self.model: nn.Module = self.task.build_model()
        if checkpoint is not None:
            checkpoint.restore_model(self.model)
        self.model.to(self.compute.device)
        self.optimizer = self._collaborate(recipe, auxiliary)
        if checkpoint is not None:
            self.optimizer.load_state_dict(checkpoint.optimizer)

    def _collaborate(self, recipe: Recipe, auxiliary: bool) -> Optimizer:
        optimizer = build_optimizer(recipe, self.model)
        averaging = recipe.averaging
        return Optimizer(
            dht=self.peer.dht,
            run_id=recipe.run_id,
            target_batch_size=recipe.target_batch_size,
            optimizer=optimizer,
            scheduler=build_scheduler(recipe, optimizer),
            matchmaking_time=averaging.matchmaking_time,
            averaging_timeout=averaging.averaging_timeout,
            load_state_timeout=averaging.load_state_timeout,
            auxiliary=auxiliary,
            averager_opts=averager_options(recipe),
            description=replace(self.peer.description, device=str(self.compute)),
            fingerprint=recipe.fingerprint(),
        )

    def close(self) -> None:
        self.optimizer.shutdown()


def averager_options(recipe: Recipe) -> dict[str, Any]:
    """What the recipe says about the averager itself."""
    options: dict[str, Any] = {
        "part_size_bytes": recipe.averaging.part_size_bytes,
        "compression": COMPRESSIONS[recipe.averaging.compression],
    }
    if recipe.local.bandwidth is not None:
        options["bandwidth"] = recipe.local.bandwidth
    return options


def find_resumed(recipe: Recipe, resume: str) -> Checkpoint:
    """The checkpoint at the path `resume`, or with "latest" the newest that any peer of this machine wrote."""
    place = recipe.output_dir / recipe.run_id if resume == "latest" else Path(resume)
    if not place.exists():
        raise CheckpointError(f"--resume {resume}: {place} does not exist")
    return load_checkpoint(find_checkpoint(place), recipe.run_id)
