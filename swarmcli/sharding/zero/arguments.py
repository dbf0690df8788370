"""Checks of ZeroRedundancyOptimizer's arguments; the errors say what to pass instead."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from swarmcli.sharding.transfer import gather_numbers


def check_parameters(parameters: Sequence[torch.Tensor], first: int = 0) -> None:
    """Raises ValueError for a tensor that cannot be sharded. `first`: the index of the first that was not checked."""
    for index, parameter in enumerate(parameters[first:], start=first):
        if parameter.layout is not torch.strided:
            raise ValueError(
                f"parameter {index} is sparse ({parameter.layout}), but its new values are sent to every rank as a "
                "dense tensor: make it dense (a sparse gradient of a dense parameter is fine)"
            )
    seen: dict[torch.Tensor, int] = {}
    for index, parameter in enumerate(parameters):
        if parameter in seen:
            raise ValueError(
                f"parameters {seen[parameter]} and {index} are one tensor, which would be stepped twice: name it once"
            )
        seen[parameter] = index


def check_agreement(groups: Sequence[Mapping[str, Any]], bucket_view: bool, group: dist.ProcessGroup) -> None:
    """A collective call. Raises ValueError at every rank if these parameter groups are not alike at all ranks.

    Small parameters share a message, so a rank with other parameters would read numbers into the wrong ones.
    """
    listed = [list(each["params"]) for each in groups]
    shapes = [[(tuple(parameter.shape), str(parameter.dtype)) for parameter in each] for each in listed]
    trained = [[parameter.requires_grad for parameter in each] for each in listed]
    own = [float(sum(map(len, listed))), _digest(shapes), _digest(trained), float(bucket_view)]
    everyones = gather_numbers(own, group)
    for rank, (count, *others) in enumerate(everyones):
        if [count, *others] != everyones[0]:
            count0, *first = everyones[0]
            unlike = (
                f"rank 0 has {int(count0)}, rank {rank} has {int(count)}"
                if count != count0
                else f"{_UNLIKE[[a == b for a, b in zip(others, first, strict=True)].index(False)]} of rank {rank} "
                "are not those of rank 0"
            )
            raise ValueError(f"params differ between the ranks: {unlike}; {_ALIKE}")


_UNLIKE = ("the shapes, types, order or groups", "the trainable ones (requires_grad)", "the parameters_as_bucket_view")
_ALIKE = "give every rank the same parameters, in the same order and the same groups, with the same ones frozen"


def _digest(outline: Any) -> float:
    """48 bits, which a float64 holds exactly."""
    return float(int.from_bytes(hashlib.sha256(repr(outline).encode()).digest()[:6]))


def check_class(optimizer_class: Any) -> None:
    """Raises TypeError for anything that cannot be called to make an optimizer."""
    if not callable(optimizer_class):
        raise TypeError(
            f"optimizer_class is a {torch.typename(optimizer_class)}: pass the class itself, such as torch.optim.Adam, "
            "and its settings as keywords (lr=0.1)"
        )


def checked_place(value: Any, name: str, count: int, what: str) -> int:
    """`value`, if it is a number from 0 to `count - 1`. Raises TypeError for no whole number, otherwise ValueError."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} is {value!r}, a {torch.typename(value)}: pass the number of a {what}, such as 0")
    if not 0 <= value < count:
        raise ValueError(f"{name} is {value}, but there is no {what} {value}: they are numbered 0 to {count - 1}")
    return value


def group_of(process_group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """The group; None: all processes. Raises TypeError for anything else, ValueError if there is none, or this process
    is not in it."""
    group = process_group if process_group is not None else dist.group.WORLD
    if group is None:
        raise ValueError("there is no process group: call torch.distributed.init_process_group before, or hand one in")
    if not isinstance(group, dist.ProcessGroup) and group is not dist.GroupMember.NON_GROUP_MEMBER:
        raise TypeError(
            f"process_group is a {torch.typename(group)}: pass what torch.distributed.new_group returned, or None for "
            "all processes"
        )
    if dist.get_rank(group) < 0:
        raise ValueError(
            f"process {dist.get_rank()} is no member of the process group: make this object in members only"
        )
    return group


def gathered_shares(share: float | None, group: dist.ProcessGroup) -> list[float]:
    """The shares that all ranks name for themselves, by rank; None counts as 1. A collective call.

    Raises TypeError for anything but a number, and ValueError, at every rank, for a share that is negative or not
    finite, or if all are 0.
    """
    if isinstance(share, bool) or not isinstance(share, int | float | None):
        raise TypeError(f"shares is {share!r}: pass how much this rank can hold, one number such as 24e9")
    shares = [each for (each,) in gather_numbers([1.0 if share is None else float(share)], group)]
    for rank, each in enumerate(shares):
        if not math.isfinite(each) or each < 0:
            raise ValueError(f"the share of rank {rank} is {each}: a share is a finite number, 0 or more")
    if not any(shares):
        raise ValueError("all shares are 0, so nobody could hold the optimizer's state: give one rank more than 0")
    return shares
