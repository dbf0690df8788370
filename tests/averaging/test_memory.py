"""Large memory comes in huge pages where the system has them, and from torch everywhere else."""

from __future__ import annotations

import mmap

import pytest
import torch

from swarmcli.averaging import memory as memory_module
from swarmcli.averaging.memory import fresh_memory


@pytest.mark.parametrize("nbytes", [0, 1, 5000, (4 << 20) + 3])
def test_memory_of_any_size_can_be_written_and_viewed(nbytes: int) -> None:
    memory = fresh_memory(nbytes)
    assert memory.dtype is torch.uint8 and memory.shape == (nbytes,)
    memory.fill_(7)
    assert int(memory.sum()) == 7 * nbytes
    assert memory[: nbytes // 4 * 4].view(torch.float32).shape == (nbytes // 4,)


def test_views_keep_it_alive() -> None:
    view = fresh_memory(5 << 20)[3 << 20 :]
    view.fill_(9)
    fresh_memory(5 << 20).fill_(1)
    assert int(view.to(torch.int64).sum()) == 9 * (2 << 20)


def test_a_system_without_huge_pages_does_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    class Refusing(mmap.mmap):
        def madvise(self, *args: int) -> None:
            raise OSError("no such advice")

    monkeypatch.setattr(memory_module.mmap, "mmap", Refusing)
    assert fresh_memory(5 << 20).shape == (5 << 20,)
    monkeypatch.delattr(memory_module.mmap, "MADV_HUGEPAGE", raising=False)
    monkeypatch.delattr(memory_module.mmap, "mmap")
    assert fresh_memory(5 << 20).shape == (5 << 20,)
