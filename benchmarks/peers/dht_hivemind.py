"""hivemind's side of benchmarks/dht.py: prints the seconds as one line of JSON. Runs in .venv-peers."""

from __future__ import annotations

import asyncio
import json
import random
import sys
import time
from uuid import uuid4

from hivemind.dht.node import DHTNode
from hivemind.utils.timed_storage import get_dht_time


async def worker(nodes: list[DHTNode], rounds: int, writers: int, chooser: random.Random) -> int:
    found = 0
    for _ in range(rounds):
        key = uuid4().hex
        expiration = get_dht_time() + 300
        subkeys = [uuid4().hex for _ in range(writers)]
        stored = await asyncio.gather(
            *(
                node.store(key, index, expiration, subkey=subkey)
                for index, (node, subkey) in enumerate(zip(chooser.sample(nodes, writers), subkeys, strict=True))
            )
        )
        assert all(stored), "a store failed"
        results = await asyncio.gather(*(node.get(key, latest=True) for node in chooser.sample(nodes, writers)))
        found += sum(result is not None and len(result.value) == writers for result in results)
    return found


async def main(peers: int, workers: int, rounds: int, writers: int) -> None:
    nodes = [await DHTNode.create()]
    contact = await nodes[0].get_visible_maddrs()
    nodes += [await DHTNode.create(initial_peers=contact) for _ in range(peers - 1)]
    begun = time.perf_counter()
    found = await asyncio.gather(*(worker(nodes, rounds, writers, random.Random(n)) for n in range(workers)))
    seconds = time.perf_counter() - begun
    print(json.dumps({"seconds": seconds, "complete": sum(found), "reads": workers * rounds * writers}), flush=True)
    await asyncio.gather(*(node.shutdown() for node in nodes))


if __name__ == "__main__":
    asyncio.run(main(*(int(argument) for argument in sys.argv[1:5])))
