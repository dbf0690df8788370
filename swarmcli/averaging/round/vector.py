"""The memory of a round: a member's own tensors as one vector, and the averages beside them."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import pairwise

import torch

from swarmcli.averaging.round.layout import Layout, Part, Segment
from swarmcli.compression.base import all_finite
from swarmcli.memory import fresh_memory


class Inputs:
    """A member's own tensors as one vector. They are read in place, and copied only if they are not plain memory."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._flat = [tensor.detach().cpu().contiguous().reshape(-1) for tensor in tensors]

    def part(self, part: Part) -> torch.Tensor:
        """A flat tensor: a view if the part lies within one tensor, otherwise a copy."""
        starts, tensors = part.segment.starts, part.segment.tensors
        pieces = []
        place, position = bisect_right(starts, part.start) - 1, part.start
        while position < part.stop:
            end = min(part.stop, starts[place + 1])
            if end > position:
                pieces.append(self._flat[tensors[place]][position - starts[place] : end - starts[place]])
            place, position = place + 1, end
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)

    @property
    def tensors(self) -> Sequence[torch.Tensor]:
        """Each of them flat."""
        return self._flat

    def all_finite(self) -> bool:
        """Whether all of it may be averaged: NaN and infinity may not."""
        return all(all_finite(flat) for flat in self._flat)


class Results:
    """Memory for all averages, beside the inputs."""

    def __init__(self, layout: Layout, memory: torch.Tensor | None = None) -> None:
        """`memory`: (layout.nbytes,) of uint8, to write all of it into; None: fresh."""
        self._layout = layout
        memory = memory if memory is not None else fresh_memory(layout.nbytes)
        # A piece of no bytes may have strides that cannot be viewed as another type.
        self._segments = [
            memory[each.offset : each.end].view(each.dtype) if each.numel else torch.zeros(0, dtype=each.dtype)
            for each in layout.segments
        ]

    def part(self, part: Part) -> torch.Tensor:
        """The flat tensor that a part occupies."""
        return self._segment(part.segment)[part.start : part.stop]

    def tensors(self) -> list[torch.Tensor]:
        """Views in the shapes of the inputs."""
        views: dict[int, torch.Tensor] = {}
        for segment in self._layout.segments:
            flat = self._segment(segment)
            for index, (start, stop) in zip(segment.tensors, pairwise(segment.starts), strict=True):
                views[index] = flat[start:stop].view(self._layout.descriptors[index].shape)
        return [views[index] for index in range(len(views))]

    def release(self) -> None:
        """Lets go of the memory; nothing is read or written here any more."""
        self._segments.clear()

    def _segment(self, segment: Segment) -> torch.Tensor:
        return self._segments[segment.index]
