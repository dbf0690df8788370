"""The driver: shared messages, patience, and calls that end when the search does."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from swarmcli.dht.lookup import Lookup, traverse
from swarmcli.dht.routing import Contact
from swarmcli.network.identity import PeerID
from tests.simulation import simulated


def contact(number: int) -> Contact:
    return Contact(PeerID(number.to_bytes(32, "big")), (f"memory://{number}",))


def lookup(target: int, candidates: int, width: int = 5) -> Lookup:
    made = Lookup(target, width)
    made.offer(contact(number) for number in range(candidates))
    return made


@simulated
async def test_one_message_serves_all_lookups_that_want_the_peer() -> None:
    lookups = [lookup(number << 250, 8) for number in range(20)]
    asked: list[PeerID] = []

    async def ask(asked_one: Contact, asking: Sequence[Lookup]) -> list[Contact]:
        asked.append(asked_one.peer_id)
        await asyncio.sleep(0.1)
        return []

    await traverse(lookups, ask, parallel=5, slow_after=10.0)
    assert all(len(each.nearest()) == 5 for each in lookups)
    assert len(asked) <= 2 * 8


@simulated
async def test_a_silent_peer_costs_the_patience_only_and_its_call_is_cancelled() -> None:
    made = lookup(0, 8)
    silent = made.due(1)[0].peer_id
    cancelled: list[PeerID] = []

    async def ask(asked: Contact, asking: Sequence[Lookup]) -> list[Contact]:
        if asked.peer_id == silent:
            try:
                await asyncio.sleep(1000.0)
            except asyncio.CancelledError:
                cancelled.append(asked.peer_id)
                raise
        return []

    await traverse([made], ask, parallel=5, slow_after=0.5)
    assert asyncio.get_running_loop().time() == pytest.approx(0.5)
    assert cancelled == [silent]
    assert len(made.nearest()) == 5
