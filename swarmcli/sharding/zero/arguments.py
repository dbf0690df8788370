"""Checks the arguments of ZeroRedundancyOptimizer, and says what to pass instead of wrong ones."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from swarmcli.sharding.transfer import gather_numbers
from swarmcli.sharding.zero.ownership import check_weights


def listed_params(params: Any) -> list[Any]:
    """`params` as a list: tensors, (name, tensor) pairs or parameter groups, one kind only.

    Raises TypeError (a tensor, something that cannot be iterated, kinds mixed) and ValueError (nothing in it, a group
    without 'params').
    """
    if isinstance(params, torch.Tensor):
        raise TypeError(f"params is one {torch.typename(params)}: pass an iterable of tensors, for example [tensor]")
    try:
        entries = list(params)
    except TypeError as error:
        raise TypeError(
            f"params is a {torch.typename(params)}: pass an iterable of tensors or of dicts (parameter groups)"
        ) from error
    if not entries:
        raise ValueError("params is empty: pass at least one tensor or parameter group")
    kinds = {_kind(position, entry) for position, entry in enumerate(entries)}
    if len(kinds) > 1:
        raise TypeError(f"params mixes {' and '.join(sorted(kinds))}: pass an iterable of one kind")
    return entries


def _kind(position: int, entry: Any) -> str:
    if isinstance(entry, torch.Tensor):
        return "tensors"
    if isinstance(entry, dict):
        if "params" not in entry:
            raise ValueError(
                f"parameter group {position} has no 'params' (only {sorted(map(str, entry))}): "
                "each group maps 'params' to its tensors"
            )
        return "dicts"
    if isinstance(entry, tuple) and len(entry) == 2 and isinstance(entry[1], torch.Tensor):
        return "(name, tensor) pairs"
    raise TypeError(
        f"params[{position}] is a {torch.typename(entry)}: pass an iterable of tensors or of dicts (parameter groups)"
    )


def check_parameters(parameters: Sequence[torch.Tensor], first: int = 0) -> None:
    """Raises ValueError for a tensor that cannot be sharded; `first` is the index of the first one not yet checked."""
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
    """A collective call. Raises ValueError, at every rank, when these parameter groups are not alike at all ranks.

    Small parameters share a message, so that of ranks with unlike ones each would read others' numbers as its own.
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
    """Raises TypeError for what makes no optimizer."""
    if not callable(optimizer_class):
        raise TypeError(
            f"optimizer_class is a {torch.typename(optimizer_class)}: pass the class itself, such as torch.optim.Adam, "
            "and its settings as keywords (lr=0.1)"
        )


def checked_place(value: Any, name: str, count: int, what: str) -> int:
    """`value` as the number of one of `count` things. Raises TypeError for no whole number, ValueError beyond them."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} is {value!r}, a {torch.typename(value)}: pass the number of a {what}, such as 0")
    if not 0 <= value < count:
        raise ValueError(f"{name} is {value}, but there is no {what} {value}: they are numbered 0 to {count - 1}")
    return value


def group_of(process_group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """The group, by default all processes. Raises TypeError for what is none, ValueError when there is none, or this
    process is not in it."""
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


def agreed_weights(shares: Sequence[float] | float | None, group: dist.ProcessGroup) -> list[float]:
    """The weight of each rank: equal ones, those given (the same at every rank), or everyone's own capacity.

    With `shares` it is a collective call. Raises ValueError at every rank when any rank's are unusable or differ.
    """
    world_size = dist.get_world_size(group)
    if shares is None:
        return [1.0] * world_size
    own = _numbers(shares)
    shapes = gather_numbers([float(isinstance(shares, Iterable)), float(len(own))], group)
    if any(shape != shapes[0] for shape in shapes):
        raise ValueError(
            "the ranks give different kinds of shares: either every rank gives the weights of all "
            f"({world_size} numbers), or every rank gives its own capacity (one number)"
        )
    if not isinstance(shares, Iterable):
        return check_weights([capacity for (capacity,) in gather_numbers(own, group)], world_size)
    everyones = [check_weights(weights, world_size) for weights in gather_numbers(own, group)]
    for rank, weights in enumerate(everyones):
        if weights != everyones[0]:
            raise ValueError(f"shares differ: rank 0 has {everyones[0]}, rank {rank} has {weights}; give all the same")
    return everyones[0]


def _numbers(shares: Any) -> list[float]:
    entries = list(shares) if isinstance(shares, Iterable) and not isinstance(shares, str | bytes) else [shares]
    try:
        if any(isinstance(entry, str | bytes) for entry in entries):
            raise TypeError("a text is no weight")
        return [float(entry) for entry in entries]
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"shares is {shares!r}: pass the weights of all ranks, such as [1.0, 3.0], or this rank's own capacity, "
            "one number"
        ) from error
