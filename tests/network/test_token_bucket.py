"""A bucket of tokens under a time that the test makes up."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmcli.network.token_bucket import TokenBucket
from tests.simulation import simulated


@given(st.lists(st.tuples(st.floats(0, 10), st.floats(0.1, 500)), min_size=1, max_size=40))
def test_never_more_goes_through_than_the_burst_and_what_came_in_since(asked: list[tuple[float, float]]) -> None:
    rate, burst, now, through = 100.0, 150.0, 0.0, 0.0
    bucket = TokenBucket(rate, burst)
    last = 0.0
    for pause, amount in asked:
        now += pause
        at = now + bucket.take(amount, now)
        through += amount
        assert through <= burst + rate * at + 1e-6
        assert at >= last - 1e-6, "who asks later gets through later"
        last = at


@simulated
async def test_those_who_wait_get_their_turns_at_the_rate() -> None:
    bucket = TokenBucket(100, 100)
    loop = asyncio.get_running_loop()

    turns: list[str] = []

    async def one(name: str) -> None:
        for _ in range(5):
            await bucket.wait(50)
            turns.append(name)

    async with asyncio.TaskGroup() as group:
        group.create_task(one("a"))
        group.create_task(one("b"))
    assert loop.time() == pytest.approx(4.0)  # 500 tokens, of which 100 were there
    assert "".join(turns) == "aaabababbb", "the first takes what is there, then they take turns"
