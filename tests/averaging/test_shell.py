"""Holding a core on the loop thread: errors at the start, calls, and the end."""

from __future__ import annotations

import asyncio
import threading

import pytest

from swarmcli.averaging.shell import CoreRunner


class Core:
    def __init__(self) -> None:
        self.ended = False

    async def shutdown(self) -> None:
        self.ended = True


async def make() -> Core:
    return Core()


async def fail() -> Core:
    raise OSError("no such thing")


def test_calls_reach_the_core_on_the_loop() -> None:
    runner: CoreRunner[Core] = CoreRunner("the thing", 5.0)
    with pytest.raises(RuntimeError, match="the thing is not running"):
        runner.call(lambda core: core)
    runner.start(make, wait=False, timeout=None)
    core = runner.call(lambda core: core)
    assert runner.call(lambda _: threading.current_thread().name) != threading.current_thread().name

    async def sleep(core: Core) -> str:
        await asyncio.sleep(0)
        return "slept"

    assert runner.run(sleep) == "slept" and runner.run(sleep, wait=False).result(60) == "slept"
    assert runner.is_alive
    runner.shutdown()
    runner.shutdown()
    assert core.ended and not runner.is_alive


def test_a_core_that_does_not_come_up_leaves_nothing() -> None:
    before = set(threading.enumerate())  # one of an earlier test may be about to end
    runner: CoreRunner[Core] = CoreRunner("the thing", 5.0)
    with pytest.raises(OSError, match="no such thing"):
        runner.start(fail, wait=True, timeout=60)
    assert set(threading.enumerate()) <= before
    with pytest.raises(RuntimeError, match="shut down"):
        runner.start(make, wait=True, timeout=60)


def test_a_core_that_does_not_end_is_cut_off() -> None:
    class Stubborn(Core):
        async def shutdown(self) -> None:
            await asyncio.Event().wait()

    async def make_stubborn() -> Core:
        return Stubborn()

    before = set(threading.enumerate())  # one of an earlier test may be about to end
    runner: CoreRunner[Core] = CoreRunner("the thing", 0.05)
    runner.start(make_stubborn, wait=True, timeout=60)
    runner.shutdown()
    assert set(threading.enumerate()) <= before
