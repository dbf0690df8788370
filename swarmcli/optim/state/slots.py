"""What peers average of their training states, tensor by tensor."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from swarmcli.compression import TensorDescriptor, TensorRole
from swarmcli.errors import OptimizerError
from swarmcli.optim.state.statistics import statistics_of

# Of torch's optimizers: what they divide by, or by the root of.
_SQUARES = frozenset({"exp_avg_sq", "max_exp_avg_sq", "square_avg", "acc_delta", "exp_inf", "sum"})


@dataclass(frozen=True, slots=True)
class Slot:
    """One tensor that is averaged: found anew each time, since optimizers and users put others in their places.

    Where there is none, zeros stand for it, and the average of it changes nothing.
    """

    like: torch.Tensor  # has the shape and type
    role: TensorRole
    find: Callable[[], torch.Tensor | None]
    squares: bool = False  # means of squares, or something else that is never negative and that others divide by

    @property
    def descriptor(self) -> TensorDescriptor:
        return TensorDescriptor.of(self.like)


def state_slots(
    parameters: Sequence[torch.Tensor],
    optimizer: torch.optim.Optimizer,
    statistics: Sequence[str],
    extra_tensors: Sequence[torch.Tensor],
) -> Iterator[Slot]:
    """What the peers of a run average of their states, in the order that all of them have."""
    yield from parameter_slots(parameters)
    yield from statistic_slots(parameters, optimizer, statistics)
    yield from extra_slots(extra_tensors)


def parameter_slots(parameters: Iterable[torch.Tensor]) -> Iterator[Slot]:
    return (_fixed(parameter, TensorRole.PARAMETER) for parameter in parameters if parameter.is_floating_point())


def statistic_slots(
    parameters: Iterable[torch.Tensor], optimizer: torch.optim.Optimizer, names: Sequence[str]
) -> Iterator[Slot]:
    """Statistics of the optimizer by name (`exp_avg`, `momentum_buffer`, …), of the parameters that are trained.

    They have the shape of their parameter. One that the optimizer has not made yet counts as zero, as it would begin.
    Finding one raises OptimizerError, which names the statistic, where the optimizer has others but not this.
    ValueError: the optimizer keeps its statistics in other processes.
    """
    if names and statistics_of(optimizer).waits:
        raise ValueError(
            f"average_opt_statistics={tuple(names)!r}: {type(optimizer).__name__} shares its statistics among the "
            f"processes of a site (zero), where they cannot be averaged; leave average_opt_statistics empty, or give "
            f"the site an optimizer without zero"
        )
    for parameter in parameters:
        for name in dict.fromkeys(names) if parameter.requires_grad else ():
            find = partial(_statistic, optimizer, parameter, name)
            yield Slot(parameter, TensorRole.OPTIMIZER, find, name in _SQUARES)


def extra_slots(tensors: Iterable[torch.Tensor]) -> Iterator[Slot]:
    """Of other tensors of the model, batch norm's statistics for example.

    Those that are no floating-point numbers are left alone: batch norm's counter of batches, for one, counts what this
    peer computed, and neither a mean nor a maximum of it means anything. Newcomers download them with the state.
    """
    return (_fixed(tensor, TensorRole.UNSPECIFIED) for tensor in tensors if tensor.is_floating_point())


def _fixed(tensor: torch.Tensor, role: TensorRole) -> Slot:
    return Slot(tensor, role, lambda: tensor)


def _statistic(optimizer: torch.optim.Optimizer, parameter: torch.Tensor, name: str) -> torch.Tensor | None:
    made = optimizer.state.get(parameter, {})
    if made and name not in made:
        there = ", ".join(map(str, made))
        raise OptimizerError(f"average_opt_statistics: there is no {name!r}; there are {there}")
    value = made.get(name)
    if value is None or (isinstance(value, torch.Tensor) and value.shape == parameter.shape):
        return value
    form = f"shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__
    raise OptimizerError(
        f"average_opt_statistics: {name!r} has {form}; what can be averaged has its parameter's shape, "
        f"{tuple(parameter.shape)}"
    )
