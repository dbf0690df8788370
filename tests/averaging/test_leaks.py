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

from swarmcli.averaging.config import AllreduceOptions
from swarmcli.averaging.group import Group, Member
from swarmcli.averaging.round.allreduce import Allreduce
from swarmcli.averaging.round.service import AllreduceService
from swarmcli.averaging.shares import reducing_shares
from swarmcli.errors import RoundFailed, RoundUndecided
from swarmcli.network import Endpoint, Identity
from swarmcli.network.transports.tcp.transport import TCPTransport
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


class Trio:
    """Three peers on TCP that run one round after the other."""

    def __init__(self) -> None:
        self.endpoints = [Endpoint(TCPTransport(Identity.generate(), host="127.0.0.1")) for _ in range(3)]
        self.services = [AllreduceService(endpoint, "test") for endpoint in self.endpoints]
        self.tensors = [[torch.full((NUMEL,), float(index + 1))] for index in range(3)]
        self._nonce = 0

    async def __aenter__(self) -> Trio:
        for endpoint, service in zip(self.endpoints, self.services, strict=True):
            await endpoint.start()
            service.start()
        for endpoint in self.endpoints[1:]:
            await endpoint.connect(self.endpoints[0].addresses[0], timeout=30)
        return self

    async def __aexit__(self, *_: object) -> None:
        for endpoint, service in zip(self.endpoints, self.services, strict=True):
            service.close()
            await endpoint.close()

    def group(self) -> Group:
        members = [Member(each.peer_id, addresses=each.addresses) for each in self.endpoints]
        self._nonce += 1
        return Group.form(b"", members, reducing_shares(members, NUMEL), self._nonce.to_bytes(16, "big"))

    def take_part(self, index: int, group: Group, part_size: int = 1 << 18) -> Coroutine[Any, Any, object]:
        options = AllreduceOptions(part_size_bytes=part_size)
        return Allreduce(self.services[index], group, self.tensors[index], weight=1.0, options=options).run()

    async def succeed(self) -> None:
        group = self.group()
        await asyncio.gather(*(self.take_part(index, group) for index in range(3)))

    async def declined(self) -> None:
        """Two of the three take no part."""
        group = self.group()
        for service in self.services[1:]:
            service.decline(group)
        await _failing(self.take_part(0, group))

    async def unlike(self) -> None:
        """Everyone has cut its tensors in another way, and nobody takes the parts of another."""
        group = self.group()
        await _failing(*(self.take_part(index, group, 1 << (17 + index)) for index in range(3)))

    async def left_in_the_middle(self) -> None:
        """Two of the three leave while parts are on their way; now and then they are too late for that."""
        group = self.group()
        tasks = [asyncio.create_task(self.take_part(index, group)) for index in range(3)]
        for _ in range(20):
            await asyncio.sleep(0)
        tasks[0].cancel()
        tasks[1].cancel()
        await _failing(*tasks)


async def _failing(*work: Coroutine[Any, Any, object] | asyncio.Task[object]) -> None:
    for outcome in await asyncio.gather(*work, return_exceptions=True):
        if isinstance(outcome, BaseException):
            assert isinstance(outcome, RoundFailed | RoundUndecided | asyncio.CancelledError), outcome


async def _rounds(trio: Trio, count: int) -> Footprint:
    """After so many failed rounds, and some that succeed."""
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
