"""What each lie of the network may achieve at most, beside honest peers that are served as ever."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest

from swarmcli.errors import CallRefused
from swarmcli.events import Event, PeerDisconnected
from swarmcli.network import Endpoint, Identity, Stream
from swarmcli.network.budgets import BUDGETS
from swarmcli.testing import MemoryNetwork
from tests.adversary.lies import LIES, Liar
from tests.network.worlds import Number, double, reaches
from tests.simulation import simulated

OWN = sorted(lie.name for lie in LIES.values() if lie.layer == "network")


async def ignore(peer: object, request: object, stream: Stream) -> None:
    await asyncio.sleep(1000)


@asynccontextmanager
async def beside(name: str) -> AsyncIterator[tuple[Endpoint, Endpoint, Liar]]:
    """A victim, an honest peer, and a liar that tells this lie, all connected; each in a network of its own."""
    network = MemoryNetwork(seed=1)
    victim, friend, enemy = (
        Endpoint(network.transport(Identity.from_seed(n), host=f"198.51.{n}.1"), seed=n) for n in range(3)
    )
    peers = (victim, friend, enemy)
    try:
        for peer in peers:
            peer.serve("double", Number, double)
            peer.serve_stream("ignore", type(None), ignore)
            await peer.start()
        for peer in peers:
            for other in peers:
                peer.learn(other.peer_id, other.addresses)
        await reaches(friend, victim)
        liar = Liar(random.Random(1), enemy)
        LIES[name].tell(liar)
        await enemy.connect(victim.addresses[0], timeout=5)
        yield victim, friend, liar
    finally:
        for peer in peers:
            await peer.close()


# What is left of it so many seconds later.
LATER: dict[str, tuple[float, Callable[[Endpoint], bool]]] = {
    # Headers that are here already are charged beyond the budget.
    "payloads that lie unread": (
        15,
        lambda victim: 0.5 < victim._context.ledgers.payloads.taken / BUDGETS.payloads.identity <= 1.01,
    ),
    "connections that never greet": (15, lambda victim: victim.statistics().control_connections <= 3),
    "bulk connections that nobody uses": (15, lambda victim: victim.statistics().bulk_connections == 0),
    "a clock that is wrong by a day": (115, lambda victim: abs(victim.clock.offset) < 0.1),
}


@pytest.mark.parametrize("name", OWN)
@simulated
async def test_honest_peers_are_served_beside(name: str) -> None:
    async with beside(name) as (victim, friend, liar):
        for _ in range(5):
            await asyncio.sleep(1)
            assert await reaches(friend, victim)
        assert liar.told or name == "words that steer terminals"
        statistics = victim.statistics()
        assert statistics.control_connections <= 1 + BUDGETS.connections.identity
        assert statistics.bulk_connections <= BUDGETS.bulk.identity
        ledgers = victim._context.ledgers
        assert ledgers.payloads.taken <= BUDGETS.payloads.prefix
        assert ledgers.requests.taken <= BUDGETS.requests.prefix
        assert abs(victim.clock.offset) <= 1500, "one vote of two, and of one that is nearer than an hour"
        assert victim.is_connected(friend.peer_id)
        if name in LATER:
            seconds, holds = LATER[name]
            await asyncio.sleep(seconds)
            assert holds(victim)


@simulated
async def test_steering_words_arrive_as_one_harmless_line() -> None:
    async with beside("words that steer terminals") as (victim, _, liar):
        heard: list[Event] = []
        victim.events.subscribe(heard.append)
        with pytest.raises(CallRefused) as caught:
            await victim.call(liar.endpoint.peer_id, "double", Number(1), Number, timeout=5)
        await liar.endpoint.close()
        await asyncio.sleep(3)
        [gone] = [event for event in heard if isinstance(event, PeerDisconnected)]
        for words in (str(caught.value), caught.value.code, gone.reason):
            assert words.isprintable() and "live si llA" in words
