"""Memory for whole rounds and states, which is written once from one end to the other."""

from __future__ import annotations

import mmap

import torch

_LARGE = 4 << 20  # bytes; below it, two pages of 2 MiB would be wasted on the edges


def fresh_memory(nbytes: int) -> torch.Tensor:
    """(nbytes,) of uint8 with any content; given back to the system when the last view of it is gone.

    Where the system has huge pages to give (Linux), the first write costs a fault per 2 MiB instead of one per 4 KiB:
    for the results of a round that was an eighth of all its processor time.
    """
    if nbytes < _LARGE or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty(nbytes, dtype=torch.uint8)
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    try:
        memory.madvise(mmap.MADV_HUGEPAGE)
    except OSError:  # a kernel without them
        return torch.empty(nbytes, dtype=torch.uint8)
    return torch.frombuffer(memory, dtype=torch.uint8)
