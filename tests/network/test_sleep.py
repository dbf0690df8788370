"""A machine that slept: its connections are dead, and it knows at once."""

from __future__ import annotations

import asyncio

import msgspec

from swarmcli.clock import Clock
from swarmcli.events import Event, PeerDisconnected, WokeUp
from swarmcli.network import Endpoint, Identity
from swarmcli.network.identity import PeerID
from swarmcli.testing import MemoryNetwork, run

HOURS = 3 * 3600.0


class Word(msgspec.Struct):
    text: str = ""


async def _answer(peer: PeerID, word: Word) -> Word:
    return word


async def _endpoint(network: MemoryNetwork, number: int, clock: Clock | None = None) -> Endpoint:
    endpoint = Endpoint(network.transport(Identity.from_seed(number)), clock=clock, seed=number)
    endpoint.serve("echo", Word, _answer)
    await endpoint.start()
    return endpoint


def test_after_a_sleep_of_hours_a_peer_calls_on_new_connections_within_seconds() -> None:
    async def scenario() -> None:
        network, slept, seen = MemoryNetwork(seed=1), [0.0], list[Event]()
        clock = Clock(wall=lambda: 1e9, monotonic=lambda: asyncio.get_running_loop().time() + slept[0])
        laptop, other = await _endpoint(network, 1, clock), await _endpoint(network, 2)
        laptop.events.subscribe(seen.append)
        peer = await laptop.connect(other.addresses[0], timeout=5)
        await laptop.call(peer, "echo", Word("before"), Word, timeout=5)
        await asyncio.sleep(60)
        assert not any(isinstance(event, WokeUp | PeerDisconnected) for event in seen)

        # While it sleeps, the other end and the routers forget the connection without a word that arrives.
        network.cut(laptop.peer_id, other.peer_id)
        slept[0] = HOURS
        await asyncio.sleep(2)
        network.heal()
        assert [type(event) for event in seen if isinstance(event, WokeUp | PeerDisconnected)] == [
            WokeUp,
            PeerDisconnected,
        ]
        answer = await laptop.call(peer, "echo", Word("after"), Word, timeout=2)
        assert answer.text == "after"
        assert abs(laptop.clock.now() - 1e9 - HOURS) < 120  # the swarm's time went on
        for endpoint in (laptop, other):
            await endpoint.close()

    run(scenario(), seed=1, timeout=600)
