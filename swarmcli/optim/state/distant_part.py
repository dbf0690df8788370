"""Of one volume the statistics that lie in other processes: read and written there, a few MiB at a time.

A *moment* is what they were when an averaging began: by place, in the memory of those who have them, or copied.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from typing import NamedTuple, TypeAlias

import torch

from swarmcli.averaging.state.distant import PIECE, AnyTensor
from swarmcli.compression import TensorDescriptor
from swarmcli.optim.state.delta_rule import moved
from swarmcli.optim.state.slots import Slot, check_shape, no_such_statistic
from swarmcli.optim.state.statistics import Piece, Statistics
from swarmcli.optim.state.volumes import Extent, cut

Moment: TypeAlias = Mapping[str, AnyTensor]


class _Part(NamedTuple):
    piece: Piece
    buffer: int  # of the volume, that it goes into …
    offset: int  # … from this element on
    squares: bool

    def of(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        return tensors[self.buffer].view(-1)[self.offset : self.offset + self.piece.end - self.piece.begin]


class DistantPart:
    """All methods block, and raise SiteError when a process is gone; while one runs nobody steps the optimizer."""

    def __init__(self, statistics: Statistics, slots: Mapping[int, tuple[Slot, Extent]]) -> None:
        """`slots`: for each buffer of the volume that is for such a statistic, which elements of it those are."""
        self._statistics = statistics
        spans = list(slots.items())
        lengths = [TensorDescriptor((extent.numel,), slot.like.dtype) for _, (slot, extent) in spans]
        self._batches = [
            [_part(*spans[inside.index], inside) for inside in batch if inside.numel] for batch in cut(lengths, PIECE)
        ]

    def fill(self, buffers: Sequence[torch.Tensor], moment: Moment | None) -> None:
        """Copies what they are now, or were at a moment; zeros for those that there are not."""
        there = self._statistics.describe() if moment is None else {}
        for batch in self._batches:
            values = self._read(batch, there) if moment is None else _pinned(batch, moment)
            for part, value in zip(batch, values, strict=True):
                target = part.of(buffers)
                target.zero_() if value is None else target.copy_(value)

    def apply(self, averages: Sequence[torch.Tensor], moment: Moment | None) -> None:
        """They become the averages; with a moment they are moved by what the averages differ from it."""
        there = self._statistics.describe()
        for batch in self._batches:
            batch = [part for part in batch if part.piece.place in there]
            values = [part.of(averages) for part in batch]
            if moment is not None:
                live = self._statistics.read([part.piece for part in batch])
                values = [_moved(*each) for each in zip(batch, live, values, _pinned(batch, moment), strict=True)]
            types = [there[part.piece.place].dtype for part in batch]
            if batch:
                self._statistics.write(
                    [part.piece for part in batch],
                    [value.to(dtype) for value, dtype in zip(values, types, strict=True)],
                )

    def _read(self, batch: Sequence[_Part], there: Container[str]) -> list[torch.Tensor | None]:
        wanted = [part.piece for part in batch if part.piece.place in there]
        values = dict(zip(wanted, self._statistics.read(wanted) if wanted else [], strict=True))
        return [values.get(part.piece) for part in batch]


def check(statistics: Statistics, slots: Iterable[Slot]) -> None:
    """Raises OptimizerError, which names it, for a statistic that the optimizer does not keep, or not in that shape."""
    elsewhere = [slot for slot in slots if slot.place]
    there = statistics.describe() if elsewhere else {}
    kept: dict[str, list[str]] = {}
    for place in there:
        kept.setdefault(place.split("/", 1)[0], []).append(place.split("/", 1)[1])
    for slot in elsewhere:
        index, name = slot.place.split("/", 1)
        if slot.place in there:
            check_shape(name, there[slot.place].shape, slot.like)
        elif index in kept:
            raise no_such_statistic(name, kept[index])


def pin(statistics: Statistics, slots: Iterable[Slot]) -> Moment:
    """What they are now. Those who have them keep it for as long as the moment lives."""
    places = {slot.place for slot in slots if slot.place}
    captured = statistics.capture()[0] if places else {}
    return {place: _still(captured[place]) for place in places & captured.keys()}


def _still(tensor: AnyTensor) -> AnyTensor:
    return tensor.detach().to("cpu", copy=True) if isinstance(tensor, torch.Tensor) else tensor


def _part(buffer: int, span: tuple[Slot, Extent], inside: Extent) -> _Part:
    slot, extent = span
    piece = Piece(slot.place, extent.begin + inside.begin, extent.begin + inside.end)
    return _Part(piece, buffer, inside.begin, slot.squares)


def _pinned(batch: Sequence[_Part], moment: Moment) -> list[torch.Tensor | None]:
    return [_elements(moment[part.piece.place], part.piece) if part.piece.place in moment else None for part in batch]


def _elements(tensor: AnyTensor, piece: Piece) -> torch.Tensor:
    if isinstance(tensor, torch.Tensor):
        return tensor.reshape(-1)[piece.begin : piece.end]
    size = tensor.dtype.itemsize
    return torch.frombuffer(bytearray(tensor.read(piece.begin * size, piece.end * size)), dtype=tensor.dtype)


def _moved(part: _Part, live: torch.Tensor, average: torch.Tensor, before: torch.Tensor | None) -> torch.Tensor:
    before = torch.zeros_like(live) if before is None else before
    return moved(live, average.to(live.dtype), before.to(live.dtype), squares=part.squares)
