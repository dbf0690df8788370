"""Memory of rounds: in huge pages where the system has them, and used again by the next round."""

from __future__ import annotations

import asyncio
import gc
import mmap

import pytest
import torch

from swarmcli import memory as lending_module
from swarmcli.memory import ReusableBuffer, fresh_memory
from swarmcli.testing import virtual_time
from tests.averaging.rounds import Kind, Swarm
from tests.simulation import simulated


@pytest.mark.parametrize("nbytes", [0, 5000, (4 << 20) + 3])
def test_memory_of_any_size_can_be_written_and_viewed_while_a_view_is_there(nbytes: int) -> None:
    view = fresh_memory(nbytes)[: nbytes // 4 * 4].view(torch.float32)
    assert view.shape == (nbytes // 4,)
    view.fill_(7)
    fresh_memory(nbytes).fill_(1)
    assert bool((view == 7).all())


def test_a_system_without_huge_pages_does_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    class Refusing(mmap.mmap):
        def madvise(self, *args: int) -> None:
            raise OSError("no such advice")

    monkeypatch.setattr(lending_module.mmap, "mmap", Refusing)
    assert fresh_memory(5 << 20).shape == (5 << 20,)
    monkeypatch.delattr(lending_module.mmap, "MADV_HUGEPAGE", raising=False)
    monkeypatch.delattr(lending_module.mmap, "mmap")
    assert fresh_memory(5 << 20).shape == (5 << 20,)


@pytest.mark.skipif(not hasattr(mmap, "MADV_HUGEPAGE"), reason="this system has no huge pages")
def test_so_much_of_it_is_touched_as_was_asked_for_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, ...]] = []

    class Noting(mmap.mmap):
        def madvise(self, *args: int) -> None:
            asked.append(args)

    monkeypatch.setattr(lending_module.mmap, "mmap", Noting)
    for touched, expected in ((0, 0), (9 << 20, 9 << 20), (1 << 30, 40 << 20)):
        asked.clear()
        fresh_memory(40 << 20, touched=touched)
        assert sum(size for _, _, size in asked[1:]) == expected


@simulated
async def test_what_comes_back_is_lent_again_only_when_its_last_view_is_gone() -> None:
    lender = ReusableBuffer()
    first = lender.take(5000)
    view, place = first[100:], first.data_ptr()
    del first
    other = lender.take(5000)
    assert other.data_ptr() != place, "somebody still looks at it"
    del view
    again = lender.take(5000)
    assert again.data_ptr() == place
    del again
    assert lender.take(6000).shape == (6000,)


@simulated
async def test_memory_is_not_kept_for_a_round_that_does_not_follow_soon() -> None:
    lender = ReusableBuffer()
    lender.take(5000)
    assert lender._spare is not None
    await asyncio.sleep(60)
    assert lender._spare is None
    late = lender.take(5000)
    await asyncio.sleep(60)
    del late
    assert lender._spare is None


def test_memory_of_a_committed_round_is_free_for_the_next_without_the_garbage_collector(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Reference cycles would keep the results of several rounds at a time."""
    allocated = []

    def counted(nbytes: int) -> torch.Tensor:
        allocated.append(nbytes)
        return fresh_memory(nbytes)

    monkeypatch.setattr(lending_module, "fresh_memory", counted)

    async def main() -> None:
        async with Swarm([Kind(), Kind(), Kind(listening=False), Kind(auxiliary=True)]) as swarm:
            for _ in range(4):
                swarm.check(await swarm.round())
                swarm.tasks.clear()
                await asyncio.sleep(1)
        assert len(allocated) == 3, "once for each member with tensors"

    gc.disable()
    try:
        virtual_time.run(main())
    finally:
        gc.enable()
