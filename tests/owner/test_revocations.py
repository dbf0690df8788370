"""Revocations on their way through a closed run, in virtual time."""

from __future__ import annotations

import asyncio

import pytest

from swarmcli.errors import BootstrapError, CallRefused, NotAMember
from swarmcli.events import MembershipEnded, PeerRefused
from swarmcli.network.identity import Identity
from swarmcli.owner.revocations import METHOD, Revoked, Taken
from tests.network.closed_runs import TONIGHT, ClosedRunWorld, ClosedSwarm
from tests.simulation import simulated


@simulated
async def test_what_one_member_hears_all_connected_peers_act_on_within_seconds() -> None:
    world = ClosedRunWorld()
    async with ClosedSwarm(world) as swarm:
        nodes = [await swarm.add(world.member(seed)) for seed in range(5)]
        await swarm.connect_all()
        gone = nodes[4]
        began = asyncio.get_running_loop().time()
        assert await swarm.revocations[0].take_up([world.key.revoke(world.recipe, gone.peer_id)]) == 1
        await asyncio.sleep(3)
        assert asyncio.get_running_loop().time() - began < 60
        assert not gone.endpoint.connected()
        assert all(gone.peer_id not in node.endpoint.connected() for node in nodes[:4])
        assert all(len(node.endpoint.connected()) == 3 for node in nodes[:4]), "the others go on"
        assert [type(e) for e in swarm.heard].count(MembershipEnded) == 1, "who was revoked hears why"
        assert sum(isinstance(e, PeerRefused) and e.peer == gone.peer_id.text for e in swarm.heard) == 4
        for a, b in ((gone, nodes[1]), (nodes[1], gone)):
            with pytest.raises(NotAMember, match="revoked"):
                await a.endpoint.connect(b.endpoint.addresses[0], timeout=5)


@pytest.mark.parametrize("seconds", [6, 10])
@simulated
async def test_who_was_away_or_hung_learns_of_it(seconds: int) -> None:
    world = ClosedRunWorld()
    async with ClosedSwarm(world) as swarm:
        members = [world.member(seed) for seed in range(3)]
        *_, hangs = [await swarm.add(member) for member in members]
        subject = Identity.from_seed(77).peer_id
        swarm.network.freeze(hangs.peer_id)
        await swarm.revocations[0].take_up([world.key.revoke(world.recipe, subject)])
        await asyncio.sleep(seconds)  # its connections outlast the shorter one, and no call does
        swarm.network.thaw(hangs.peer_id)
        await asyncio.sleep(20)
        assert subject in members[2].remembered.revoked, "told when it was there again"
        await asyncio.sleep(1200)
        late = world.member(8)
        await swarm.add(late)
        await asyncio.sleep(2)
        assert subject in late.remembered.revoked, "told when it came"

        other, one, last = Identity.from_seed(78).peer_id, swarm.nodes[1].endpoint, swarm.nodes[3].endpoint
        late.learn([world.key.revoke(world.recipe, other)])  # and tells nobody
        last.disconnect(one.peer_id, "for a test")
        await asyncio.sleep(1)
        await last.connect(one.addresses[0], timeout=5)
        await asyncio.sleep(2)
        assert other in members[1].remembered.revoked, "told when they connected"


@simulated
async def test_an_invented_revocation_is_refused_and_ends_nobodys_connection() -> None:
    world, foreign = ClosedRunWorld(), ClosedRunWorld("b" * 32)
    async with ClosedSwarm(world) as swarm:
        a, b = [await swarm.add(world.member(seed)) for seed in range(2)]
        false = foreign.key.revoke(foreign.recipe, a.peer_id)
        with pytest.raises(CallRefused, match="owner has not signed"):
            await b.endpoint.call(a.peer_id, METHOD, Revoked((false,)), Taken, timeout=5)
        assert a.endpoint.is_connected(b.peer_id)
        assert not any(isinstance(event, MembershipEnded) for event in swarm.heard)


@simulated
async def test_an_invitation_that_ends_ends_the_connections_that_it_opened() -> None:
    world = ClosedRunWorld()
    async with ClosedSwarm(world) as swarm:
        stays = await swarm.add(world.member(1, TONIGHT + 1000))
        goes = await swarm.add(world.member(2))
        assert stays.endpoint.is_connected(goes.peer_id)
        world.clock.time = TONIGHT
        await asyncio.sleep(30)
        assert not stays.endpoint.connected() and not goes.endpoint.connected()
        assert any(isinstance(event, MembershipEnded) and "has ended" in event.reason for event in swarm.heard)


@simulated
async def test_a_stranger_gets_nothing_out_of_a_member_but_the_refusal() -> None:
    """Every purpose of a connection, and both directions: no call is ever answered, and no address is told."""

    world = ClosedRunWorld()
    async with ClosedSwarm(world) as swarm:
        member = await swarm.add(world.member(1))
        for membership in (world.membership(Identity.from_seed(9)), ClosedRunWorld("b" * 32).member(9)):
            with pytest.raises(BootstrapError, match="this run is closed"):
                await swarm.add(membership)
        from swarmcli.network.endpoint import Endpoint

        open_one = Endpoint(swarm.network.transport(Identity.from_seed(10)))
        await open_one.start()
        (address,) = member.endpoint.addresses
        for attempt in (
            open_one.connect(address, timeout=5),
            open_one.probe(address, member.peer_id, b"hello", timeout=5),
            member.endpoint.connect(open_one.addresses[0], timeout=5),
            member.endpoint.probe(open_one.addresses[0], open_one.peer_id, timeout=5),
        ):
            with pytest.raises(NotAMember):
                await attempt
        assert not member.endpoint.connected() and not open_one.connected()
        assert member.endpoint.statistics().known_peers == 0
        await open_one.close()
