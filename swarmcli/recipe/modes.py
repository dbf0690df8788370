"""How a run averages: the sections of a recipe that choose the modes of the optimizer."""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

from pydantic import Field, model_validator

from swarmcli.recipe.checks import check_delay, check_gradient_averaging
from swarmcli.recipe.section import Section, own, shared

Codec: TypeAlias = Literal[
    "none", "float16", "bfloat16", "scaled_float16", "uniform_8bit", "quantile_8bit", "blockwise_8bit"
]


class AveragingSettings(Section):
    """How peers meet and average. Times are upper bounds: a group that is complete starts at once."""

    matchmaking_time: float = own(15.0, "seconds to look for others at most, when not everyone is there", gt=0)
    averaging_timeout: float = own(60.0, "seconds after which an attempt to average is given up", gt=0)
    load_state_timeout: float = own(600.0, "seconds after which a download of the state is given up", gt=0)
    proceed_alone: bool = own(
        False, "train a model apart when others train one whose state cannot be reached, instead of waiting for it"
    )
    target_group_size: int | None = shared(
        None, "peers that average together; more than that are several groups, side by side; null: all together", ge=2
    )
    part_size_bytes: int = shared(524288, "size of the parts that gradients are cut into", ge=1024, le=8 << 20)
    average_state_every: int | None = shared(
        None, "epochs between averages of the parameters; null: every epoch with local updates, else on drift", ge=1
    )
    average_opt_statistics: tuple[Annotated[str, Field(min_length=1)], ...] = shared(
        (), "statistics of the optimizer that are averaged with the parameters, for example [exp_avg_sq]"
    )


class GradientAveragingSettings(Section):
    """What peers send of their gradients."""

    method: Literal["plain", "powersgd", "poweref"] = shared(
        "plain", "plain: the gradients themselves; the others: two thin matrices for each large one"
    )
    rank: int = shared(32, "columns of these matrices (powersgd, poweref)", ge=1, le=1024)
    min_compression_ratio: float = shared(
        0.5, "a tensor is sent whole unless it shrinks by more than this fraction (powersgd, poweref)", ge=0, lt=1
    )

    @model_validator(mode="after")
    def _consistent(self) -> GradientAveragingSettings:
        check_gradient_averaging(self.method, self.model_fields_set)
        return self


class DelaySettings(Section):
    """What goes on in the background while trainers compute. Gradients are then one update behind."""

    grad_averaging: bool = shared(False, "trainers go on while gradients are averaged")
    optimizer_step: bool | None = shared(
        None, "trainers go on while the optimizer steps, in host memory; null: as grad_averaging"
    )
    state_averaging: bool = shared(True, "trainers go on while parameters are averaged")

    @model_validator(mode="after")
    def _consistent(self) -> DelaySettings:
        check_delay(self.grad_averaging, self.optimizer_step)
        return self

    @property
    def step(self) -> bool:
        """Whether the optimizer steps while the trainer computes."""
        return self.grad_averaging if self.optimizer_step is None else self.optimizer_step


class LocalUpdateSettings(Section):
    """Steps of each peer's own between averages."""

    enabled: bool = shared(False, "each peer steps after every batch, and parameters are averaged once per epoch")


class CompressionSettings(Section):
    """What tensors become on the wire; docs/compression.md has the error of each."""

    gradients: Codec = shared("none", "how gradients travel")
    state_averaging: Codec = shared("none", "how parameters travel when they are averaged")
    state_download: Codec = shared(
        "none", "how a newcomer's state travels; anything but none leaves it with slightly other parameters"
    )
