"""Two processes with one key: one stays, the other leaves, and both are told why."""

from __future__ import annotations

import asyncio

import pytest

from swarmcli.clock import Clock
from swarmcli.errors import ConnectError
from swarmcli.events import Event, MembershipEnded, Noticed, PeerConnected, PeerDisconnected
from swarmcli.network import Endpoint, Identity, Purpose, wire
from swarmcli.network.twins import METHOD, Presence, TwinSeen
from swarmcli.network.wire.messages import ControlHello
from tests.simulation import now, simulated

from .worlds import reaches, town


def heard_by(peer: Endpoint) -> list[Event]:
    heard: list[Event] = []
    peer.events.subscribe(heard.append)
    return heard


@pytest.mark.parametrize("young_first", [False, True])
@simulated
async def test_the_older_process_stays_whichever_of_them_a_peer_met_first(young_first: bool) -> None:
    async with town() as made:
        contact, other = await made.peer(1, "5.1.0.1"), await made.peer(2, "5.2.0.1")
        old = await made.peer(9, "5.3.0.1")
        await old.connect((other if young_first else contact).addresses[0], timeout=5)
        await asyncio.sleep(60)
        young = await made.peer(9, "5.4.0.1", seed=10)
        of_old, of_young, of_contact = heard_by(old), heard_by(young), heard_by(contact)
        for each in (young, old) if young_first else (old, young):
            await each.connect(contact.addresses[0], timeout=5)
            await asyncio.sleep(1)
        assert [event for event in of_young if isinstance(event, MembershipEnded)] == [MembershipEnded(young.gave_way)]
        assert "memory://5.3.0.1" in young.gave_way and "was there first" in young.gave_way
        (told,) = [event.text for event in of_old if isinstance(event, Noticed)]
        assert "memory://5.4.0.1" in told and "began later" in told
        assert not old.gave_way and not young.connected() and await reaches(contact, old)
        with pytest.raises(ConnectError):
            await young.connect(other.addresses[0], timeout=5)
        lost = [event for event in of_contact if isinstance(event, PeerDisconnected)]
        assert len(lost) == young_first, "who was with the old one notices nothing"


@simulated
async def test_a_dead_process_gives_its_place_within_seconds_and_a_sleeper_finds_it_taken() -> None:
    async with town() as made:
        contact, slept = await made.peer(1, "5.1.0.1"), [0.0]
        clock = Clock(wall=lambda: 1e9, monotonic=lambda: now() + slept[0])
        old = await made.peer(9, "5.3.0.1", clock=clock)
        await old.connect(contact.addresses[0], timeout=5)
        await asyncio.sleep(60)
        old.peers.controls()[0].reading_wanted = lambda: False  # type: ignore[method-assign]  # it hears nothing any more
        new = await made.peer(9, "5.4.0.1", seed=10)
        heard = heard_by(contact)
        await new.connect(contact.addresses[0], timeout=5)
        await asyncio.sleep(3.5)
        assert [type(event) for event in heard] == [PeerDisconnected, PeerConnected] and await reaches(contact, new)

        await asyncio.sleep(60)
        slept[0] = 3600.0  # it wakes up, and is the older one by its start
        for _ in range(2):
            for channel in old.peers.controls():
                channel.connection.abort("nothing comes on it")
            await asyncio.sleep(0.1)
            if not old.gave_way:
                await old.connect(contact.addresses[0], timeout=5)
            await asyncio.sleep(1)
        assert old.gave_way and not new.gave_way and await reaches(contact, new)


@simulated
async def test_nobody_else_can_say_that_another_process_was_there_first() -> None:
    async with town() as made:
        liar, key = await made.peer(1, "5.1.0.1"), Identity.from_seed(9)
        peer = await made.peer(9, "5.3.0.1")
        heard, own, other = heard_by(peer), peer.boot_id, b"o" * 16
        words = [
            Presence.sign(key, other, b"e" * 16, 1e9),  # a process that is gone said it of an earlier one
            Presence.sign(liar.identity, other, own, 1e9),
            Presence(1e9, Presence.sign(key, other, own, 0.0).signature),
        ]
        await liar.connect(peer.addresses[0], timeout=5)
        for word in words:
            await liar.call(peer.peer_id, METHOD, TwinSeen(other, "", word), Presence, timeout=5)
        echo = await liar.call(peer.peer_id, METHOD, TwinSeen(own, ""), Presence, timeout=5)
        await liar.call(peer.peer_id, METHOD, TwinSeen(own, "", echo), Presence, timeout=5)
        assert not peer.gave_way and not [each for each in heard if isinstance(each, Noticed | MembershipEnded)]


@simulated
async def test_who_starts_again_has_its_place_though_its_former_connection_ends_before_it_greets() -> None:
    async with town() as made:
        contact, peer = await made.peer(1, "5.1.0.1"), made.attacker(9, "5.3.0.1")
        former, _ = await peer.dial(contact, Purpose.CONTROL)
        new, _ = await peer.dial(contact, Purpose.CONTROL, greet=False)
        former.abort("it was killed")
        await asyncio.sleep(0.1)
        heard = heard_by(contact)
        await new.send(wire.encode(ControlHello(b"n" * 16)))
        await asyncio.sleep(3.5)
        assert contact.connected() and not heard, "it is asked for nobody beside it"
