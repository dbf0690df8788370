"""What stands under the key of a bucket, and who may have written it."""

from __future__ import annotations

import asyncio

import pytest

from swarmcli.averaging.find.declarations import Declarations, group_key, next_bits
from swarmcli.averaging.find.messages import Candidate, search_id
from swarmcli.averaging.group import Group, Member
from swarmcli.dht.records import OwnedSubkey
from swarmcli.network import wire
from swarmcli.network.identity import PeerID
from tests.averaging.averagers import Averagers, Peer
from tests.simulation import within


def candidate(peer: PeerID, began: float = 0.0, bits: str = "") -> Candidate:
    return Candidate(peer, search_id(began, bytes(8)), b"tag", True, ("memory://here",), bits)


def of(peer: Peer) -> Declarations:
    return Declarations(peer.node, "key")


async def publish(writer: Declarations, declared: Candidate) -> None:
    writer.say(declared)
    await writer.publish()


@within(3600)
async def test_what_one_declares_the_others_read_in_its_bucket_alone_until_it_is_withdrawn() -> None:
    async with Averagers(0) as swarm:
        one, other = await swarm.add(2)
        writer, reader = of(one), of(other)
        for began, bits in ((1.0, "01"), (2.0, "01"), (2.0, "10"), (3.0, "01")):
            declared = candidate(one.peer_id, began, bits)
            await publish(writer, declared)
            for bucket in ("01", "10"):
                assert await reader.read(bucket) == ([declared] if bucket == bits else [])
        await writer.withdraw()
        assert await reader.read("01") == []


@within(3600)
async def test_a_declaration_is_kept_up_and_an_older_one_does_not_come_back() -> None:
    async with Averagers(0) as swarm:
        one, other = await swarm.add(2)
        writer, reader = of(one), of(other)
        writer.say(candidate(one.peer_id, 1.0))
        keeping = asyncio.get_running_loop().create_task(writer.keep_published())
        await asyncio.sleep(200)
        assert await reader.read("") == [candidate(one.peer_id, 1.0)]
        writer.say(candidate(one.peer_id, 2.0))
        await asyncio.sleep(40)
        assert await reader.read("") == [candidate(one.peer_id, 2.0)]
        keeping.cancel()


@pytest.mark.parametrize("value", [b"garbage", 7, wire.encode({"search": b"short"})])
@within(3600)
async def test_what_does_not_decode_or_names_another_peer_is_passed_over(value: object) -> None:
    async with Averagers(2) as swarm:
        one, other = await swarm.add(2)
        expiration = one.endpoint.clock.now() + 60
        await one.node.store("key.0b", value, expiration, subkey=OwnedSubkey(one.peer_id, b""))
        await one.node.store("key.0b", wire.encode(candidate(one.peer_id)), expiration, subkey="anybody's")
        assert await of(other).read("") == []
        await publish(of(one), candidate(other.peer_id))
        assert await of(other).read("") == []


@within(3600)
async def test_without_a_network_nothing_is_read_and_nothing_fails() -> None:
    async with Averagers(3) as swarm:
        one, other = await swarm.add(2)
        swarm.network.partition([one.peer_id], [other.peer_id])
        await publish(of(other), candidate(other.peer_id))
        assert await of(one).read("") == []


# Buckets of the Moshpit grid: group mates move apart, and averages of strangers meet


def test_members_go_to_buckets_of_their_own() -> None:
    assert group_key("run", "") == "run.0b" and group_key("run", "01") == "run.0b01"
    members = [PeerID(number.to_bytes(32, "big")) for number in range(4)]
    group = Group.form(b"", [Member(peer) for peer in members], [1.0] * 4, bytes(16))
    assert next_bits("", group, members[0], 16) == ""
    after = [next_bits("1011", group, peer, 4) for peer in members]
    assert {bits[:2] for bits in after} == {"11"} and {bits[2:] for bits in after} == {"00", "01", "10", "11"}
