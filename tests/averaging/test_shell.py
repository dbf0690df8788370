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


def test_a_core_that_does_not_come_up_leaves_nothing() -> None:
    before = set(threading.enumerate())  # one of an earlier test may be about to end
    runner: CoreRunner[Core] = CoreRunner("the thing", 5.0)
    with pytest.raises(OSError, match="no such thing"):
        runner.start(fail, wait=True, timeout=60)
    assert set(threading.enumerate()) <= before
    with pytest.raises(RuntimeError, match="shut down"):
        runner.start(make, wait=True, timeout=60)


def test_a_core_that_does_not_come_up_in_the_background_is_not_alive() -> None:
    runner: CoreRunner[Core] = CoreRunner("the thing", 5.0)
    runner.start(fail, wait=False, timeout=None)
    with pytest.raises(OSError, match="no such thing"):
        runner.call(lambda core: core)
    assert not runner.is_alive
    runner.shutdown()


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
