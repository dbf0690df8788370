"""Rules that concern several keys of a recipe at once."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Protocol

_ONLY_FOR = {"betas": ("adam", "adamw"), "eps": ("adam", "adamw"), "momentum": ("sgd",)}


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
