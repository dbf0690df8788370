"""The greeting of a closed run over real sockets, in memory and through a relay: nobody gets past it by another way."""

from __future__ import annotations

import asyncio

import pytest

from swarmcli.errors import NotAMember
from swarmcli.network import Endpoint, Identity, Purpose
from swarmcli.network.transports.tcp.handshake import (
    GreetingKind,
    Message,
    Refused,
    greet_dialer,
    take_message,
)
from swarmcli.reach.circuits import open_circuits
from tests.network.closed_runs import ClosedRunWorld
from tests.network.worlds import MemoryWorld, Number, TCPWorld, World, double, reaches
from tests.reach.relay_worlds import CLIENTS, Client, scene
from tests.simulation import simulated

WORLDS: list[type[World]] = [MemoryWorld, TCPWorld]


@pytest.mark.parametrize("kind", WORLDS, ids=lambda kind: kind.name)
def test_members_talk_and_a_stranger_gets_no_connection_for_any_purpose(kind: type[World]) -> None:
    closed, world = ClosedRunWorld(), kind()

    async def main() -> None:
        a, b = [Endpoint(world.transport(seed), membership=closed.member(seed)) for seed in (1, 2)]
        stranger = Endpoint(world.transport(3))
        for endpoint in (a, b, stranger):
            endpoint.serve("double", Number, double)
            await endpoint.start()
        try:
            (address,) = b.addresses
            await a.connect(address, timeout=5)
            assert await reaches(a, b) and await reaches(b, a)
            for purpose in Purpose:
                with pytest.raises(NotAMember, match="this run is closed"):
                    await stranger.transport.dial(address, b.peer_id, purpose, 5)
                with pytest.raises(NotAMember, match="no member of this closed run"):
                    await a.transport.dial(stranger.addresses[0], stranger.peer_id, purpose, 5)
            a.disconnect(b.peer_id, "enough")
            await asyncio.wait_for(b.lost(a.peer_id), 10)
        finally:
            for endpoint in (a, b, stranger):
                await endpoint.close()

    world.run(main())


@simulated
async def test_a_relay_that_lets_strangers_in_brings_them_no_nearer_to_a_member() -> None:
    closed = ClosedRunWorld()
    async with scene() as peers:
        relay, _ = await peers.relay()  # it takes part in no closed run at all
        ends = []
        for seed, membership in ((1, closed.member(CLIENTS + 1)), (2, None)):
            mine = peers._transport(CLIENTS + seed, listening=False)
            endpoint = await peers._start(Endpoint(mine, client_mode=True))
            client = Client(endpoint, await open_circuits(endpoint))
            await client.reserve(relay)
            # The reservation stood before the run was closed to others; circuits ask for passes from now on.
            client.transport.membership = membership
            ends.append(client)
        member, stranger = ends
        for dialer, target, words in (
            (stranger, member, "this run is closed"),
            (member, stranger, "no member of this closed run"),
        ):
            with pytest.raises(NotAMember, match=words):
                await dialer.endpoint.connect(target.address(relay), timeout=10)
        assert not member.endpoint.is_connected(stranger.peer_id)


def test_a_refusal_says_nothing_of_the_run_and_comes_instead_of_everything_else() -> None:
    closed = ClosedRunWorld()
    listener, dialer = Identity.from_seed(1), Identity.from_seed(2)
    script = greet_dialer(listener, "tcp://203.0.113.9:4001", closed.member(1))
    next(script)
    challenge = _only(script.send(Message(GreetingKind.HELLO, b"\x00" + dialer.peer_id)))
    signed = dialer.sign("dial", challenge.body, listener.peer_id, b"\x00", b"")
    with pytest.raises(Refused) as refused:
        script.send(Message(GreetingKind.PROOF, signed))
    words = _only(refused.value.last_words)
    assert words.kind == GreetingKind.NO_MEMBER and refused.value.rule == "no member"
    assert words.body == b"this run is closed: ask its owner for an invitation (`swarm invite`)"


def test_an_invitation_is_worth_nothing_on_a_connection_that_its_holder_has_not_made() -> None:
    """A man in the middle passes on what a member has shown to him."""
    closed = ClosedRunWorld()
    member, listener, thief = (Identity.from_seed(seed) for seed in (1, 2, 3))
    shown = closed.member(1).proof(listener.peer_id)
    script = greet_dialer(listener, "", closed.member(2))
    next(script)
    challenge = _only(script.send(Message(GreetingKind.HELLO, b"\x00" + member.peer_id)))
    asked = member.sign("dial", challenge.body, thief.peer_id, b"\x00", shown)  # the member dialed the thief
    with pytest.raises(Refused, match="does not belong to this peer id, this listener"):
        script.send(Message(GreetingKind.PROOF, asked + shown))


def _only(data: bytes) -> Message:
    message = take_message(bytearray(data))
    assert message is not None
    return message
