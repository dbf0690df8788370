"""What stands under the key of a bucket, and who may have written it."""

from __future__ import annotations

import asyncio

import pytest

from swarmcli.averaging.matchmaking.candidates import Candidate, search_id
from swarmcli.averaging.matchmaking.declarations import Board
from swarmcli.dht.records import OwnedSubkey
from swarmcli.network import wire
from swarmcli.network.identity import PeerID
from swarmcli.testing import virtual_time
from tests.averaging.averagers import Averagers, Peer


def run(main) -> None:
    virtual_time.run(main, seed=0, timeout=3600)


def candidate(peer: PeerID, began: float = 0.0, bits: str = "") -> Candidate:
    return Candidate(peer, search_id(began, bytes(8)), b"tag", True, ("memory://here",), bits)


def board(peer: Peer) -> Board:
    return Board(peer.node, "key")


async def publish(writer: Board, declared: Candidate) -> None:
    writer.say(declared)
    await writer.publish()


def test_what_one_declares_the_others_read_until_it_is_withdrawn() -> None:
    async def main() -> None:
        async with Averagers(0) as swarm:
            one, other = await swarm.add(2)
            writer, reader = board(one), board(other)
            for began in (1.0, 2.0):
                await publish(writer, candidate(one.peer_id, began))
                assert await reader.read("") == [candidate(one.peer_id, began)]
            await writer.withdraw()
            assert await reader.read("") == []

    run(main())


def test_who_moves_is_gone_from_its_former_bucket() -> None:
    async def main() -> None:
        async with Averagers(0) as swarm:
            one, other = await swarm.add(2)
            writer, reader = board(one), board(other)
            for bits in ("01", "10", "01"):
                await publish(writer, candidate(one.peer_id, bits=bits))
                for bucket in ("01", "10"):
                    there = [candidate(one.peer_id, bits=bits)] if bucket == bits else []
                    assert await reader.read(bucket) == there

    run(main())


def test_a_declaration_is_kept_up_and_an_older_one_does_not_come_back() -> None:
    async def main() -> None:
        async with Averagers(0) as swarm:
            one, other = await swarm.add(2)
            writer, reader = board(one), board(other)
            writer.say(candidate(one.peer_id, 1.0))
            keeping = asyncio.get_running_loop().create_task(writer.keep_published())
            await asyncio.sleep(200)
            assert await reader.read("") == [candidate(one.peer_id, 1.0)]
            writer.say(candidate(one.peer_id, 2.0))
            await asyncio.sleep(40)
            assert await reader.read("") == [candidate(one.peer_id, 2.0)]
            keeping.cancel()

    run(main())


def test_nobody_declares_another() -> None:
    async def main() -> None:
        async with Averagers(1) as swarm:
            one, other = await swarm.add(2)
            await publish(board(one), candidate(other.peer_id))
            assert await board(other).read("") == []

    run(main())


@pytest.mark.parametrize("value", [b"garbage", 7, wire.encode({"search": b"short"})])
def test_what_does_not_decode_is_passed_over(value: object) -> None:
    async def main() -> None:
        async with Averagers(2) as swarm:
            one, other = await swarm.add(2)
            expiration = one.endpoint.clock.now() + 60
            await one.node.store("key.0b", value, expiration, subkey=OwnedSubkey(one.peer_id, b""))
            await one.node.store("key.0b", wire.encode(candidate(one.peer_id)), expiration, subkey="anybody's")
            assert await board(other).read("") == []

    run(main())


def test_without_a_network_nothing_is_read_and_nothing_fails() -> None:
    async def main() -> None:
        async with Averagers(3) as swarm:
            one, other = await swarm.add(2)
            swarm.network.partition([one.peer_id], [other.peer_id])
            await publish(board(other), candidate(other.peer_id))
            assert await board(one).read("") == []

    run(main())
