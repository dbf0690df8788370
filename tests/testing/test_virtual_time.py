"""The loop whose clock jumps: no waiting, no leftovers, the same order in every run."""

from __future__ import annotations

import asyncio
import itertools

import pytest

from swarmcli.testing import virtual_time
from swarmcli.testing.virtual_time import EPOCH, Deadlock, VirtualTimeLoop
from tests.simulation import simulated


def test_a_day_passes_at_once_and_timers_fire_in_order() -> None:
    fired: list[tuple[str, float]] = []

    async def main() -> float:
        loop = asyncio.get_running_loop()

        async def sleeper(name: str, seconds: float) -> None:
            await asyncio.sleep(seconds)
            fired.append((name, loop.time()))

        async with asyncio.TaskGroup() as group:
            group.create_task(sleeper("day", 86400.0))
            group.create_task(sleeper("hour", 3600.0))
            group.create_task(sleeper("moment", 1e-3))
        return loop.time()

    assert virtual_time.run(main()) == 86400.0
    assert fired == [("moment", 1e-3), ("hour", 3600.0), ("day", 86400.0)]


@simulated
async def test_executor_jobs_run_inline() -> None:
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualTimeLoop)
    assert await loop.run_in_executor(None, divmod, 7, 2) == (3, 1)
    with pytest.raises(ZeroDivisionError):
        await loop.run_in_executor(None, divmod, 7, 0)
    assert loop.time() == 0.0 and loop.wall_time() == EPOCH


def test_a_deadlock_is_named_with_its_tasks() -> None:
    async def waiting_for_godot() -> None:
        await asyncio.get_running_loop().create_future()

    with pytest.raises(Deadlock, match="waiting_for_godot") as caught:
        virtual_time.run(_in_a_group(waiting_for_godot), seed=17)
    assert any("seed 17" in note for note in caught.value.__notes__)


async def _in_a_group(work: object) -> None:
    async with asyncio.TaskGroup() as group:
        group.create_task(work())  # type: ignore[operator]


def test_what_never_ends_is_stopped() -> None:
    async def forever() -> None:
        for second in itertools.count():
            await asyncio.sleep(second)

    with pytest.raises(TimeoutError, match=r"50 s have passed.*forever"):
        virtual_time.run(_in_a_group(forever), timeout=50)


def test_a_task_left_behind_is_an_error() -> None:
    kept = []

    async def main() -> None:
        kept.append(asyncio.create_task(asyncio.sleep(5), name="stray"))

    with pytest.raises(RuntimeError, match="left behind: stray"):
        virtual_time.run(main())
    assert kept[0].cancelled()


def test_an_error_in_a_callback_ends_the_run() -> None:
    async def main() -> None:
        asyncio.get_running_loop().call_later(1.0, divmod, 1, 0)
        await asyncio.sleep(100)

    with pytest.raises(ZeroDivisionError) as caught:
        virtual_time.run(main())
    assert any("at 1.0" in note for note in caught.value.__notes__)
