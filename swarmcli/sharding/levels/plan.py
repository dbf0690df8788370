"""Which level of a hierarchy averages at which step, which parameters are averaged, and the outcome. No I/O."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from swarmcli.averaging.checks import as_count

NOTHING = "no parameter has a gradient"  # the reason when there is nothing to average


@dataclass(frozen=True, slots=True)
class LevelAverage:
    """The outcome of averaging at one level."""

    step: int  # at which it was; in a swarm the one that most members were at, or this peer's if that is higher
    level: int  # 0: the first entry of `period_group_size_dict`
    group: str  # the members: the ranks of a process group, or the place that the members of a swarm group share
    members: int  # whose parameters are in the average; 0: there is none
    reason: str = ""  # why there is none; the parameters are as they were

    @property
    def averaged(self) -> bool:
        """Whether the parameters here are the average now."""
        return self.members > 0


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


def outline(tensors: Sequence[torch.Tensor], places: Sequence[int]) -> bytes:
    """32 bytes, equal for tensors of equal shapes and types at equal places among all parameters. The places count
    because different parameters may have the same shape."""
    kinds = [(tuple(tensor.shape), str(tensor.dtype)) for tensor in tensors]
    return hashlib.sha256(repr((kinds, list(places))).encode()).digest()


def chosen(params: Iterable[Any], fits: Callable[[torch.Tensor], bool]) -> tuple[list[torch.Tensor], list[int]]:
    """The parameters for which `fits` is true, in their order, and their places among all that were given. `params`:
    parameters, or the parameter groups of an optimizer. Raises TypeError for anything else."""
    found = [(param, place) for place, param in enumerate(_flat(params)) if fits(param)]
    return [param for param, _ in found], [place for _, place in found]


def _flat(params: Iterable[Any]) -> list[torch.Tensor]:
    if isinstance(params, torch.Tensor | torch.nn.Module):
        raise TypeError(f"params must be parameters or parameter groups, got a {type(params).__name__}; {_HINT}")
    found: list[torch.Tensor] = []
    for entry in params:
        members = list(entry["params"]) if isinstance(entry, dict) and "params" in entry else [entry]
        for param in members:
            if not isinstance(param, torch.nn.Parameter):
                raise TypeError(f"params holds a {type(param).__name__} where a parameter was expected; {_HINT}")
        found += members
    return found


_HINT = "give model.parameters() or optimizer.param_groups"
