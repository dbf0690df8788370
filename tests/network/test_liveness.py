"""A silent peer is pinged; one that stays silent counts as dead, and no other does."""

from __future__ import annotations

import asyncio

import pytest

from swarmcli.clock import Clock
from swarmcli.events import Event, PeerDisconnected, WokeUp
from swarmcli.network import Endpoint, NetworkLimits, PeerID
from swarmcli.network.control.channel import Liveness
from swarmcli.testing import MemoryNetwork, virtual_time
from tests.simulation import now, simulated
from tests.suites import soak

from .worlds import Number, endpoints, reaches


class FakeConnection:
    dialed = True
    bytes_sent = 0
    bytes_received = 0


def make(limits: NetworkLimits | None = None) -> tuple[FakeConnection, Liveness]:
    connection = FakeConnection()
    return connection, Liveness(connection, limits or NetworkLimits())  # type: ignore[arg-type]


def test_any_byte_is_life() -> None:
    connection, liveness = make()
    for _ in range(1000):
        connection.bytes_received += 1  # of some long message that never seems to end
        assert not liveness.dead()
        liveness.ping_due(watched=True)
    for count in range(1000):  # on other connections
        assert not liveness.dead(elsewhere=count)
        liveness.ping_due(watched=True)


def test_clocks_are_measured_once_a_minute_even_where_there_is_no_silence() -> None:
    connection, liveness = make()
    pings = 0
    for _ in range(600):
        connection.bytes_received += 1
        connection.bytes_sent += 1
        if not liveness.dead() and liveness.ping_due(watched=True):
            pings += 1
            liveness.pinged()
            liveness.answered()
    assert pings == 10


@simulated
async def test_unwatched_peers_are_pinged_rarely_and_watched_ones_often() -> None:
    async with endpoints(MemoryNetwork(), 2) as [a, b]:
        await a.connect(b.addresses[0], timeout=5)
        await asyncio.sleep(1)
        before = a.statistics().traffic.sent + b.statistics().traffic.sent
        await asyncio.sleep(100)
        idle = a.statistics().traffic.sent + b.statistics().traffic.sent - before
        lost = a.lost(b.peer_id)
        await asyncio.sleep(100)
        watched = a.statistics().traffic.sent + b.statistics().traffic.sent - before - idle
        lost.cancel()
        assert 0 < idle * 2 < watched


@pytest.mark.parametrize("hours", [1, *soak([24])])
@simulated
async def test_an_idle_connection_stands_for_hours_and_its_death_is_noticed(hours: int) -> None:
    network = MemoryNetwork(loss=0.05)
    async with endpoints(network, 2) as [a, b]:
        await a.connect(b.addresses[0], timeout=5)
        await asyncio.sleep(hours * 3600)
        gone: list[Event] = []
        for peer in (a, b):
            assert peer.statistics().control_connections == 1
            peer.events.subscribe(gone.append)
        network.cut(a.peer_id, b.peer_id)
        await asyncio.sleep(20)
        assert [type(event) for event in gone] == [PeerDisconnected] * 2


@simulated
async def test_a_frozen_peer_is_given_up_and_a_short_freeze_forgiven() -> None:
    network = MemoryNetwork()
    async with endpoints(network, 2) as [a, b]:
        await a.connect(b.addresses[0], timeout=5)
        lost = a.lost(b.peer_id)
        await asyncio.sleep(10)
        network.freeze(b.peer_id)
        await asyncio.sleep(4)
        network.thaw(b.peer_id)
        await asyncio.sleep(30)
        assert not lost.done()
        network.freeze(b.peer_id)
        assert "no sign of life" in await asyncio.wait_for(lost, 10)
        network.thaw(b.peer_id)


@simulated
async def test_a_process_that_stood_still_does_not_take_its_peers_for_dead() -> None:
    """The loop had no turn for ten seconds again and again: a process starved by its own training."""

    async with endpoints(MemoryNetwork(), 2) as [a, b]:
        await a.connect(b.addresses[0], timeout=5)
        lost, loop = a.lost(b.peer_id), asyncio.get_running_loop()
        assert isinstance(loop, virtual_time.VirtualTimeLoop)
        for _ in range(20):
            await asyncio.sleep(3.3)
            loop._now += 10
        assert not lost.done()


@simulated
async def test_a_long_message_over_a_slow_line_is_life_in_both_directions() -> None:
    network = MemoryNetwork(bandwidth=20e3, latency=0.1)
    async with endpoints(network, 2) as [a, b]:

        async def measure(peer: PeerID, request: bytes) -> Number:
            return Number(len(request))

        b.serve("measure", bytes, measure)
        watched = b.lost(a.peer_id)
        assert await a.call(b.peer_id, "measure", bytes(1_000_000), Number, timeout=200) == Number(1_000_000)
        assert asyncio.get_running_loop().time() > 50 and watched.done()  # there was no connection yet
        assert a.is_connected(b.peer_id)


HOURS = 3 * 3600.0


@simulated
async def test_after_a_sleep_of_hours_a_peer_calls_on_new_connections_within_seconds() -> None:
    network, slept, seen = MemoryNetwork(seed=1), [0.0], list[Event]()
    clock = Clock(wall=lambda: 1e9, monotonic=lambda: now() + slept[0])
    clocks = iter([clock, None])
    async with endpoints(network, 2, make=lambda *args, **options: Endpoint(*args, clock=next(clocks), **options)) as (
        laptop,
        other,
    ):
        laptop.events.subscribe(seen.append)
        assert await reaches(laptop, other)
        await asyncio.sleep(60)
        assert not any(isinstance(event, WokeUp | PeerDisconnected) for event in seen)

        # While it sleeps, the other end and the routers forget the connection without a word that arrives.
        network.cut(laptop.peer_id, other.peer_id)
        slept[0] = HOURS
        await asyncio.sleep(2)
        network.heal()
        told = [type(event) for event in seen if isinstance(event, WokeUp | PeerDisconnected)]
        assert told == [WokeUp, PeerDisconnected]
        began = now()
        assert await reaches(laptop, other) and now() < began + 2
        assert abs(laptop.clock.now() - 1e9 - HOURS) < 120  # the swarm's time went on
