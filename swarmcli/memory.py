"""Memory for whole rounds and states, which is written once from beginning to end."""

from __future__ import annotations

import asyncio
import mmap
import weakref
from contextlib import suppress

import numpy
import torch
from numpy.typing import NDArray

_LARGE = 4 << 20  # bytes; below it, two pages of 2 MiB would be wasted on the edges
_POPULATE = 23  # MADV_POPULATE_WRITE, of Linux 5.14
_STEP = 4 << 20  # bytes that one call populates: it holds the GIL meanwhile
_KEPT = 30.0  # seconds; whoever averages less often does not notice what fresh memory costs


def fresh_memory(nbytes: int, *, touched: int = 0) -> torch.Tensor:
    """(nbytes,) of uint8 with any content; given back to the system when the last view of it is gone.

    Where the system has huge pages to give (Linux), the first write costs a fault per 2 MiB instead of one per 4 KiB:
    for the results of a round that saved an eighth of all its processor time. `touched`: the faults of this many bytes
    happen before it returns. That takes a while, but half the processor time that they cost during a download.
    """
    if nbytes < _LARGE or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty(nbytes, dtype=torch.uint8)
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    try:
        memory.madvise(mmap.MADV_HUGEPAGE)
    except OSError:  # a kernel without them
        return torch.empty(nbytes, dtype=torch.uint8)
    with suppress(OSError):  # a kernel that does not know it, or has not so much to give
        end = min(touched, nbytes)
        for begin in range(0, end, _STEP):
            memory.madvise(_POPULATE, begin, min(_STEP, end - begin))
    return torch.frombuffer(memory, dtype=torch.uint8)


def unwritten(nbytes: int) -> memoryview:
    """(nbytes,) with any content, for what is about to arrive: a bytearray would be filled with zeros first."""
    return numpy.empty(nbytes, numpy.uint8).data


class ReusableBuffer:
    """Lends memory to rounds, and keeps what comes back for the next round if that follows soon.

    A virtual machine that gives free memory back to its host pays for the first touch of every page with a fault on
    the host: half a second for 256 MiB was seen, more than the round itself.
    """

    def __init__(self) -> None:
        self._spare: NDArray[numpy.uint8] | None = None
        self._expiry: asyncio.TimerHandle | None = None

    def take(self, nbytes: int) -> torch.Tensor:
        """(nbytes,) of uint8 with any content; it comes back here when the last view of it is gone."""
        spare, self._spare = self._spare, None
        if spare is None or spare.nbytes != nbytes:
            spare = fresh_memory(nbytes).numpy()
        self.forget()
        self._expiry = asyncio.get_running_loop().call_later(_KEPT, self.forget)
        lent = spare.view()  # an object of its own, which tensors hold on to
        weakref.finalize(lent, self._give_back, spare).atexit = False
        return torch.from_numpy(lent)

    def forget(self) -> None:
        """Frees what is kept, and keeps nothing more until the next `take`."""
        self._spare = None
        if self._expiry is not None:
            self._expiry.cancel()
            self._expiry = None

    def _give_back(self, memory: NDArray[numpy.uint8]) -> None:
        # From whatever thread drops the last view; a single assignment needs no lock.
        if self._expiry is not None:
            self._spare = memory
