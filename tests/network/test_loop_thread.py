"""The shared loop thread: counted, cancellable, and gone after the last release."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import Iterator

import pytest

from swarmcli.network.loop_thread import LoopThread


@pytest.fixture
def shared() -> Iterator[LoopThread]:
    thread = LoopThread.acquire()
    yield thread
    thread.release()


def swarm_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("swarm-")]


async def answer(value: int) -> int:
    return value


def test_everyone_shares_one_thread_and_the_last_release_ends_it() -> None:
    first, second = LoopThread.acquire(), LoopThread.acquire()
    assert first is second
    first.release()
    assert second.run(answer(7)) == 7
    loop = second.loop
    second.release()
    assert loop.is_closed() and swarm_threads() == []


def test_the_last_release_cancels_and_awaits_what_still_runs() -> None:
    thread = LoopThread.acquire()
    ended: list[str] = []

    async def lasting() -> None:
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            await asyncio.sleep(0)
            ended.append("cleaned up")

    future = thread.submit(lasting())
    thread.run(answer(0))
    thread.release()
    assert ended == ["cleaned up"] and future.cancelled()


def test_cancelling_the_future_cancels_the_coroutine(shared: LoopThread) -> None:
    began, ended = threading.Event(), threading.Event()

    async def lasting() -> None:
        began.set()
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            ended.set()

    future = shared.submit(lasting())
    assert began.wait(60)
    assert future.cancel()
    assert ended.wait(60)
    with pytest.raises(concurrent.futures.CancelledError):
        future.result()


def test_run_on_the_loops_own_thread_is_refused_instead_of_hanging(shared: LoopThread) -> None:
    async def from_inside() -> str:
        with pytest.raises(RuntimeError, match="await instead"):
            shared.run(answer(1))
        with pytest.raises(RuntimeError, match="await instead"):
            shared.release()
        return "refused"

    assert shared.run(from_inside()) == "refused"
