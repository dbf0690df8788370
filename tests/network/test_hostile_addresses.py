"""Peers that announce addresses which are not theirs: whom they make us dial is counted on the wire."""

from __future__ import annotations

import asyncio

import pytest

from swarmcli.errors import PeerUnreachable
from swarmcli.events import Event, OwnAddressesChanged
from swarmcli.network import Endpoint, Identity, PeerID, Purpose, wire
from swarmcli.network.addresses import Scope
from swarmcli.network.dialer import FAILED_DIALS, FAILED_DIALS_PER_HOST
from swarmcli.network.wire.messages import BulkDenied, BulkWanted
from swarmcli.testing.memory_connection import MemoryConnection
from tests.simulation import now, simulated

from .worlds import Number, reaches, town

VICTIM, STRANGER = "203.0.113.1", "203.0.113.66"
ABSENT = Identity.from_seed(404).peer_id  # a peer that nobody has ever seen


async def fails_to_reach(peer: Endpoint, other: PeerID) -> None:
    with pytest.raises(PeerUnreachable):
        await peer.call(other, "double", Number(1), Number, timeout=60)


# Asking to be dialed


@simulated
async def test_who_asks_to_be_dialed_is_dialed_at_its_own_host_alone_and_learns_nothing_of_others() -> None:
    async with town() as place:
        victim = await place.peer(1, VICTIM)
        third = await place.peer(2, "203.0.113.2")  # listens, so a dial there would be told from one to a closed port
        named = [third.addresses[0], "memory://203.0.113.2:22", "memory://192.168.1.1:80", "memory://127.0.0.1:22"]
        stranger = await place.stranger(victim, STRANGER, *named)
        for token in range(20):
            await stranger.send(wire.encode(BulkWanted(token)))
            await asyncio.sleep(0.2)
        assert {address.split("/")[2].split(":")[0] for address in place.dialed_by(victim)} == {STRANGER}
        denied = [frame for frame, _ in place.heard.frames if frame == wire.encode(BulkDenied(0))]
        assert len(denied) == 1
        answers = {bytes(frame) for frame, _ in place.heard.frames if b"denied" in frame}
        assert answers == {wire.encode(BulkDenied(token)) for token in range(20)}, "whatever the dial has met"


@simulated
async def test_a_peer_behind_a_forwarded_port_keeps_its_streams() -> None:
    """What it announces is its inner address; its client has reached it at the router's, and dials that again."""

    async with town() as place:
        router = place.network.router("203.0.113.9")
        home = await place.peer(1, "192.168.1.5", behind=router)
        client = await place.peer(2, VICTIM, client_mode=True)
        outer = router.forward(1000, home.peer_id)
        await client.connect(outer, timeout=5)
        await asyncio.sleep(1)
        assert client.first_hand(home.peer_id) == (outer,) and home.direct_addresses == ("memory://192.168.1.5:1000",)
        async with (
            home.stream(client.peer_id, "hold", Number(0), timeout=5),
            client.stream(home.peer_id, "hold", Number(0), timeout=5),
        ):
            assert set(place.dialed_by(client)) == {outer}


# What strangers name


@simulated
async def test_a_stranger_on_the_internet_names_no_hosts_of_our_lan_nor_of_this_machine() -> None:
    async with town() as place:
        victim = await place.peer(1, VICTIM)
        inner = ["memory://127.0.0.1:22", "memory://192.168.1.1:80", "memory://10.0.0.7:1", "memory://[fd00::1]:1"]
        stranger = await place.stranger(victim, STRANGER, *inner)
        await stranger.close("gone")
        await asyncio.sleep(1)
        await fails_to_reach(victim, stranger.peer_id if stranger.peer_id != victim.peer_id else ABSENT)
        await fails_to_reach(victim, Identity.from_seed(66).peer_id)
        victim.learn(ABSENT, inner, horizon=victim.horizon(Identity.from_seed(66).peer_id))
        victim.learn(ABSENT, inner)  # as a record in the hash table says it: nobody in particular
        await fails_to_reach(victim, ABSENT)
        assert place.dialed_by(victim) == [] and now() < 10


@simulated
async def test_in_one_lan_peers_find_each_other_by_addresses_of_the_lan() -> None:
    async with town() as place:
        a = await place.peer(1, "192.168.1.1")
        b = await place.peer(2, "192.168.1.2")
        c = await place.peer(3, "192.168.1.3")
        await b.connect(a.addresses[0], timeout=5)
        await asyncio.sleep(1)
        assert b.horizon(a.peer_id) == Scope.LAN
        b.learn(c.peer_id, c.addresses, horizon=b.horizon(a.peer_id))
        assert await reaches(b, c)
        b.learn(ABSENT, ["memory://127.0.0.1:22"], horizon=b.horizon(a.peer_id))
        assert not b.addresses_of(ABSENT), "another machine of the LAN means itself by that"


@simulated
async def test_once_strangers_from_beyond_were_met_records_name_no_inner_hosts() -> None:
    async with town() as place:
        a = await place.peer(1, "192.168.1.1")
        b = await place.peer(2, "192.168.1.2")
        await b.connect(a.addresses[0], timeout=5)
        await asyncio.sleep(1)
        a.learn(ABSENT, ["memory://192.168.1.9:1"])
        assert a.addresses_of(ABSENT)
        await place.stranger(a, STRANGER)
        other = Identity.from_seed(405).peer_id
        a.learn(other, ["memory://192.168.1.9:1"])
        assert not a.addresses_of(other)


@simulated
async def test_a_liar_with_hundreds_of_peers_makes_us_dial_a_victim_only_so_often() -> None:
    async with town() as place:
        one = await place.peer(1, VICTIM)
        for number in range(250):
            peer = Identity.from_seed(1000 + number).peer_id
            one.learn(peer, [f"memory://203.0.113.80:{1 + number}"])
            await fails_to_reach(one, peer)
        spent = FAILED_DIALS_PER_HOST[1] + FAILED_DIALS_PER_HOST[0] * now()
        assert len(place.dialed_by(one)) <= spent + 1
        for number in range(500):
            peer = Identity.from_seed(3000 + number).peer_id
            one.learn(peer, [f"memory://203.0.{number // 100}.{1 + number % 100}:22"])
            await fails_to_reach(one, peer)
        spent = FAILED_DIALS[1] + FAILED_DIALS[0] * now()
        assert len(place.dialed_by(one)) <= spent + 1
        honest = await place.peer(2, "203.0.113.2")
        assert await one.connect(honest.addresses[0], timeout=5) == honest.peer_id, "what its user names is dialed"


# What a peer says of itself, as that changes


@simulated
async def test_connected_peers_hear_where_a_peer_can_be_dialed_now() -> None:
    async with town() as place:
        one, other = await place.peer(1, VICTIM), await place.peer(2, "203.0.113.2")
        heard: list[Event] = []
        one.events.subscribe(heard.append)
        await other.connect(one.addresses[0], timeout=5)
        await asyncio.sleep(1)
        relayed = f"relay://{Identity.from_seed(9).peer_id}/{one.peer_id}"
        one.announce(direct=(), relayed=[relayed])
        assert one.client_mode and one.addresses == (relayed,) and one.direct_addresses == ()
        assert heard[-1] == OwnAddressesChanged((relayed,))
        await asyncio.sleep(1)
        assert other.own_word(one.peer_id) == ("memory://203.0.113.1:1000", relayed), "it has answered there"
        one.announce(direct=["memory://203.0.113.77:5"])
        one.announce(direct=["memory://203.0.113.77:5"])
        await asyncio.sleep(1)
        assert not one.client_mode and other.own_word(one.peer_id)[1:] == ("memory://203.0.113.77:5", relayed)
        assert sum(isinstance(event, OwnAddressesChanged) for event in heard) == 2


@simulated
async def test_a_listener_says_where_it_sees_its_dialer_and_the_router_before_it() -> None:
    async with town() as place:
        router = place.network.router("203.0.113.9")
        home = await place.peer(1, "192.168.1.5", behind=router)
        public = await place.peer(2, VICTIM)
        await home.connect(public.addresses[0], timeout=5)
        await asyncio.sleep(1)
        seen, known = home.seen(public.peer_id), public.seen(home.peer_id)
        assert seen is not None and known is not None and seen.dialed and not known.dialed
        assert seen.observed_address == known.remote_address and known.remote_address.startswith(
            "memory://203.0.113.9:"
        )
        assert seen.remote_address == public.addresses[0] and known.observed_address is None
        await fails_to_reach(public, ABSENT)
        assert public.seen(ABSENT) is None


# Direct connections and relayed ones


async def connected(dialer: Endpoint, listener: Endpoint, *, relayed: bool, purpose: Purpose = Purpose.CONTROL) -> None:
    """One more connection, which other means than the endpoint's own have brought about."""
    transport = dialer.transport
    connection = await transport.dial(listener.addresses[0], listener.peer_id, purpose, 5.0)
    assert isinstance(connection, MemoryConnection)
    connection.relayed = connection.other.relayed = relayed
    dialer.adopt(connection)
    await asyncio.sleep(1)


@pytest.mark.parametrize("first", [True, False])
@simulated
async def test_both_ends_prefer_a_direct_connection_and_the_relayed_one_ends(first: bool) -> None:
    async with town() as place:
        one, other = await place.peer(1, VICTIM), await place.peer(2, "203.0.113.2")
        for relayed in (first, not first):
            await connected(one, other, relayed=relayed)
        for a, b in ((one, other), (other, one)):
            seen = a.seen(b.peer_id)
            assert seen is not None and not seen.relayed and await reaches(a, b)
            assert a.statistics().control_connections == 2
        await asyncio.sleep(60)
        assert one.statistics().control_connections == other.statistics().control_connections == 1
        assert one.is_connected(other.peer_id) and await reaches(other, one)
