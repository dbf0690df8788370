"""Failed rounds leave nothing behind: memory, threads, tasks, open files and sockets are where they were."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import os
import threading
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from swarmcli.averaging import RoundResult
from swarmcli.averaging.config import AllreduceOptions
from swarmcli.network import Identity
from swarmcli.network.transports.tcp.transport import TCPTransport
from tests.averaging import rounds
from tests.simulation import in_real_time

NUMEL = 1 << 18  # 1 MiB of float32 for each of three peers: what only a few rounds keep is seen
ROUNDS, WARM_UP = 500, 300  # past the bound of outcomes that are remembered, and what the allocator keeps is steady
FEW = 10  # one per round would be many more


@dataclass(frozen=True)
class Footprint:
    """What this process holds."""

    resident: int  # bytes
    tensors: int
    threads: int
    tasks: int
    files: int  # sockets among them

    @classmethod
    def now(cls) -> Footprint:
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)  # what the allocator keeps for later, here and there, is no leak
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return cls(
            resident=pages * os.sysconf("SC_PAGE_SIZE"),
            tensors=sum(type(each) is torch.Tensor for each in gc.get_objects()),
            threads=threading.active_count(),
            tasks=len(asyncio.all_tasks()),
            files=len(list(Path("/proc/self/fd").iterdir())),
        )


class Trio(rounds.Swarm):
    """Three peers on TCP that run one round after the other."""

    def __init__(self) -> None:
        super().__init__([rounds.Kind()] * 3, shapes=((NUMEL,),), options=AllreduceOptions(part_size_bytes=1 << 18))

    def transport(self, identity: Identity, *, listening: bool) -> TCPTransport:
        return TCPTransport(identity, host="127.0.0.1")

    async def succeed(self) -> None:
        assert all(isinstance(outcome, RoundResult) for outcome in await self.round())

    async def declined(self) -> None:
        """Two of the three take no part."""
        group = self.group()
        for peer in self.peers[1:]:
            peer.service.decline(group)
        assert not isinstance(await self.take_part(self.peers[0], group), RoundResult)

    async def unlike(self) -> None:
        """Everyone has other tensors, and nobody takes the parts of another."""
        first, *others = self.peers
        for number, peer in enumerate(others):
            peer.tensors = [torch.ones(NUMEL + 1 + number)]
        assert not any(isinstance(outcome, RoundResult) for outcome in await self.round())
        for peer in others:
            peer.tensors = first.tensors

    async def left_in_the_middle(self) -> None:
        """Two of the three leave while parts are on their way; now and then they are too late for that."""

        async def leave() -> None:
            for _ in range(20):
                await asyncio.sleep(0)
            for task in self.tasks[:2]:
                task.cancel()

        await self.round(leave)


async def _rounds(trio: Trio, count: int) -> Footprint:
    """What the process holds after `count` failed rounds and ten that succeed."""
    kinds: list[Callable[[], Coroutine[Any, Any, None]]] = [trio.declined, trio.unlike, trio.left_in_the_middle]
    for number in range(count):
        await kinds[number % len(kinds)]()
    for _ in range(10):
        await trio.succeed()
    return Footprint.now()


@pytest.mark.e2e
@in_real_time
async def test_failed_rounds_leave_nothing_behind() -> None:
    async with Trio() as trio:
        before = await _rounds(trio, WARM_UP)
        after = await _rounds(trio, ROUNDS)
    print(before, after, sep="\n")
    assert after.resident <= before.resident * 1.02
    assert after.tensors <= before.tensors + FEW
    assert after.threads <= before.threads + FEW  # the executor begins its threads when it first needs them
    assert after.tasks <= before.tasks + FEW  # a last word of a round may be on its way when it is over
    assert after.files <= before.files + FEW
