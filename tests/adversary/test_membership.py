"""What lies about membership get at most: a closed run of five members, of which one lies."""

from __future__ import annotations

import asyncio
import random

import pytest

from swarmcli.network.identity import Identity
from swarmcli.network.membership import claimed
from tests.adversary.lies import LIES, Liar
from tests.network.closed_runs import TONIGHT, ClosedRunWorld, ClosedSwarm
from tests.simulation import simulated

REFUSED = [
    "no invitation at all",
    "garbage for an invitation",
    "an invitation of its own making",
    "a later end",
    "a copied invitation",
]


async def honest_and_one(swarm: ClosedSwarm, honest: int = 4) -> Liar:
    for seed in range(honest + 1):
        await swarm.add(swarm.world.member(seed))
    last = swarm.nodes[-1]
    return Liar(random.Random(1), last.endpoint, last)


def of_honest(swarm: ClosedSwarm) -> list[set[bytes]]:
    """With whom each honest one is connected."""
    return [set(node.endpoint.connected()) for node in swarm.nodes if node.endpoint.membership is not None]


@pytest.mark.parametrize("name", REFUSED)
@simulated
async def test_who_shows_what_is_not_its_own_is_refused_by_all(name: str) -> None:
    async with ClosedSwarm(ClosedRunWorld()) as swarm:
        liar = await honest_and_one(swarm)
        LIES[name].tell(liar)
        for peer in liar.endpoint.connected():
            liar.endpoint.disconnect(peer, "to come back as somebody else")
        await asyncio.sleep(2)
        await swarm.connect_all()
        await asyncio.sleep(2)
        assert liar.told
        honest = {node.peer_id for node in swarm.nodes[:-1]}
        connected = of_honest(swarm)[:-1]
        assert all(each == honest - {node.peer_id} for each, node in zip(connected, swarm.nodes, strict=False))


@simulated
async def test_an_open_door_lets_nobody_in_but_to_the_liar() -> None:
    async with ClosedSwarm(ClosedRunWorld()) as swarm:
        liar = await honest_and_one(swarm)
        LIES["an open door"].tell(liar)
        stranger = swarm.world.membership(Identity.from_seed(99))
        stranger.check = lambda peer, proof: b""  # type: ignore[method-assign]
        swarm.nodes.insert(0, swarm.nodes.pop())  # its first contact is the liar
        node = await swarm.add(stranger)
        await swarm.connect_all()
        await asyncio.sleep(5)
        assert liar.told and set(node.endpoint.connected()) == {liar.endpoint.peer_id}
        honest = [each for each in swarm.nodes if each not in (node, liar.node)]
        assert all(node.peer_id not in each.endpoint.connected() for each in honest)


@simulated
async def test_a_host_that_binds_to_everybody_lets_in_who_has_the_link_until_that_is_revoked() -> None:
    world = ClosedRunWorld()
    async with ClosedSwarm(world) as swarm:
        liar = await honest_and_one(swarm)
        LIES["a host that binds to everybody"].tell(liar)
        swarm.nodes.insert(0, swarm.nodes.pop())
        invitation, key = world.key.invite_bearer(world.recipe, liar.endpoint.peer_id, TONIGHT)
        guests = [Identity.from_seed(seed) for seed in (50, 51)]
        found = [
            await swarm.add(world.membership(each, claimed(world.run, invitation, key, each.peer_id)))
            for each in guests
        ]
        assert liar.told and all(node.endpoint.connected() for node in found)
        honest = swarm.nodes[1:5]
        revocation = world.key.revoke(world.recipe, invitation.id)
        await swarm.revocations[0].take_up([revocation])
        await asyncio.sleep(3)
        ids = {each.peer_id for each in guests}
        assert not any(ids & set(node.endpoint.connected()) for node in honest), "one revocation for all of them"


@pytest.mark.parametrize("name", ["revocations of honest peers", "deaf to revocations"])
@simulated
async def test_neither_inventing_nor_ignoring_revocations_changes_who_is_out(name: str) -> None:
    world = ClosedRunWorld()
    async with ClosedSwarm(world) as swarm:
        liar = await honest_and_one(swarm)
        await swarm.connect_all()
        LIES[name].tell(liar)
        out = swarm.nodes[3].peer_id
        lying = swarm.revocations[-1]
        await lying.tell(liar.endpoint.connected(), lying._known)
        await swarm.revocations[0].take_up([world.key.revoke(world.recipe, out)])
        await asyncio.sleep(3)
        assert liar.told
        stay = {node.peer_id for node in swarm.nodes[:3]}
        for node in swarm.nodes[:3]:
            connected = set(node.endpoint.connected())
            assert connected >= stay - {node.peer_id} and out not in connected


def test_there_are_enough_lies_about_membership_and_each_is_tested() -> None:
    names = {name for name, each in LIES.items() if each.layer == "membership"}
    tested = {*REFUSED, "revocations of honest peers", "deaf to revocations", "an open door"}
    assert names == tested | {"a host that binds to everybody"}
