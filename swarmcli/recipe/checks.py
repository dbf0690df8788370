"""Rules that concern several keys of a recipe at once."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from swarmcli.recipe.schema import Recipe

_ONLY_FOR = {"betas": ("adam", "adamw"), "eps": ("adam", "adamw"), "momentum": ("sgd",)}
_STATISTICS = {"adam": ("exp_avg", "exp_avg_sq"), "adamw": ("exp_avg", "exp_avg_sq"), "sgd": ("momentum_buffer",)}


class Conflict(ValueError):
    """Keys that do not fit together. `key` is the one to point at, relative to the section that was checked."""

    def __init__(self, key: str, message: str) -> None:
        super().__init__(message)
        self.key = key


class Schedule(Protocol):
    """What `check_schedule` looks at."""

    @property
    def name(self) -> str: ...
    @property
    def warmup_steps(self) -> int: ...
    @property
    def total_steps(self) -> int | None: ...
    @property
    def model_fields_set(self) -> set[str]: ...


def beside(directory: Path, text: str) -> Path:
    """An absolute path: `~` is the home directory, and what is relative begins in `directory`."""
    return (directory / Path(text).expanduser()).resolve()


def check_optimizer(name: str, given: Collection[str]) -> None:
    """Refuses a key that the chosen optimizer would not use."""
    for key, names in _ONLY_FOR.items():
        if key in given and name not in names:
            raise Conflict(key, f"{key} has no meaning for {name}; remove it, or use {' or '.join(names)}")


def check_schedule(schedule: Schedule, max_epochs: int | None) -> None:
    """Refuses a schedule without an end where it needs one, and keys that its shape would not use."""
    if schedule.name == "constant":
        for key in ("total_steps", "min_lr_ratio"):
            if key in schedule.model_fields_set:
                raise Conflict(
                    f"lr_scheduler.{key}",
                    f"{key} has no meaning for a constant rate; remove it, or take cosine",
                )
        return
    end = schedule.total_steps or max_epochs
    if end is None:
        raise Conflict(
            "lr_scheduler.name", f"a {schedule.name} schedule needs an end; set max_epochs or lr_scheduler.total_steps"
        )
    if schedule.warmup_steps >= end:
        raise Conflict(
            "lr_scheduler.warmup_steps",
            f"a warm-up of {schedule.warmup_steps} epochs does not fit into {end}; make it shorter than that",
        )


def check_gradient_averaging(method: str, given: Collection[str]) -> None:
    """Refuses a key that the chosen method would not use."""
    for key in ("rank", "min_compression_ratio"):
        if key in given and method == "plain":
            raise Conflict(key, f"{key} has no meaning for plain; remove it, or use method: powersgd or poweref")


def check_delay(grad_averaging: bool, optimizer_step: bool | None) -> None:
    """Refuses a step that would have to come before its gradients."""
    if grad_averaging and optimizer_step is False:
        raise Conflict(
            "optimizer_step",
            "a step cannot come before its gradients are averaged; remove it, or set grad_averaging: false",
        )


def check_batches(recipe: Recipe) -> None:
    """Refuses steps of one process that are larger than the whole swarm's epoch: each would overshoot it."""
    samples = recipe.micro_batch * recipe.accumulation_steps
    if samples > recipe.target_batch_size:
        own = [key for key in ("micro_batch_size", "gradient_accumulation_steps") if getattr(recipe.local, key)]
        raise Conflict(
            f"local.{own[0]}" if own else "micro_batch_size",
            f"a step of {recipe.micro_batch} × {recipe.accumulation_steps} samples is larger than an epoch of the "
            f"whole swarm; lower micro_batch_size or gradient_accumulation_steps to at most {recipe.target_batch_size} "
            "samples together, or raise target_batch_size",
        )


def check_modes(recipe: Recipe) -> None:
    """Refuses modes that contradict each other, and keys that the chosen ones would not use."""
    known = _STATISTICS[recipe.optimizer.name]
    for statistic in recipe.averaging.average_opt_statistics:
        if statistic not in known:
            raise Conflict(
                "averaging.average_opt_statistics",
                f"{recipe.optimizer.name} keeps no statistic {statistic!r}; it has {' and '.join(known)}",
            )
    if recipe.averaging.target_group_size is not None:
        _check_several_groups(recipe)
    if recipe.local_updates.enabled:
        _check_local_updates(recipe)


def _check_several_groups(recipe: Recipe) -> None:
    method = recipe.gradient_averaging.method
    if method != "plain":
        raise Conflict(
            "averaging.target_group_size",
            f"{method} needs one group of all peers, which share what it compresses with; remove target_group_size, or "
            "use method: plain",
        )
    if recipe.compression.state_averaging != "none":
        raise Conflict(
            "compression.state_averaging",
            f"several groups have no common average from which {recipe.compression.state_averaging} could tell small "
            "differences; remove it, or averaging.target_group_size",
        )


def _check_local_updates(recipe: Recipe) -> None:
    if recipe.gradient_averaging.model_fields_set:
        key = min(recipe.gradient_averaging.model_fields_set)
        raise Conflict(
            f"gradient_averaging.{key}",
            "local updates average parameters, never gradients; remove gradient_averaging, or set "
            "local_updates.enabled: false",
        )
    if "gradients" in recipe.compression.model_fields_set:
        raise Conflict(
            "compression.gradients",
            "local updates send no gradients; set compression.state_averaging instead, or set "
            "local_updates.enabled: false",
        )
    for key, delayed in (("grad_averaging", recipe.delay.grad_averaging), ("optimizer_step", recipe.delay.step)):
        if delayed:
            raise Conflict(
                f"delay.{key}",
                "local updates step after every batch and wait for nobody then; remove it (delay.state_averaging "
                "is what lets them go on while parameters are averaged)",
            )
