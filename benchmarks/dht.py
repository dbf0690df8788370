"""The hash table beside hivemind's: 32 peers in one process over encrypted TCP, four workers.

Each worker does 16 times: 8 peers store a subkey each under a new key, then 8 peers read the key with latest=True.
And: how long a peer takes from its start to its first answered call.

    python -m benchmarks.dht [--profile]
"""

from __future__ import annotations

import asyncio
import cProfile
import json
import os
import pstats
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from uuid import uuid4

from swarmcli.dht import DHT, DHTNode
from swarmcli.network.endpoint import Endpoint
from swarmcli.network.identity import Identity
from swarmcli.network.transports.tcp.transport import TCPTransport

PEERS, WORKERS, ROUNDS, WRITERS = 32, 4, 16, 8
TARGET = 0.1  # of hivemind's time
STARTS = 10
PROCESSES = 5
_HERE = Path(__file__).parent
_PEERS_PYTHON = _HERE.parent / ".venv-peers" / "bin" / "python"


async def make_node(initial_peers: list[str]) -> DHTNode:
    endpoint = Endpoint(TCPTransport(Identity.generate(), host="127.0.0.1"))
    await endpoint.start()
    return await DHTNode.create(endpoint, initial_peers=initial_peers)


async def worker(nodes: list[DHTNode], chooser: random.Random) -> int:
    """Returns how many reads saw all subkeys."""
    complete = 0
    for _ in range(ROUNDS):
        key = uuid4().hex
        expiration = nodes[0].endpoint.clock.now() + 300
        stored = await asyncio.gather(
            *(
                node.store(key, index, expiration, subkey=uuid4().hex)
                for index, node in enumerate(chooser.sample(nodes, WRITERS))
            )
        )
        if not all(stored):
            raise RuntimeError("a store failed")
        found = await asyncio.gather(*(node.get(key, latest=True) for node in chooser.sample(nodes, WRITERS)))
        complete += sum(result is not None and len(result.value) == WRITERS for result in found)
    return complete


async def measure(profile: bool) -> tuple[float, float]:
    """Seconds of the work, and seconds of one start to the first answered call (the median of some)."""
    nodes = [await make_node([])]
    contact = f"{nodes[0].endpoint.addresses[0]}/{nodes[0].peer_id.text}"
    for _ in range(PEERS - 1):
        nodes.append(await make_node([contact]))
    profiler = cProfile.Profile()
    if profile:
        profiler.enable()
    begun = time.perf_counter()
    complete = await asyncio.gather(*(worker(nodes, random.Random(number)) for number in range(WORKERS)))
    seconds = time.perf_counter() - begun
    if profile:
        profiler.disable()
        pstats.Stats(profiler).sort_stats("tottime").print_stats(40)
    if sum(complete) != WORKERS * ROUNDS * WRITERS:
        raise RuntimeError(f"only {sum(complete)} reads were complete")
    calls = sum(node.endpoint.statistics().calls_made for node in nodes)
    print(f"  calls of all peers, joining included: {calls}")
    starts = []
    for _ in range(STARTS):
        begun = time.perf_counter()
        node = await make_node([contact])
        await node.get("anything", latest=True)
        starts.append(time.perf_counter() - begun)
        await node.shutdown()
    for node in nodes:
        await node.shutdown()
    return seconds, statistics.median(starts)


_START = """
import time, torch
begun = time.perf_counter()
from swarmcli.dht import DHT
with DHT([{address!r}], start=True, host="127.0.0.1") as dht:
    dht.get("anything", latest=True)
    print(time.perf_counter() - begun)
"""


def measure_start() -> float:
    """Seconds from an imported torch to the first answered call, in a process of its own; the median of some."""
    # As installed: with bytecode from an earlier run, which the first process leaves behind.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    runs = []
    with tempfile.TemporaryDirectory() as bytecode, DHT(start=True, host="127.0.0.1") as first:
        environment["PYTHONPYCACHEPREFIX"] = bytecode
        command = [sys.executable, "-c", _START.format(address=first.get_visible_addresses()[0])]
        for _ in range(1 + PROCESSES):
            runs.append(subprocess.run(command, env=environment, check=True, capture_output=True, text=True))
    return statistics.median(float(run.stdout) for run in runs[1:])


def measure_hivemind() -> float | None:
    """Seconds of the same work; None if `make bench-peers` has not been run."""
    if not _PEERS_PYTHON.exists():
        return None
    arguments = [str(number) for number in (PEERS, WORKERS, ROUNDS, WRITERS)]
    command = [str(_PEERS_PYTHON), str(_HERE / "peers" / "dht_hivemind.py"), *arguments]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=600)
    result = json.loads(done.stdout.strip().splitlines()[-1])
    print(f"  hivemind: {result['complete']} of {result['reads']} reads saw every subkey")
    return float(result["seconds"])


def main() -> None:
    print(f"DHT: {PEERS} peers, {WORKERS} workers × {ROUNDS} × ({WRITERS} stores, {WRITERS} latest gets), TCP with TLS")
    ours, start = asyncio.run(measure("--profile" in sys.argv))
    theirs = measure_hivemind()
    print(f"  swarm    {ours:7.2f} s")
    if theirs is None:
        print("  hivemind not measured: run `make bench-peers` first")
    else:
        print(f"  hivemind {theirs:7.2f} s")
        print(f"  ratio    {ours / theirs:7.3f}   (target: at most {TARGET})")
    print(f"  start of a peer in a network of {PEERS}, to its first answered call: {start * 1000:.0f} ms")
    print(f"  a process of its own, beyond importing torch: {measure_start() * 1000:.0f} ms   (target: at most 100)")


if __name__ == "__main__":
    main()
