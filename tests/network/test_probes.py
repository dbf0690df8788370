"""Connections that ask where they are seen, and may bring a word. Over both transports."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

import pytest

from swarmcli.network import Endpoint, PeerID, Purpose
from swarmcli.network.addresses import parse_address
from tests.network.worlds import Attacker, MemoryWorld, TCPWorld, World, town
from tests.simulation import simulated

Heard = list[tuple[PeerID, str, bytes]]


@pytest.fixture(params=[MemoryWorld, TCPWorld], ids=["memory", "tcp"])
def world(request: pytest.FixtureRequest) -> World:
    made: World = request.param()
    return made


async def started(world: World, ends: AsyncExitStack, seed: int) -> Endpoint:
    endpoint = Endpoint(world.transport(seed), seed=seed)
    ends.push_async_callback(endpoint.close)
    await endpoint.start()
    return endpoint


def test_a_probe_tells_where_it_is_seen_and_its_word_counts_at_the_listener_alone(world: World) -> None:
    async def main() -> None:
        async with AsyncExitStack() as ends:
            asked, asker = await started(world, ends, 1), await started(world, ends, 2)
            heard: Heard = []
            came = asyncio.Event()

            def hear(peer: PeerID, remote_address: str, message: bytes) -> None:
                heard.append((peer, remote_address, message))
                came.set()

            asked.on_probe = hear
            await asker.connect(asked.addresses[0], timeout=5)
            place = asked.addresses[0]
            seen = await asker.probe(place, asked.peer_id, b"a word", timeout=5)
            assert (
                seen is not None and parse_address(seen).host == parse_address(place).host
            ) or world.name == "memory"
            await came.wait()
            ((peer, remote_address, message),) = heard
            assert (peer, remote_address, message) == (asker.peer_id, seen, b"a word")
            assert asked.seen(asker.peer_id).listened and not asker.seen(asked.peer_id).listened  # type: ignore[union-attr]

            # One that this end dialed brings no word, however it is handed over, and none is as long as it likes.
            dialed, recorder = await Attacker(world.transport(3)).dial(asker, Purpose.PROBE)
            await dialed.send(bytes(100_000))
            await recorder.ended.wait()
            assert len(heard) == 1

    world.run(main())


@simulated
async def test_whoever_holds_many_probes_keeps_nobodys_word_from_being_heard() -> None:
    async with town() as place:
        asked, honest, earlier = [await place.peer(seed, f"198.51.100.{seed}") for seed in (1, 2, 3)]
        heard: Heard = []
        asked.on_probe = lambda *word: heard.append(word)
        hoarders = [place.attacker(n, f"203.0.113.{n}") for n in range(10, 160)]  # many hosts of one network
        held = [await Attacker(earlier._transport).dial(asked, Purpose.PROBE)]
        held += [await Attacker(earlier._transport).dial(asked, Purpose.PROBE) for _ in range(2)]
        held += [await hoarder.dial(asked, Purpose.PROBE) for hoarder in hoarders * 2]
        await honest.probe(asked.addresses[0], asked.peer_id, b"a proof", timeout=5)
        await asyncio.sleep(1)
        assert [message for _, _, message in heard] == [b"a proof"]
        standing = [not recorder.ends for _, recorder in held]
        assert standing == [True] * 3 + [False] * 48 + [True] * 252, "who holds the most loses its oldest"
