"""When which level of a hierarchy averages: periods and group sizes, checked and looked up. No input or output here."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass

from swarmcli.averaging.checks import as_count


@dataclass(frozen=True, slots=True)
class LevelPlan:
    """Levels in the order in which they were given, usually the smallest groups and the shortest period first.

    periods       (levels,) steps, or epochs of a swarm, from one average of a level to its next
    group_sizes   (levels,) members of a group of each level; in a swarm upper bounds, and None where there is none
    warmup_steps  steps at the beginning at which nothing is averaged
    """

    periods: tuple[int, ...]
    group_sizes: tuple[int | None, ...]
    warmup_steps: int = 0

    def __len__(self) -> int:
        return len(self.periods)

    def due(self, step: int) -> int | None:
        """The index of the level that averages at this step: the last whose period divides it. None: no level does."""
        if step < self.warmup_steps:
            return None
        fitting = (index for index in reversed(range(len(self))) if step % self.periods[index] == 0)
        return next(fitting, None)


def read_plan(period_group_size_dict: object, warmup_steps: object, *, swarm: bool = False) -> LevelPlan:
    """Checks what the user gave. In a `swarm` a group needs no size, and a period of one epoch is many steps.

    Raises TypeError and ValueError that name the argument, the value and what to give instead. Warns of a hierarchy
    that communicates more than it saves, and of levels that never get their turn.
    """
    if not isinstance(period_group_size_dict, Mapping):
        kind = type(period_group_size_dict).__name__
        raise TypeError(f"period_group_size_dict must be a mapping of periods to group sizes, got {kind}")
    if not period_group_size_dict:
        raise ValueError(
            "period_group_size_dict is empty; give at least one level, as {4: 8}: every 4 steps, 8 members"
        )
    periods = tuple(
        as_count(period, "a period in period_group_size_dict", least=1) for period in period_group_size_dict
    )
    sizes = tuple(
        None if size is None and swarm else as_count(size, f"the group size of period {period}", least=1)
        for period, size in period_group_size_dict.items()
    )
    if max(periods) == 1 and not swarm:
        warnings.warn(
            "the largest period is 1: averaging parameters after every step costs as much as averaging gradients, and "
            "learns no faster; use DistributedDataParallel, or longer periods",
            stacklevel=3,
        )
    _warn_of_shadows(periods)
    return LevelPlan(periods, sizes, as_count(warmup_steps, "warmup_steps"))


def _warn_of_shadows(periods: tuple[int, ...]) -> None:
    for index, period in enumerate(periods):
        shadow = next((later for later in periods[index + 1 :] if period % later == 0), None)
        if shadow is not None:
            warnings.warn(
                f"the level of period {period} never averages: the later one of period {shadow} is due at the same "
                "steps, and the last that is due averages; give the levels by ascending periods",
                stacklevel=4,
            )
