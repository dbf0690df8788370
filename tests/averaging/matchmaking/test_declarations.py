"""What stands under a group key, and who may have written it."""

from __future__ import annotations

import pytest

from swarmcli.averaging.matchmaking.candidates import Candidate, search_id
from swarmcli.averaging.matchmaking.declarations import DHTBoard
from swarmcli.dht.keys import OwnedSubkey
from swarmcli.network import virtual_time, wire
from swarmcli.network.identity import PeerID
from tests.averaging.averagers import Averagers, Peer


def run(main) -> None:
    virtual_time.run(main, seed=0, timeout=3600)


def candidate(peer: PeerID, began: float = 0.0) -> Candidate:
    return Candidate(peer, search_id(began, bytes(8)), b"tag", True, ("memory://here",))


def board(peer: Peer) -> DHTBoard:
    return DHTBoard(peer.node, "key.0b")


def test_what_one_declares_the_others_read_until_it_is_withdrawn() -> None:
    async def main() -> None:
        async with Averagers(0) as swarm:
            one, other = await swarm.add(2)
            writer, reader = board(one), board(other)
            for began in (1.0, 2.0):
                await writer.declare(candidate(one.peer_id, began), 60.0)
                assert await reader.read() == [candidate(one.peer_id, began)]
            await writer.withdraw()
            assert await reader.read() == []

    run(main())


def test_nobody_declares_another() -> None:
    async def main() -> None:
        async with Averagers(1) as swarm:
            one, other = await swarm.add(2)
            await board(one).declare(candidate(other.peer_id), 60.0)
            assert await board(other).read() == []

    run(main())


@pytest.mark.parametrize("value", [b"garbage", 7, wire.encode({"search": b"short"})])
def test_what_does_not_decode_is_passed_over(value: object) -> None:
    async def main() -> None:
        async with Averagers(2) as swarm:
            one, other = await swarm.add(2)
            expiration = one.endpoint.clock.now() + 60
            await one.node.store("key.0b", value, expiration, subkey=OwnedSubkey(one.peer_id, b""))
            await one.node.store("key.0b", wire.encode(candidate(one.peer_id)), expiration, subkey="anybody's")
            assert await board(other).read() == []

    run(main())


def test_without_a_network_nothing_is_read_and_nothing_fails() -> None:
    async def main() -> None:
        async with Averagers(3) as swarm:
            one, other = await swarm.add(2)
            swarm.network.partition([one.peer_id], [other.peer_id])
            await board(other).declare(candidate(other.peer_id), 60.0)
            assert await board(one).read() == []

    run(main())
