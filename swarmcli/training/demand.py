"""What a run will ask of a computer, in numbers: by the recipe and the model's outline, before anything is downloaded.

Traffic is estimated from above: in an all-reduce nobody sends or receives more than twice what is averaged, and peers
that cannot be dialed send and receive it once. How many epochs there are in an hour nobody can know before: it is what
the contact says of the last one, or one a minute.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from swarmcli.optim.config import Role
from swarmcli.recipe import Recipe
from swarmcli.training.device import Compute
from swarmcli.training.freezing import frozen_bytes
from swarmcli.training.memory import Need, memory_needs, sizes, statistics_of

ASSUMED_PACE = 60.0  # seconds of an epoch, where nobody has told
WIDTHS = {  # bytes of a number on the wire, with the scales of its block
    "none": 4.0,
    "float16": 2.0,
    "bfloat16": 2.0,
    "scaled_float16": 2.0,
    "uniform_8bit": 1.02,
    "quantile_8bit": 1.02,
    "blockwise_8bit": 1.02,
}


@dataclass(frozen=True, slots=True)
class Demand:
    """Sizes are bytes."""

    parameters: int
    needs: tuple[Need, ...]  # of memory
    round: int  # that a trainer sends in a round; as much is received
    epoch: int  # sent for each epoch, at most; as much is received
    pace: float  # seconds of an epoch
    pace_is_told: bool  # by the contact; otherwise assumed
    state: int  # downloaded once when joining
    frozen: int  # likewise, by who has others; with the state in a checkpoint

    @property
    def an_hour(self) -> int:
        """Bytes sent in an hour, at most; as many are received."""
        return int(self.epoch * 3600 / self.pace)


def demand_of(recipe: Recipe, outline: nn.Module, role: Role, compute: Compute, *, pace: float = 0.0) -> Demand:
    """`pace`: seconds that an epoch takes by what the contact says; 0: unknown."""
    (model, trained), frozen = sizes(outline), frozen_bytes(outline)
    averaged = averaged_bytes(recipe, outline)
    return Demand(
        parameters=sum(parameter.numel() for parameter in outline.parameters()),
        needs=tuple(memory_needs(recipe, outline, role, compute)),
        round=averaged,
        epoch=2 * averaged,
        pace=pace or ASSUMED_PACE,
        pace_is_told=pace > 0,
        state=0 if role == "auxiliary" else model - frozen + trained * statistics_of(recipe),
        frozen=0 if role == "auxiliary" else frozen,
    )


def averaged_bytes(recipe: Recipe, outline: nn.Module) -> int:
    """What one peer brings into the average of an epoch, as it travels."""
    trained = [parameter for parameter in outline.parameters() if parameter.requires_grad]
    numbers = sum(parameter.numel() for parameter in trained)
    if recipe.local_updates.enabled:
        return int(
            numbers * (1 + len(recipe.averaging.average_opt_statistics)) * WIDTHS[recipe.compression.state_averaging]
        )
    method = recipe.gradient_averaging
    if method.method != "plain":
        numbers = sum(_thin(parameter, method.rank, method.min_compression_ratio) for parameter in trained)
    return int(numbers * WIDTHS[recipe.compression.gradients])


def _thin(parameter: nn.Parameter, rank: int, least: float) -> int:
    """Numbers of two thin matrices in place of a large one, where that saves enough (docs/powersgd.md)."""
    rows = parameter.shape[0] if parameter.dim() > 1 else 1
    columns = parameter.numel() // max(rows, 1)
    thin = rank * (rows + columns)
    return thin if parameter.dim() > 1 and 1 - thin / max(parameter.numel(), 1) >= least else parameter.numel()
