"""What every way of averaging within the groups of a hierarchy has in common, and which parameters are averaged."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

NOTHING = "no parameter has a gradient"  # the reason when there is nothing to average


@dataclass(frozen=True, slots=True)
class LevelAverage:
    """What averaging at one level gave."""

    step: int  # at which it was; in a swarm the highest of the members', whom the others have caught up with
    level: int  # 0: the first entry of `period_group_size_dict`
    group: str  # of whom: the ranks of a process group, or the place that the members of a swarm group share
    members: int  # whose parameters are in the average; 0: there is none
    reason: str = ""  # why there is none; the parameters are as they were

    @property
    def averaged(self) -> bool:
        """Whether the parameters here are the average now."""
        return self.members > 0


class LevelBackend(Protocol):
    """Groups of one member at several levels, within which tensors are averaged. Used by one thread."""

    def take_step(self, tensors: Sequence[torch.Tensor], step: int) -> tuple[int, LevelAverage | None]:
        """Averages if it is the turn of a level; the number of the next step, and what came of it."""
        ...

    def average(self, level: int, tensors: Sequence[torch.Tensor], step: int) -> LevelAverage:
        """Replaces the tensors by their mean over the members of this level's group, all of them or none.

        Every member that averages at this level gives tensors of the same shapes and types, in the same order.
        """
        ...


def tensors_with_gradients(params: Iterable[Any]) -> list[torch.Tensor]:
    """The parameters that have a gradient, from parameters or from the parameter groups of an optimizer, in order.

    Raises TypeError for anything else.
    """
    return [param for param in _flat(params) if param.grad is not None]


def trainable_tensors(params: Iterable[Any]) -> list[torch.Tensor]:
    """Those that will have a gradient, in the same order. Raises TypeError."""
    return [param for param in _flat(params) if param.requires_grad]


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
