"""What peers average of their training states, as copies in host memory, and how the average comes back.

    state ──load──▶ buffers ── a round ──▶ the average ──apply──▶ state += average - state as it was loaded

That is the delta rule: what a peer learned while the round was under way is kept. Where nothing was learned meanwhile
the average is assigned, bit for bit, so that peers end with equal states.

For means of squares that sum alone would be wrong: where the state and the average have both fallen below what was
loaded it comes out near zero or negative, and Adam divides by its root. So they never fall below both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from swarmcli.compression import CompressionInfo, TensorDescriptor, TensorRole
from swarmcli.errors import OptimizerError

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


def parameter_slots(parameters: Iterable[torch.Tensor]) -> Iterator[Slot]:
    return (_fixed(parameter, TensorRole.PARAMETER) for parameter in parameters if parameter.is_floating_point())


def gradient_slots(parameters: Iterable[torch.Tensor]) -> Iterator[Slot]:
    """Of the parameters that are trained."""
    for parameter in _trained(parameters):
        yield Slot(parameter, TensorRole.GRADIENT, partial(getattr, parameter, "grad"))


def statistic_slots(
    parameters: Iterable[torch.Tensor], optimizer: torch.optim.Optimizer, names: Sequence[str]
) -> Iterator[Slot]:
    """Statistics of the optimizer by name (`exp_avg`, `momentum_buffer`, …), of the parameters that are trained.

    They have the shape of their parameter. One that the optimizer has not made yet counts as zero, as it would begin.
    Loading raises OptimizerError, which names the statistic, where the optimizer has others but not this.
    """
    for parameter in _trained(parameters):
        for name in dict.fromkeys(names):
            find = partial(_statistic, optimizer, parameter, name)
            yield Slot(parameter, TensorRole.OPTIMIZER, find, squares=name in _SQUARES)


def extra_slots(tensors: Iterable[torch.Tensor]) -> Iterator[Slot]:
    """Of other tensors of the model, batch norm's statistics for example.

    Those that are no floating-point numbers are left alone: batch norm's counter of batches, for one, counts what this
    peer computed, and neither a mean nor a maximum of it means anything. Newcomers download them with the state.
    """
    return (_fixed(tensor, TensorRole.UNSPECIFIED) for tensor in tensors if tensor.is_floating_point())


class StateBuffers:
    """`tensors`: one in host memory for each slot."""

    def __init__(self, slots: Iterable[Slot]) -> None:
        """Raises OptimizerError for statistics that the optimizer cannot have."""
        self._slots = tuple(slots)
        # Memory that nobody has written to costs nothing yet: before the first round these only have addresses.
        self.tensors = [torch.empty(slot.like.shape, dtype=slot.like.dtype) for slot in self._slots]
        self._before: list[torch.Tensor] | None = None  # what was loaded, unless nothing can change meanwhile
        self._live()

    @property
    def infos(self) -> tuple[CompressionInfo, ...]:
        """For codecs that choose by the role of a tensor."""
        pairs = enumerate(zip(self.tensors, self._slots, strict=True))
        return tuple(CompressionInfo(TensorDescriptor.of(tensor), index, slot.role) for index, (tensor, slot) in pairs)

    @torch.no_grad()
    def load(self, *, changes: bool) -> None:
        """Copies the state into the buffers. `changes`: it may change before `apply`, which costs another copy."""
        live = self._live()
        if not changes:
            self._before = None
        elif self._before is None:
            self._before = [torch.empty_like(tensor) for tensor in self.tensors]
        for index, (buffer, tensor) in enumerate(zip(self.tensors, live, strict=True)):
            if tensor is None:
                buffer.zero_()
            else:
                buffer.copy_(tensor)
            if self._before is not None:
                self._before[index].copy_(buffer)

    @torch.no_grad()
    def apply(self) -> None:
        """Moves the state by what the buffers hold now, as the delta rule says."""
        for index, (average, live) in enumerate(zip(self.tensors, self._live(), strict=True)):
            if live is None:
                continue
            if self._before is None:
                live.copy_(average)
            else:
                moved = _moved(live, average, self._before[index])
                if self._slots[index].squares or self._is_variance(index, live):
                    moved = torch.fmax(moved, torch.fmin(live.cpu(), average))
                live.copy_(moved)

    def _is_variance(self, index: int, live: torch.Tensor) -> bool:
        """Batch norm's running variances have no name here. For means that happen to be positive the rule does no
        harm."""
        before = self._before[index] if self._before is not None else live
        return self._slots[index].role is TensorRole.UNSPECIFIED and bool((before > 0).all() and (live > 0).all())

    def _live(self) -> list[torch.Tensor | None]:
        return [slot.find() for slot in self._slots]


def _fixed(tensor: torch.Tensor, role: TensorRole) -> Slot:
    return Slot(tensor, role, lambda: tensor)


def _trained(parameters: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
    return (parameter for parameter in parameters if parameter.requires_grad)


def _statistic(optimizer: torch.optim.Optimizer, parameter: torch.Tensor, name: str) -> torch.Tensor | None:
    made = optimizer.state.get(parameter, {})
    if made and name not in made:
        there_are = ", ".join(map(str, made))
        raise OptimizerError(f"average_opt_statistics: there is no {name!r}; there are {there_are}")
    value = made.get(name)
    if value is None:
        return None
    if not isinstance(value, torch.Tensor) or value.shape != parameter.shape:
        form = f"shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__
        raise OptimizerError(
            f"average_opt_statistics: {name!r} has {form}; what can be averaged has its parameter's shape, "
            f"{tuple(parameter.shape)}"
        )
    return value


def _moved(live: torch.Tensor, average: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
    """Where the state stands as it was loaded, or was not finite when it was, that is the average itself."""
    present = live.cpu()
    exact = torch.float32 if present.dtype.itemsize < 4 else present.dtype
    change = average.to(exact) - before.to(exact)
    moved = (present.to(exact) + change).to(average.dtype)
    return torch.where((present == before) | ~before.isfinite(), average, moved)
