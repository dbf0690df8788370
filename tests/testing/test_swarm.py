"""Whole swarms in one process: the same seed gives the same run, and nothing of them is left."""

from __future__ import annotations

import asyncio
import hashlib
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from swarmcli.dht import DHTNode
from swarmcli.errors import EndOfStream, NetworkError, PeerUnreachable
from swarmcli.events import Event
from swarmcli.network import Endpoint, PeerID, Stream
from swarmcli.testing import MemoryNetwork, Swarm, run, virtual_time
from tests.network.worlds import Number, endpoints
from tests.simulation import simulated


async def store_and_get(swarm: Swarm) -> list[Any]:
    nodes = [await swarm.node(client_mode=number == 3) for number in range(4)]
    expires = nodes[0].endpoint.clock.now() + 60
    await nodes[3].store("key", "value", expires)
    return [(await node.get("key")).value for node in nodes]


@simulated
async def test_nodes_find_each_other_and_end_with_the_swarm() -> None:
    async with Swarm(seed=1, loss=0.1) as swarm:
        assert await store_and_get(swarm) == ["value"] * 4


def test_what_stands_on_a_node_ends_before_it() -> None:
    story: list[str] = []

    class Peer:
        def __init__(self, node: DHTNode) -> None:
            self.node = node

        async def start(self) -> None:
            story.append("started")

        async def shutdown(self) -> None:
            await self.node.get("anything")  # the node still works
            story.append("ended")

    async def main() -> None:
        async with Swarm() as swarm:
            await swarm.start(Peer(await swarm.node()))
            story.append("used")

    run(main(), timeout=600)
    assert story == ["started", "used", "ended"]


def test_the_same_seed_gives_the_same_peers() -> None:
    async def ids(seed: int) -> list[bytes]:
        async with Swarm(seed=seed) as swarm:
            return [(await swarm.node()).peer_id for _ in range(2)]

    assert run(ids(1)) == run(ids(1)) != run(ids(2))


@simulated
async def test_a_killed_peer_answers_nobody() -> None:
    async with Swarm() as swarm:
        one, other = await swarm.node(), await swarm.node()
        swarm.kill(one)
        await asyncio.sleep(1)
        with pytest.raises(PeerUnreachable):
            await other.endpoint.call(one.peer_id, "dht.ping", None, bytes, timeout=30)


def busy_swarm(seed: int) -> list[str]:
    """Nine peers call, stream, dial each other at once, die, and are cut off; everything that happened."""
    trace: list[str] = []

    def note(*what: object) -> None:
        trace.append(f"{asyncio.get_running_loop().time():.9f} " + " ".join(map(str, what)))

    async def echo(peer: PeerID, request: Number, stream: Stream) -> None:
        try:
            while True:
                await stream.send(*await stream.receive(Number))
        except EndOfStream:
            note("stream from", peer.short, "has ended")

    async def live(peer: Endpoint, others: list[Endpoint]) -> None:
        for turn in range(7):
            other = peer.random.choice([candidate for candidate in others if candidate is not peer])
            await asyncio.sleep(peer.random.expovariate(2))
            try:
                answer = await peer.call(other.peer_id, "double", Number(turn), Number, timeout=20)
                note(peer.peer_id.short, "called", other.peer_id.short, answer.n, f"{peer.clock.now():.9f}")
                async with peer.stream(other.peer_id, "echo", Number(0), timeout=20) as stream:
                    await stream.send(Number(turn), peer.random.randbytes(peer.random.randrange(200_000)))
                    _, payload = await stream.receive(Number)
                    note(peer.peer_id.short, "got", hashlib.sha256(payload).hexdigest()[:8])
            except NetworkError as error:
                note(peer.peer_id.short, type(error).__name__, error)

    async def trouble(network: MemoryNetwork, peers: list[Endpoint]) -> None:
        await asyncio.sleep(3)
        network.partition([peer.peer_id for peer in peers[:4]])
        await asyncio.sleep(4)
        network.heal()
        network.kill(network.random.choice(peers).peer_id)
        await asyncio.sleep(2)
        network.freeze(network.random.choice(peers).peer_id)

    async def main() -> None:
        network = MemoryNetwork(seed=seed, latency=0.03, loss=0.05, bandwidth=3e6)
        async with endpoints(network, 9) as peers:
            for peer in peers:
                peer.serve_stream("echo", Number, echo)

                def listen(event: Event, name: str = peer.peer_id.short) -> None:
                    note(name, event)

                peer.events.subscribe(listen)
                peer.random.seed(seed * 1000 + peers.index(peer))
            async with asyncio.TaskGroup() as group:
                group.create_task(trouble(network, peers))
                for peer in peers:
                    group.create_task(live(peer, peers))
            note("bytes", [peer.statistics().traffic for peer in peers])

    virtual_time.run(main(), seed=seed)
    return trace


def test_the_same_seed_gives_the_same_run_and_another_seed_another() -> None:
    """Also in another process, where strings and bytes have other hashes: nothing may depend on them."""
    first = busy_swarm(7)
    ballast = [object() for _ in range(10_000)]  # other addresses in memory, so other hashes of plain objects
    assert busy_swarm(8) != first and len(first) > 100 and ballast
    program = (
        "import hashlib; from tests.testing import test_swarm;"
        "print(hashlib.sha256('\\n'.join(test_swarm.busy_swarm(7)).encode()).hexdigest())"
    )
    other = "1" if os.environ.get("PYTHONHASHSEED") != "1" else "2"
    environment = {**os.environ, "PYTHONHASHSEED": other, "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert done.stdout.strip() == hashlib.sha256("\n".join(first).encode()).hexdigest(), done.stderr
