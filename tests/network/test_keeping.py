"""A service that meets an error that nobody expected says so and goes on."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from swarmcli.dht.replication import Replicator
from swarmcli.errors import ConnectError
from swarmcli.events import Event, Events, Noticed
from swarmcli.network.task_owner import AFTER_A_FAULT, TaskOwner, keep
from swarmcli.network.transports.base import Purpose
from swarmcli.testing import virtual_time
from tests.averaging.averagers import Averagers, all_results, assert_one_group
from tests.dht.swarm import Swarm as Nodes
from tests.dht.swarm import soon
from tests.network.tcp_helpers import LISTENER, WAIT, dialing, peer, still_works
from tests.optim.optim_swarm import Swarm, digests, record, together
from tests.simulation import faults, simulated


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
async def test_a_node_looks_after_its_contacts_and_records_after_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    found = faults()
    async with Nodes() as swarm:
        first, *others = await swarm.grow(4)
        monkeypatch.setattr(Replicator, "_plan", failing_method(Replicator._plan, 4))
        assert await first.store("key", 1, soon(first, 600.0))
        newcomers = [await swarm.node(f"late {number}") for number in range(6)]  # of whom some come to hold it
        await asyncio.sleep(120)
        assert found and all(isinstance(error, Odd) for error in found)
        for node in (first, *others):
            await node.shutdown()
        assert (await newcomers[-1].get("key", latest=True)).value == 1  # type: ignore[union-attr]


def failing_method(method: Callable[..., Any], times: int) -> Callable[..., Any]:
    wrapped = failing(method, times)
    return lambda self, *args: wrapped(self, *args)


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


def test_an_optimizer_keeps_its_group_after_a_fault() -> None:
    """Without a keeper it would be in no group any more, and end each epoch alone after a wait."""

    async def main() -> None:
        found = faults()
        async with Swarm() as swarm:
            trainers = [await swarm.trainer(matchmaking_time=2.0, averaging_timeout=10.0) for _ in range(2)]
            told = record(trainers[0].node, Noticed)
            averager = trainers[0].core._group._averager
            begin, left = averager.begin_round, [2]

            def begin_round(request: Any) -> Any:
                left[0] -= 1
                if left[0] >= 0:
                    raise Odd("nobody expected this")
                return begin(request)

            averager.begin_round = begin_round  # type: ignore[method-assign]
            await together(*(trainer.train(8) for trainer in trainers))
            assert [type(error) for error in found] == [Odd, Odd]
            assert any("nobody expected this" in event.text for event in told)
            assert all(epoch.peers == 2 for trainer in trainers for epoch in trainer.epochs[-3:])
            assert len(digests(trainers)) == 1

    virtual_time.run(main(), timeout=600)


def test_a_listener_accepts_after_a_fault_with_one_connection() -> None:
    async def main() -> None:
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

    asyncio.run(main())
