"""A run on the memory network follows from its seed alone."""

from __future__ import annotations

import asyncio
import hashlib
import os
import subprocess
import sys
from pathlib import Path

from swarmcli.errors import EndOfStream, NetworkError
from swarmcli.events import Event
from swarmcli.network import Endpoint, PeerID, Stream
from swarmcli.testing import MemoryNetwork, virtual_time
from tests.network.worlds import Number, endpoints


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
        for turn in range(10):
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
    assert busy_swarm(8) != first and len(first) > 200 and ballast
    program = (
        "import hashlib; from tests.testing import test_reproducible;"
        "print(hashlib.sha256('\\n'.join(test_reproducible.busy_swarm(7)).encode()).hexdigest())"
    )
    other = "1" if os.environ.get("PYTHONHASHSEED") != "1" else "2"
    environment = {**os.environ, "PYTHONHASHSEED": other, "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert done.stdout.strip() == hashlib.sha256("\n".join(first).encode()).hexdigest(), done.stderr
