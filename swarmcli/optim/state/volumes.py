"""How the list of tensors that peers average of their states is cut into volumes of bounded size.

    tensors    |-- a --|- b -|------------------------ c ------------------------|- d -|
    volumes    |----- 0 -----|------ 1 ------|------ 2 ------|-------- 3 --------------|

A volume is averaged in a round of its own, so nobody needs memory for more than one at a time. It depends on shapes
and types alone: everyone cuts alike.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from swarmcli.compression import TensorDescriptor

VOLUME_BYTES = 64 << 20  # a constant of the protocol: peers that cut otherwise cannot average with each other


@dataclass(frozen=True, slots=True)
class Extent:
    """Elements `begin` to `end - 1` of the flattened tensor with this index in a list."""

    index: int
    begin: int
    end: int

    @property
    def numel(self) -> int:
        return self.end - self.begin


def whole(tensors: Sequence[TensorDescriptor]) -> tuple[Extent, ...]:
    """All tensors of a list, each in one piece."""
    return tuple(Extent(index, 0, tensor.numel) for index, tensor in enumerate(tensors))


def cut(tensors: Sequence[TensorDescriptor], most: int) -> list[tuple[Extent, ...]]:
    """Volumes of at most `most` bytes (but of one element at least), one behind the other; one, if all fits into it.

    A tensor that is larger is cut into slices of nearly equal size: codecs that choose by size treat them alike. All
    others stay whole, so any two neighbouring volumes are together more than `most`.
    """
    volumes: list[list[Extent]] = [[]]
    room = most
    for index, tensor in enumerate(tensors):
        size = tensor.dtype.itemsize
        for begin, end in _slices(tensor.numel, max(1, most // size)):
            nbytes = (end - begin) * size
            if nbytes > room and volumes[-1]:
                volumes.append([])
                room = most
            volumes[-1].append(Extent(index, begin, end))
            room -= nbytes
    return [tuple(volume) for volume in volumes]


def _slices(numel: int, most: int) -> Iterator[tuple[int, int]]:
    count = max(1, -(-numel // most))
    return pairwise(numel * number // count for number in range(count + 1))
