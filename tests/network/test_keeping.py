"""A service that meets an error that nobody expected says so and goes on."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from swarmcli.errors import ConnectError
from swarmcli.events import Event, Events
from swarmcli.network.task_owner import AFTER_A_FAULT, TaskOwner, keep
from swarmcli.network.transports.base import Purpose
from tests.averaging.averagers import Averagers, all_results, assert_one_group
from tests.network.tcp_helpers import LISTENER, WAIT, dialing, peer, still_works
from tests.simulation import faults, in_real_time, simulated


class Odd(Exception):
    """Of a kind that nothing in the project raises."""


def failing(work: Callable[..., Any], times: int) -> Callable[..., Any]:
    """The same work, of which the first calls fail."""
    left = [times]

    async def wrapped(*args: Any, **kwargs: Any) -> Any:
        if left[0] > 0:
            left[0] -= 1
            raise Odd("nobody expected this")
        return await work(*args, **kwargs)

    return wrapped


@simulated
async def test_a_step_that_fails_is_told_once_and_taken_again() -> None:
    found, events, told = faults(), Events(), list[Event]()
    events.subscribe(told.append)
    steps = 0

    async def step() -> None:
        nonlocal steps
        steps += 1
        await asyncio.sleep(1)
        if steps in (1, 2):
            raise Odd("bad\x1b[2J luck")

    owner = TaskOwner()
    owner.spawn(keep(step, events))
    await asyncio.sleep(2 + 2 * AFTER_A_FAULT + 2.5)
    assert steps == 5 and [type(error) for error in found] == [Odd, Odd]
    assert [(event.level, "luck" in event.text, "\x1b" in event.text) for event in told] == [("error", True, False)]  # type: ignore[attr-defined]
    await owner.close()
    await asyncio.sleep(10)
    assert steps == 5, "a keeper that is cancelled has ended"


@simulated
async def test_groups_form_after_a_fault_in_a_search() -> None:
    found = faults()
    async with Averagers(3) as swarm:
        peers = await swarm.add(3)
        for peer in peers:  # nobody finds anybody, unless it reads again
            declarations = peer.core.finder._declarations
            declarations.read = failing(declarations.read, 1)  # type: ignore[method-assign]
        results = await all_results([peer.begin(timeout=60.0) for peer in peers])
        assert_one_group(results, peers)
        assert [type(error) for error in found] == [Odd] * 3


@in_real_time
async def test_a_listener_accepts_after_a_fault_with_one_connection() -> None:
    found, left = faults(), [1]
    async with peer() as listener:
        admits = listener.transport._admits

        def admit(incoming: Any) -> bool:
            left[0] -= 1
            if left[0] >= 0:
                raise Odd("nobody expected this")
            return admits(incoming)

        listener.transport._admits = admit  # type: ignore[method-assign]
        async with dialing() as transport:
            with pytest.raises(ConnectError):
                await transport.dial(listener.address, LISTENER.peer_id, Purpose.CONTROL, WAIT)
        await still_works(listener)
        assert [type(error) for error in found] == [Odd]
