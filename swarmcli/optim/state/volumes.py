"""The parts of their training states that peers average: tensors in one order, cut into volumes of bounded size.

    tensors    |-- a --|- b -|------------------------ c ------------------------|- d -|
    volumes    |----- 0 -----|------ 1 ------|------ 2 ------|-------- 3 --------------|

    state ──fill──▶ a volume ── a round ──▶ the average ──apply──▶ state += average - state as it was copied

Each volume is averaged in a round of its own, so nobody needs memory for more than one at a time. The cut depends on
shapes and types alone: everyone cuts alike.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import accumulate, pairwise

import torch

from swarmcli.compression import CompressionInfo, TensorDescriptor, TensorRole
from swarmcli.errors import OptimizerError
from swarmcli.memory import fresh_memory
from swarmcli.optim.state.buffers import moved
from swarmcli.optim.state.statistics import statistics_of

VOLUME_BYTES = 64 << 20  # a constant of the protocol: peers that cut otherwise cannot average with each other
_ALIGNMENT = 64  # bytes
# Torch's optimizers divide by these, or by their roots.
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
    """The tensors that the peers of a run average of their states, in the order that all of them have.

    Tensors that are no floating-point numbers are left alone: batch norm's counter of batches, for one, counts what
    this peer computed, and neither a mean nor a maximum of it means anything. Newcomers download them with the state.
    """
    trained = (parameter for parameter in parameters if parameter.requires_grad and parameter.is_floating_point())
    yield from (_fixed(parameter, TensorRole.PARAMETER) for parameter in trained)
    yield from statistic_slots(parameters, optimizer, statistics)
    yield from (_fixed(tensor, TensorRole.UNSPECIFIED) for tensor in extra_tensors if tensor.is_floating_point())


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


@dataclass(frozen=True, slots=True)
class Extent:
    """Elements `begin` to `end - 1` of the flattened tensor with this index in a list."""

    index: int
    begin: int
    end: int

    @property
    def numel(self) -> int:
        return self.end - self.begin


def cut(tensors: Sequence[TensorDescriptor], most: int) -> list[tuple[Extent, ...]]:
    """Volumes of at most `most` bytes (but of one element at least), one behind the other; one, if all fits into it.

    A tensor that is larger is cut into slices of nearly equal size: codecs that choose by size treat them alike. All
    others stay whole, so any two neighbouring volumes are together more than `most`.
    """
    volumes: list[list[Extent]] = [[]]
    room = most
    for index, tensor in enumerate(tensors):
        size = tensor.dtype.itemsize
        count = max(1, -(-tensor.numel // max(1, most // size)))
        for begin, end in pairwise(tensor.numel * number // count for number in range(count + 1)):
            nbytes = (end - begin) * size
            if nbytes > room and volumes[-1]:
                volumes.append([])
                room = most
            volumes[-1].append(Extent(index, begin, end))
            room -= nbytes
    return [tuple(volume) for volume in volumes]


class Volume:
    """Those parts of a state that are averaged in one round.

    nbytes   of all buffers
    infos    of each: what codecs may choose by
    outline  tensors like the buffers that hold nothing, for those who only need shapes and types
    tensors  the buffers, in host memory that nobody has touched before `fill`, and that goes with this object
    """

    def __init__(self, slots: Sequence[Slot], extents: Iterable[Extent]) -> None:
        """OptimizerError: statistics that the optimizer cannot have."""
        self._parts = [(slots[extent.index], extent) for extent in extents]
        self.infos = tuple(_info(slot, extent) for slot, extent in self._parts)
        sizes = (-(-info.descriptor.nbytes // _ALIGNMENT) * _ALIGNMENT for info in self.infos)
        self._offsets = list(accumulate(sizes, initial=0))  # of the buffers, in one piece of memory
        self.nbytes = self._offsets[-1]
        self._before: list[torch.Tensor] | None = None  # what was pinned, unless nothing can change meanwhile
        for slot, _ in self._parts:
            slot.find()

    @property
    def outline(self) -> list[torch.Tensor]:
        return [torch.empty(info.descriptor.shape, dtype=info.descriptor.dtype, device="meta") for info in self.infos]

    @cached_property
    def tensors(self) -> list[torch.Tensor]:
        return self._in_memory()

    @torch.no_grad()
    def pin(self) -> None:
        """Copies the state as it is: `fill` and `apply` go by that from now on."""
        self._before = self._before or self._in_memory()
        self._copy_into(self._before)

    @torch.no_grad()
    def fill(self) -> None:
        """The buffers hold what was pinned, or else the state as it is."""
        if self._before is None:
            self._copy_into(self.tensors)
        else:
            for buffer, before in zip(self.tensors, self._before, strict=True):
                buffer.copy_(before)

    @torch.no_grad()
    def apply(self) -> None:
        """Moves the state by what the buffers hold now, as the delta rule says."""
        for index, ((slot, extent), average) in enumerate(zip(self._parts, self.tensors, strict=True)):
            tensor = slot.find()
            if tensor is None:
                continue
            if self._before is not None:
                live, before = _elements(tensor, extent), self._before[index]
                # Batch norm's running variances have no name here. To means that happen to be positive the rule for
                # squares does no harm.
                positive = slot.role is TensorRole.UNSPECIFIED and bool((before > 0).all() and (live > 0).all())
                average = moved(live, average, before, squares=slot.squares or positive)
            put(tensor, extent.begin, average)

    def _copy_into(self, buffers: Sequence[torch.Tensor]) -> None:
        for (slot, extent), buffer in zip(self._parts, buffers, strict=True):
            tensor = slot.find()
            if tensor is None:
                buffer.zero_()
            else:
                buffer.copy_(_elements(tensor, extent))

    def _in_memory(self) -> list[torch.Tensor]:
        # In one piece, which the system takes back whole: pieces of the heap would stay with the process.
        memory = fresh_memory(self.nbytes)
        return [
            memory[offset : offset + info.descriptor.nbytes].view(info.descriptor.dtype).view(info.descriptor.shape)
            for offset, info in zip(self._offsets, self.infos, strict=False)
        ]


def _info(slot: Slot, extent: Extent) -> CompressionInfo:
    form = slot.descriptor
    if extent.numel != form.numel:
        form = TensorDescriptor((extent.numel,), form.dtype)
    return CompressionInfo(form, extent.index, slot.role)


def _elements(tensor: torch.Tensor, extent: Extent) -> torch.Tensor:
    """A view of them, but for a tensor that is cut and not contiguous."""
    if extent.numel == tensor.numel():
        return tensor
    return tensor.detach().reshape(-1)[extent.begin : extent.end]


def put(tensor: torch.Tensor, begin: int, values: torch.Tensor) -> None:
    """Replaces elements of the flattened tensor, or all of it by values in its shape."""
    tensor = tensor.detach()
    end = begin + values.numel()
    if tensor.shape == values.shape:
        tensor.copy_(values)
    elif tensor.is_contiguous():
        tensor.view(-1)[begin:end].copy_(values)
    else:
        whole = tensor.reshape(-1).clone()
        whole[begin:end].copy_(values)
        tensor.copy_(whole.view(tensor.shape))
