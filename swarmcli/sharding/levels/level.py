"""What every way of averaging within the groups of a hierarchy has in common, and which parameters are averaged."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import torch

# Which of all parameters the tensors are, for shapes alone do not tell them apart; None: all of them.
Places: TypeAlias = Sequence[int] | None

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

    def take_step(
        self, tensors: Sequence[torch.Tensor], step: int, places: Places = None
    ) -> tuple[int, LevelAverage | None]:
        """Averages if it is the turn of a level; the number of the next step, and what came of it."""
        ...

    def average(self, level: int, tensors: Sequence[torch.Tensor], step: int, places: Places = None) -> LevelAverage:
        """Replaces the tensors by their mean over the members of this level's group, all of them or none.

        Every member that averages at this level gives tensors of the same shapes and types, in the same order, and of
        the same places.
        """
        ...


def tensors_with_gradients(params: Iterable[Any]) -> tuple[list[torch.Tensor], list[int]]:
    """The parameters that have a gradient, from parameters or from the parameter groups of an optimizer, in order, and
    their places among all that were given.

    Raises TypeError for anything else.
    """
    return _chosen(params, lambda param: param.grad is not None)


def trainable_tensors(params: Iterable[Any]) -> tuple[list[torch.Tensor], list[int]]:
    """Those that will have a gradient, in the same order, and their places. Raises TypeError."""
    return _chosen(params, lambda param: param.requires_grad)


def outline(tensors: Sequence[torch.Tensor], places: Places) -> bytes:
    """32 bytes, equal for tensors of equal shapes and types at equal places."""
    listed = list(range(len(tensors))) if places is None else list(places)
    kinds = [(tuple(tensor.shape), str(tensor.dtype)) for tensor in tensors]
    return hashlib.sha256(repr((kinds, listed)).encode()).digest()


def _chosen(params: Iterable[Any], fits: Callable[[torch.Tensor], bool]) -> tuple[list[torch.Tensor], list[int]]:
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
