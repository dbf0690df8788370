"""Tensors that are not in this process's memory. Threads that may block read them in pieces."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import TypeAlias

import torch

from swarmcli.compression import TensorDescriptor
from swarmcli.compression.base import read_numbers

PIECE = 8 << 20  # bytes that are read at a time, and so in memory


class DistantTensor(ABC):
    """A tensor of a snapshot that lies elsewhere: in another process of a site, or in a file.

    It does not change, and it can be read for as long as this object lives. The process or file that keeps it for the
    snapshot frees it when the last object is gone.
    """

    def __init__(self, descriptor: TensorDescriptor) -> None:
        self.dtype, self.shape, self.nbytes = descriptor.dtype, descriptor.shape, descriptor.nbytes

    @abstractmethod
    def read(self, begin: int, end: int) -> memoryview:
        """A copy of bytes `begin` to `end` of its contiguous form. Blocks, so never on an event loop; thread-safe.

        Raises SiteError if the process that has it is gone, OSError if the file cannot be read.
        """


AnyTensor: TypeAlias = torch.Tensor | DistantTensor


def pieces(nbytes: int) -> Iterator[tuple[int, int]]:
    """`nbytes` cut into ranges of at most PIECE."""
    for begin in range(0, nbytes, PIECE):
        yield begin, min(begin + PIECE, nbytes)


@torch.no_grad()
def fill(target: torch.Tensor, source: AnyTensor) -> None:
    """Copies a tensor of the same type and shape into `target`; a distant one piece by piece. Blocks."""
    if isinstance(source, torch.Tensor):
        target.copy_(source)
    elif target.device.type == "cpu" and target.is_contiguous():
        memory = target.detach().view(-1).view(torch.uint8)  # a view, so that the target's version counter moves
        for begin, end in pieces(source.nbytes):
            memory[begin:end].copy_(read_numbers(source.read(begin, end), torch.uint8, end - begin))
    else:
        target.copy_(loaded(source))


def loaded(source: AnyTensor) -> torch.Tensor:
    """A copy in host memory of its own. Blocks."""
    if isinstance(source, torch.Tensor):
        return source.clone()
    copy = torch.empty(source.shape, dtype=source.dtype)
    fill(copy, source)
    return copy
