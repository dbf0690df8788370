"""What the coroutines of a round share: work beside a block, patience with slow streams, arithmetic in the executor."""

from __future__ import annotations

import asyncio
import gc
import weakref
from typing import cast

import pytest

from swarmcli.concurrency import Bell, beside, forgetful, on_executor, unless_silent
from swarmcli.network import Stream
from swarmcli.testing import virtual_time
from tests.simulation import in_real_time, simulated


class Broken(Exception):
    pass


async def fail() -> None:
    await asyncio.sleep(1)
    raise Broken


@simulated
async def test_work_beside_a_block_ends_with_it() -> None:
    ended: list[str] = []

    async def work() -> None:
        try:
            await asyncio.sleep(100)
        finally:
            ended.append("cancelled")

    async with beside(work()):
        await asyncio.sleep(1)
    assert ended == ["cancelled"] and asyncio.get_running_loop().time() == 1


@simulated
async def test_errors_come_out_as_they_are() -> None:
    with pytest.raises(Broken):
        async with beside(fail()):
            await asyncio.sleep(100)
    assert asyncio.get_running_loop().time() == 1
    with pytest.raises(KeyError):
        async with beside(asyncio.sleep(100)):
            raise KeyError
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(1), beside(asyncio.sleep(100)):
            await asyncio.sleep(100)


class FakeStream:
    arriving = 0


@simulated
async def test_patience_ends_with_silence_and_not_with_slowness() -> None:
    fake = FakeStream()
    stream = cast(Stream, fake)

    async def trickle() -> None:
        for _ in range(20):
            await asyncio.sleep(9)
            fake.arriving += 1

    async with beside(trickle()) as trickling, unless_silent(stream, 10):
        await trickling
    now = asyncio.get_running_loop().time
    began = now()
    with pytest.raises(TimeoutError):
        async with unless_silent(stream, 10):
            await asyncio.sleep(1000)
    assert now() - began == pytest.approx(10)
    async with unless_silent(stream, 10):
        await asyncio.sleep(5)
    await asyncio.sleep(100)  # no timer is left that could strike later


@simulated
async def test_a_bell_wakes_everyone_who_waits_and_nobody_who_comes_later() -> None:
    bell, woken = Bell(), []

    async def wait(name: str) -> None:
        await bell.wait()
        woken.append(name)

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(wait("a"))
        tasks.create_task(wait("b"))
        await asyncio.sleep(1)
        bell.ring()
        late = tasks.create_task(wait("c"))
        await asyncio.sleep(1)
        assert sorted(woken) == ["a", "b"] and not late.done()
        bell.ring()


@in_real_time
async def test_arithmetic_gives_its_result_or_its_error() -> None:
    for nbytes in (1, 1 << 30):
        assert await on_executor(nbytes, divmod, 7, 2) == (3, 1)
        with pytest.raises(ZeroDivisionError):
            await on_executor(nbytes, divmod, 7, 0)


class Memory:
    pass


def test_forgetful_errors_hold_no_local_variables() -> None:
    held: list[weakref.ref[Memory]] = []

    @forgetful
    async def work() -> None:
        memory = Memory()
        held.append(weakref.ref(memory))
        try:
            await fail()
        except Broken as error:
            raise KeyError(str(memory)) from error

    async def main() -> None:
        with pytest.raises(KeyError) as caught:
            await work()
        assert held[0]() is None and caught.value.__cause__ is not None

    gc.disable()
    try:
        virtual_time.run(main())
    finally:
        gc.enable()
