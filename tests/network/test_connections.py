"""One control connection per pair: simultaneous dialing, restarts, stale connections, room for new ones."""

from __future__ import annotations

import asyncio

import pytest

from swarmcli.errors import PeerUnreachable
from swarmcli.events import Event, PeerConnected, PeerDisconnected
from swarmcli.network import Endpoint, Identity, NetworkLimits, PeerID
from swarmcli.network.budgets import Budget, Budgets
from swarmcli.testing import MemoryNetwork
from tests.simulation import now, simulated
from tests.suites import soak

from .worlds import Number, double, endpoints, reaches, slow


def dialed_by(endpoint: Endpoint, peer: PeerID) -> bool:
    channel = endpoint.peers.current(peer)
    assert channel is not None
    return channel.connection.dialed


@pytest.mark.parametrize("delay", [0.0, 0.02, 0.041, *soak([0.005, 0.01, 0.03, 0.039, 0.05, 0.06])])
@pytest.mark.parametrize("first", [0, 1])
@simulated
async def test_two_peers_that_dial_each_other_settle_on_one_connection(first: int, delay: float) -> None:
    """Whichever comes first and by however much, no call fails, both choose the smaller id's connection, and nobody is
    told that a peer came or went."""

    async with endpoints(MemoryNetwork(seed=3), 2) as peers:
        one, two = peers[first], peers[1 - first]
        events: list[Event] = []
        one.events.subscribe(events.append)

        async def chat(caller: Endpoint, other: Endpoint) -> None:
            for n in range(40):
                await caller.call(other.peer_id, "double", Number(n), Number, timeout=5)

        async with asyncio.TaskGroup() as group:
            group.create_task(chat(one, two))
            group.create_task(chat(one, two))
            await asyncio.sleep(delay)
            group.create_task(chat(two, one))
            group.create_task(chat(two, one))
        lost = one.lost(two.peer_id)
        await asyncio.sleep(10)
        assert [type(event) for event in events] == [PeerConnected] and not lost.done()
        smaller, larger = sorted(peers, key=lambda peer: peer.peer_id)
        if delay < 0.03:
            assert dialed_by(smaller, larger.peer_id) and not dialed_by(larger, smaller.peer_id)
        for peer in peers:
            assert peer.statistics().control_connections == 1 and not peer.statistics().violations


@simulated
async def test_long_calls_outlive_the_connection_that_lost_the_choice() -> None:
    async with endpoints(MemoryNetwork(), 2) as peers:
        smaller, larger = sorted(peers, key=lambda peer: peer.peer_id)

        for peer in peers:
            peer.serve("slow", Number, slow(60))
        calls = [
            asyncio.create_task(larger.call(smaller.peer_id, "slow", Number(1), Number, timeout=100)),
            asyncio.create_task(smaller.call(larger.peer_id, "slow", Number(2), Number, timeout=100)),
        ]
        await asyncio.sleep(30)
        assert larger.statistics().control_connections == 2
        assert await asyncio.gather(*calls) == [Number(1), Number(2)]
        await asyncio.sleep(10)
        assert larger.statistics().control_connections == smaller.statistics().control_connections == 1


@pytest.mark.parametrize("seed", [230, 242, 292])  # of 300, some of those in which both gave up the other one's
@simulated
async def test_several_dials_by_one_end_at_once_end_with_one_connection(seed: int) -> None:
    """The ends may hear of the connections in unlike orders, and must not both give up what the other one uses."""
    network = MemoryNetwork(seed=seed, latency=lambda source, target: network.random.uniform(0.001, 0.6))
    async with endpoints(network, 2) as peers:
        smaller, larger = sorted(peers, key=lambda peer: peer.peer_id)
        dialer, other = (smaller, larger) if seed % 2 else (larger, smaller)
        events: list[Event] = []
        for peer in peers:
            peer.events.subscribe(events.append)
        await asyncio.gather(*(dialer.connect(other.addresses[0], timeout=5) for _ in range(4)))
        await asyncio.sleep(60)
        assert dialer.statistics().control_connections == other.statistics().control_connections == 1
        assert [type(event) for event in events] == [PeerConnected, PeerConnected]


@simulated
async def test_a_peer_that_started_anew_is_recognized_at_once() -> None:
    """The old process died without a word, behind a cut: its connection still stands when the new one dials."""

    network = MemoryNetwork()
    async with endpoints(network, 1) as [a]:
        old = Endpoint(network.transport(Identity.from_seed(1)), client_mode=True, seed=1)
        await old.start()
        await old.connect(a.addresses[0], timeout=5)
        await asyncio.sleep(1)
        lost, events = a.lost(old.peer_id), []
        a.events.subscribe(events.append)
        waiting = asyncio.create_task(a.call(old.peer_id, "nothing", Number(1), Number, timeout=500))
        network.freeze(old.peer_id)
        await asyncio.sleep(0.1)
        network.thaw(old.peer_id)
        old.peers.controls()[0].reading_wanted = lambda: False  # type: ignore[method-assign]  # it hears nothing any more

        new = Endpoint(network.transport(Identity.from_seed(1)), client_mode=True, seed=2)
        new.serve("double", Number, double)
        await new.start()
        await new.connect(a.addresses[0], timeout=5)
        assert await lost == "the peer started anew"
        await asyncio.wait([waiting])
        assert await reaches(a, new)
        assert [type(event) for event in events] == [PeerDisconnected, PeerConnected]
        await old.close()
        await new.close()


@simulated
async def test_all_addresses_are_tried_and_the_one_that_answers_is_remembered() -> None:
    network = MemoryNetwork()
    async with endpoints(network, 3) as [a, b, c]:
        (good,) = b.addresses
        stranger = Endpoint(network.transport(Identity.from_seed(9)), client_mode=True)
        await stranger.start()
        silent = Endpoint(network.transport(Identity.from_seed(8)))
        await silent.start()
        network.freeze(silent.peer_id)
        addresses = ("memory://nobody", "no address at all", c.addresses[0], silent.addresses[0], good)
        stranger.learn(b.peer_id, addresses)
        assert await stranger.call(b.peer_id, "double", Number(1), Number, timeout=9) == Number(2)
        await asyncio.sleep(0.1)
        assert stranger.addresses_of(b.peer_id)[0] == good
        assert now() < 2, "who does not answer holds up nobody"
        stranger.learn(b.peer_id, ("memory://a-lie",))
        assert stranger.addresses_of(b.peer_id) == (good, "memory://a-lie", *silent.addresses)
        stranger.learn(a.peer_id, ("memory://nobody", c.addresses[0]))
        with pytest.raises(PeerUnreachable, match=r"refused.*is .*, not"):
            await stranger.call(a.peer_id, "double", Number(1), Number, timeout=9)
        await stranger.close()
        await silent.close()


@simulated
async def test_the_least_used_connection_makes_room_for_new_ones() -> None:
    limits = NetworkLimits(budgets=Budgets(connections=Budget(*[4] * 4)))
    async with endpoints(MemoryNetwork(), 8, limits=limits) as [a, *others]:
        for other in others:
            await reaches(other, a)
            await asyncio.sleep(1)
        assert [a.is_connected(other.peer_id) for other in others] == [False] * 3 + [True] * 4
        assert await others[0].call(a.peer_id, "double", Number(1), Number, timeout=5) == Number(2)
