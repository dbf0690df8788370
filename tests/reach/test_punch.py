"""Two peers that nobody can dial leave their relay for a direct connection, where their routers allow it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from ipaddress import ip_network
from typing import Any

import pytest

from swarmcli.errors import CallRefused, ConnectionLost
from swarmcli.events import Event, PeerConnected, WayChanged
from swarmcli.network import Endpoint, Purpose
from swarmcli.network.identity import Identity
from swarmcli.network.token_bucket import Meter
from swarmcli.reach.budgets import CONTROL_LIMITS, TRIES
from swarmcli.reach.circuits import RelayTransport
from swarmcli.reach.punch import ASK, GO, Go, PunchAsk, Puncher, Ready, Went
from swarmcli.reach.punch_rules import acceptable, behind_one_router, nearby, pairs_of
from swarmcli.reach.relaying import Relay
from swarmcli.reach.verdict import Surroundings
from swarmcli.testing import MemoryNetwork
from tests.network.worlds import Number, reaches, slow
from tests.reach.relay_worlds import Client, Scene, payload, scene
from tests.simulation import now, simulated

RELAY, OTHER = "5.1.0.1", "5.9.0.1"


HOME = Surroundings(networks=(ip_network("192.168.1.0/24"),))


class Homes:
    """A relay and two clients behind routers of their own, who know each other; each has a Puncher."""

    def __init__(
        self, peers: Scene, relays: tuple[Endpoint, Relay], clients: list[Client], punchers: list[Puncher]
    ) -> None:
        self.peers, self.clients, self.punchers = peers, clients, punchers
        self.relay, self.relaying = relays
        self.asker, self.asked = sorted(clients, key=lambda client: client.peer_id)

    def puncher(self, client: Client) -> Puncher:
        return self.punchers[self.clients.index(client)]

    @property
    def network(self) -> MemoryNetwork:
        return self.peers.network

    def direct(self) -> bool:
        a, b = self.clients
        seen = a.endpoint.seen(b.peer_id), b.endpoint.seen(a.peer_id)
        return all(each is not None and not each.relayed for each in seen)

    def dials(self, *hosts: str) -> int:
        """Of clients, to these hosts."""
        ids = {client.peer_id for client in self.clients}
        return sum(
            dialer in ids and address.split("/")[2].split(":")[0] in hosts for dialer, address in self.network.dials
        )


@asynccontextmanager
async def homes(
    *kinds: dict[str, Any], one_router: bool = False, listening: bool = False, listeners: int = 2
) -> AsyncIterator[Homes]:
    """`kinds`: options of the two routers. `listening`: both clients listen inside their networks."""
    network = MemoryNetwork(seed=1, latency=0.03)
    north, south = (dict(kind) for kind in (*kinds, {}, {})[:2])
    routers = [network.router("5.2.0.1", **north), network.router("5.3.0.1", **south)]
    async with scene(network) as peers, AsyncExitStack() as stack:
        relay, relaying = await peers.relay(host=RELAY)
        more = [await peers.listener(number, host=OTHER) for number in range(1, listeners)]
        clients, punchers = [], []
        for number in range(2):
            router = routers[0 if one_router else number]
            client = await peers.client(
                number, listening=listening, host=f"192.168.1.{number + 2}", port=5000, behind=router
            )
            puncher = Puncher(client.endpoint, around=lambda: HOME)
            await puncher.start()
            stack.push_async_callback(puncher.close)
            await client.reserve(relay)
            for other in more:
                await client.endpoint.connect(other.direct_addresses[0], timeout=5)
            clients.append(client)
            punchers.append(puncher)
        await clients[0].meet(clients[1])
        await clients[1].meet(clients[0])
        yield Homes(peers, (relay, relaying), clients, punchers)


async def until(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    """Of virtual time."""
    end = now() + seconds
    while not condition():
        assert now() < end
        await asyncio.sleep(0.05)


@simulated
async def test_two_homes_leave_the_relay_and_lose_no_call_on_the_way() -> None:
    async with homes() as world:
        a, b = world.clients
        events: list[Event] = []
        a.endpoint.events.subscribe(events.append)
        began = now()
        while not world.direct() or now() - began < 8:
            assert await reaches(a.endpoint, b.endpoint) and await reaches(b.endpoint, a.endpoint)
            assert now() - began < 20
        seen = a.endpoint.seen(b.peer_id)
        changes = [event for event in events if isinstance(event, WayChanged)]
        assert seen is not None and changes == [WayChanged(b.peer_id.text, seen.remote_address, relayed=False)]
        assert len([event for event in events if isinstance(event, PeerConnected)]) == 1
        assert now() - began < 9
        await asyncio.sleep(20)
        assert world.relaying.statistics().circuits == 0 and world.direct(), "the relay is left"


@simulated
async def test_where_one_router_shows_each_connection_at_another_port_the_relay_stays() -> None:
    async with homes({}, {"translation": "dependent"}) as world:
        a, b = world.clients
        assert await reaches(a.endpoint, b.endpoint)
        await asyncio.sleep(60)
        assert not world.direct() and await reaches(b.endpoint, a.endpoint)
        assert world.puncher(world.clients[1]).outside.translation("IPv4") == "dependent"
        assert world.dials("5.2.0.1", "5.3.0.1") == 0, "it was known before that this cannot work"


@simulated
async def test_routers_that_refuse_what_comes_too_early_are_passed_because_both_ends_begin_at_once() -> None:
    async with homes({"refuses": True}, {"refuses": True}) as world:
        assert await reaches(world.asker.endpoint, world.asked.endpoint)
        await until(world.direct)


@simulated
async def test_a_direct_path_that_dies_is_replaced_by_the_relay_and_what_was_on_it_fails_loudly() -> None:
    async with homes() as world:
        a, b = world.clients
        a.endpoint.serve("slow", Number, slow(3600))
        assert await reaches(a.endpoint, b.endpoint)
        await until(world.direct)
        call = asyncio.ensure_future(b.endpoint.call(a.peer_id, "slow", Number(1), Number, timeout=3600))
        with pytest.raises(ConnectionLost):
            async with a.endpoint.stream(b.peer_id, "echo", Number(100), timeout=10) as stream:
                await stream.send(Number(0), payload(1 << 16))
                world.network.cut(a.peer_id, b.peer_id)
                cut = now()
                await stream.receive(Number)
                await stream.receive(Number)
        with pytest.raises(ConnectionLost):
            await call
        assert await reaches(a.endpoint, b.endpoint) and await reaches(b.endpoint, a.endpoint)
        assert now() - cut < 15
        assert not world.direct()

        # The next try comes when the first one is two minutes old, and where it works the relay is left again.
        world.network.heal()
        await until(world.direct, 130)

        # A path that breaks again and again is not made again and again.
        world.network.cut(a.peer_id, b.peer_id)
        await asyncio.sleep(15)
        world.network.heal()
        assert await reaches(a.endpoint, b.endpoint)
        await asyncio.sleep(180)
        assert not world.direct()
        await until(world.direct, 90)


@simulated
async def test_a_pair_that_cannot_meet_is_tried_ever_more_seldom() -> None:
    # One listener alone cannot tell that the translation depends on whom one dials.
    async with homes({"translation": "dependent"}, listeners=1) as world:
        assert await reaches(world.clients[0].endpoint, world.clients[1].endpoint)
        await asyncio.sleep(900)
        # At 0, 120, 360 and 840 s, and what the attempts take; in each try both ends send one SYN.
        assert sum(puncher.attempts for puncher in world.punchers) == 4
        assert world.dials("5.2.0.1", "5.3.0.1") == 4 * 2 * TRIES
        assert await reaches(world.clients[1].endpoint, world.clients[0].endpoint)

        for puncher in world.punchers:
            before = sum(puncher.attempts for puncher in world.punchers)
            puncher.forget()
        await asyncio.sleep(5)
        assert sum(puncher.attempts for puncher in world.punchers) == before + 1, "another network, another chance"


@pytest.mark.parametrize("translation", ["independent", "dependent"])
@simulated
async def test_two_behind_one_router_connect_inside_their_network(translation: str) -> None:
    async with homes({"translation": translation}, one_router=True, listening=True) as world:
        a, b = world.clients
        assert await reaches(a.endpoint, b.endpoint)
        await until(world.direct)
        for one, other in ((a, b), (b, a)):
            seen = one.endpoint.seen(other.peer_id)
            assert seen is not None and not seen.punched and "192.168.1." in seen.remote_address
        assert world.dials("5.2.0.1") == 0


@simulated
async def test_many_streams_at_once_all_leave_the_relay() -> None:
    async with homes() as world:
        a, b = world.clients
        assert await reaches(a.endpoint, b.endpoint)
        await until(world.direct)

        async def one_stream() -> bool:
            async with a.endpoint.stream(b.peer_id, "echo", Number(1), timeout=60) as stream:
                await stream.send(Number(1), payload(1 << 10))
                await stream.receive(Number)
                return stream.relayed

        assert not any(await asyncio.gather(*(one_stream() for _ in range(40))))


@simulated
async def test_a_client_reached_by_a_listening_peer_dials_it_itself() -> None:
    async with homes() as world:
        client = world.clients[0]
        listening = await world.peers.listener(7, host="5.7.0.1")
        transport = RelayTransport(listening)
        listening.add_transport("relay", transport)
        listening.learn(client.peer_id, client.endpoint.addresses)
        await listening.connect(world.relay.direct_addresses[0], timeout=5)
        assert await listening.call(client.peer_id, "double", Number(4), Number, timeout=5) == Number(8)

        def direct() -> bool:
            seen = listening.seen(client.peer_id)
            return seen is not None and not seen.relayed

        await until(direct)
        assert sum(puncher.attempts for puncher in world.punchers) == 0


# What a peer may not do


async def ask(world: Homes, number: int = 0, purpose: Purpose = Purpose.CONTROL) -> Ready:
    request = PunchAsk(number, purpose)
    return await world.asker.endpoint.call(world.asked.peer_id, ASK, request, Ready, timeout=20)


async def go(world: Homes, seen: str, number: int = 0, near: tuple[str, ...] = ()) -> Went:
    return await world.asker.endpoint.call(world.asked.peer_id, GO, Go(number, seen, near), Went, timeout=20)


@asynccontextmanager
async def hostile() -> AsyncIterator[Homes]:
    """The asker does not keep to the rules."""
    async with homes() as world:
        await world.puncher(world.asker).close()
        assert await reaches(world.asker.endpoint, world.asked.endpoint)
        yield world


@simulated
async def test_a_peer_that_names_another_ones_address_has_three_packets_sent_there() -> None:
    async with hostile() as world:
        await ask(world)
        for _ in range(TRIES):
            assert await go(world, "memory://5.66.0.1:8080") == Went(False)
        for number in range(1, 4):
            await ask(world, number)
            with pytest.raises(CallRefused, match="was dialed often enough"):
                await go(world, "memory://5.66.0.1:8080", number)
        assert world.dials("5.66.0.1") == TRIES


@pytest.mark.parametrize(
    "address", ["memory://192.168.1.1:8080", "memory://127.0.0.1:8080", "memory://5.66.0.1:80", "rubbish"]
)
@simulated
async def test_nothing_is_sent_to_where_no_router_of_the_internet_is(address: str) -> None:
    async with hostile() as world:
        await ask(world)
        dials = len(world.network.dials)
        with pytest.raises(CallRefused, match="does not dial there"):
            await go(world, address)
        with pytest.raises(CallRefused, match="no port is open"):
            await go(world, "memory://5.66.0.1:8080", number=9)
        assert not (await go(world, "memory://5.66.0.1:8080", near=("memory://192.168.1.3:8080",))).connected
        assert len(world.network.dials) == dials


@simulated
async def test_open_ports_are_bounded_and_are_closed_after_a_while() -> None:
    async with homes() as world:
        assert await reaches(world.asker.endpoint, world.asked.endpoint)
        await until(world.direct)
        for number in range(100, 116):
            await ask(world, number, Purpose.BULK)
        with pytest.raises(CallRefused, match="too many"):
            await ask(world, 116, Purpose.BULK)
        assert world.relay.statistics().bulk_connections < 20
        await asyncio.sleep(21)
        await ask(world, 117, Purpose.BULK)


@simulated
async def test_asks_are_counted_because_each_has_listeners_dialed() -> None:
    async with hostile() as world:
        with pytest.raises(CallRefused, match="no direct connection"):
            await ask(world, 0, Purpose.BULK)
        for number in range(1, 5):
            await ask(world, number)
        dials = len(world.network.dials)
        for number in range(5, 10):
            with pytest.raises(CallRefused, match="often enough"):
                await ask(world, number)
        assert len(world.network.dials) == dials
        await asyncio.sleep(61)
        await ask(world, 10)


@pytest.mark.parametrize("kind", ["there", "gone", "elsewhere"])
@simulated
async def test_who_claims_to_be_behind_the_same_router_cannot_scan_the_network_there(kind: str) -> None:
    async with hostile() as world:
        if kind == "there":  # somebody else listens at the first address that is named
            listener = await world.peers.listener(7, host="192.168.1.77", port=8080)
            assert listener.direct_addresses == ("memory://192.168.1.77:8080",)
        host = "10.0.0.77" if kind == "elsewhere" else "192.168.1.77"
        outer = (await ask(world)).seen[0].rpartition(":")[0]
        took = []
        for _ in range(TRIES):
            began = now()
            assert await go(world, outer + ":6000", near=(f"memory://{host}:8080",)) == Went(False)
            took.append(now() - began)
        assert took == pytest.approx([2.12] * TRIES, abs=0.03), "the time of an answer tells nothing"
        assert world.dials(host) == (0 if kind == "elsewhere" else 2)


ANN, BEN = (Identity.from_seed(name).peer_id for name in (b"ann", b"ben"))
OURS = "tcp://5.2.0.1:40001"
BY_RELAY = f"relay://{ANN.text}/{BEN.text}"


def test_what_cannot_be_a_router_in_the_internet_is_not_dialed() -> None:
    inner = "192.168.1.1:8080 127.0.0.1:8080 100.64.0.7:8080 224.0.0.1:8080 0.0.0.0:8080 [::ffff:192.168.1.1]:8080"
    others = "5.3.0.1:443 example.org:8080 [2a00:3::1]:8080"  # a server's port; of another family than ours
    for named in (
        *(f"tcp://{place}" for place in f"{inner} {others}".split()),
        "memory://ben:8080",
        BY_RELAY,
        "rubbish",
    ):
        assert acceptable(named, OURS) is None
        assert pairs_of([OURS], [named]) == []


def test_a_private_address_is_dialed_only_by_ends_that_are_seen_in_private_networks_themselves():
    inside = "tcp://10.1.0.1:40001"
    assert str(acceptable("tcp://10.2.0.1:40002", inside)) == "tcp://10.2.0.1:40002"
    assert acceptable("tcp://5.3.0.1:40002", inside) is None


def test_ipv6_comes_before_ipv4_and_only_families_that_both_ends_have_count():
    ours = [OURS, "tcp://[2a00:2::2]:40001"]
    theirs = ["tcp://5.3.0.1:40002", "tcp://[2a00:3::2]:40002", "tcp://5.4.0.1:40003"]
    assert pairs_of(ours, theirs) == [("IPv6", ours[1], theirs[1]), ("IPv4", ours[0], theirs[0])]
    assert pairs_of(ours[:1], theirs[1:2]) == []


def test_only_addresses_of_this_machines_own_networks_are_dialed_as_nearby():
    def is_near(host):
        return host.startswith(("192.168.1.", "127."))

    named = ["tcp://192.168.1.9:22", "tcp://127.0.0.1:5000", "tcp://10.0.0.1:5000", "x", "tcp://192.168.1.9:5000"]
    assert nearby(named, is_near) == ("tcp://192.168.1.9:5000",)
    assert behind_one_router(pairs_of([OURS], ["tcp://5.2.0.1:40077"]))
    assert not behind_one_router(pairs_of([OURS], ["tcp://5.3.0.1:40077"]))


def test_a_crowd_of_identities_does_not_have_one_host_flooded():
    budget = Meter(**CONTROL_LIMITS)
    crowd = [Identity.from_seed(f"{number}".encode()).peer_id for number in range(200)]
    sent = sum(budget.take(second, peer=peer, network="5.3.0.1") for second in range(60) for peer in crowd)
    assert sent <= 24 + 60 / 20
