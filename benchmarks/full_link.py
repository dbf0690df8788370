"""Small calls beside a full uplink.

Three processes behind links of the same speed (network namespaces with tbf; see _namespaces.py) send each other bulk
data, all at once as in a round, and call each other twice a second meanwhile. Printed, as JSON, is how long the calls
took, and who took whom for lost.

    python -m benchmarks.full_link MBIT MEGABYTES [MILLISECONDS OF THE ROUTER'S QUEUE] [CONGESTION CONTROL]
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import statistics
import sys
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection as Pipe
from pathlib import Path

import msgspec

from benchmarks import _namespaces as namespaces
from swarmcli.errors import CallError, ConnectionLost, EndOfStream, NetworkError
from swarmcli.events import PeerDisconnected
from swarmcli.network import Endpoint, Identity, PeerID
from swarmcli.network.streams.stream import Stream
from swarmcli.network.transports.tcp import TCPTransport

PEERS = 3
PERIOD = 0.5  # seconds between two calls to a peer
PATIENCE = 30.0  # seconds that a call may take at most
CHUNK = 256 << 10  # bytes in a message of bulk data


class Empty(msgspec.Struct, frozen=True):
    """A small question, and its answer."""


async def answer(peer: PeerID, request: Empty) -> Empty:
    return request


async def swallow(peer: PeerID, request: Empty, stream: Stream) -> None:
    while True:
        try:
            await stream.receive(Empty)
        except EndOfStream:
            return


async def pour(endpoint: Endpoint, peer: PeerID, nbytes: int) -> None:
    async with endpoint.stream(peer, "swallow", Empty(), timeout=PATIENCE) as stream:
        for _ in range(0, nbytes, CHUNK):
            await stream.send(Empty(), [bytes(CHUNK)])
        await stream.finish()
        try:
            await stream.receive(Empty)
        except EndOfStream:
            return


async def call(endpoint: Endpoint, peer: PeerID, took: list[float], failed: list[str]) -> None:
    while True:
        began = time.perf_counter()
        try:
            await endpoint.call(peer, "answer", Empty(), Empty, timeout=PATIENCE)
        except (CallError, NetworkError) as error:
            failed.append(str(error))
        took.append(time.perf_counter() - began)
        await asyncio.sleep(PERIOD)


async def take_part(pipe: Pipe, index: int, host: str, nbytes: int) -> None:
    endpoint = Endpoint(TCPTransport(Identity.from_seed(b"%d" % index), host=host))
    lost: list[str] = []
    endpoint.events.subscribe(lambda event: lost.append(event.reason) if isinstance(event, PeerDisconnected) else None)
    endpoint.serve("answer", Empty, answer)
    endpoint.serve_stream("swallow", Empty, swallow)
    await endpoint.start()
    pipe.send((endpoint.peer_id.text, endpoint.addresses))
    for text, addresses in await asyncio.to_thread(pipe.recv):
        endpoint.learn(PeerID.parse(text), addresses)
    others = [peer for peer in map(PeerID.parse, await asyncio.to_thread(pipe.recv)) if peer != endpoint.peer_id]
    took: list[float] = []
    failed: list[str] = []
    calls = [asyncio.create_task(call(endpoint, peer, took, failed)) for peer in others]
    watches = [endpoint.lost(peer) for peer in endpoint.connected()]
    began = time.perf_counter()
    try:
        await asyncio.gather(*(pour(endpoint, peer, nbytes // len(others)) for peer in others))
    except ConnectionLost as error:
        failed.append(f"the stream: {error}")
    seconds = time.perf_counter() - began
    pipe.send((seconds, took, list(lost), failed))
    await asyncio.to_thread(pipe.recv)
    for task in (*calls, *watches):
        task.cancel()
    await endpoint.close()


def run_peer(pipe: Pipe, index: int, mbit: float, nbytes: int, queue: int, congestion: str) -> None:
    host = namespaces.settle(pipe, index, mbit, queue)
    if congestion:
        Path("/proc/sys/net/ipv4/tcp_congestion_control").write_text(congestion)
    asyncio.run(take_part(pipe, index, host, nbytes))


def measure(mbit: float, megabytes: float, queue: int = namespaces.QUEUE, congestion: str = "") -> None:
    namespaces.make_bridge()
    context = multiprocessing.get_context("spawn")
    pipes, processes = [], []
    for index in range(PEERS):
        mine, theirs = context.Pipe()
        process = context.Process(
            target=run_peer, args=(theirs, index, mbit, int(megabytes * 1e6), queue, congestion), daemon=True
        )
        process.start()
        pipes.append(mine)
        processes.append(process)
    for index, pipe in enumerate(pipes):
        namespaces.connect(pipe.recv(), index, mbit, queue)
        pipe.send("connected")
    places = [pipe.recv() for pipe in pipes]
    for message in (places, [text for text, _ in places]):
        for pipe in pipes:
            pipe.send(message)
    results = [pipe.recv() for pipe in pipes]
    for pipe in pipes:
        pipe.send("end")
    for process in processes:
        process.join()
    took = sorted(seconds for _, calls, _, _ in results for seconds in calls)
    print(
        json.dumps(
            {
                "seconds": round(max(seconds for seconds, *_ in results), 1),
                "calls": len(took),
                "median": round(statistics.median(took), 3),
                "p99": round(took[int(0.99 * (len(took) - 1))], 3),
                "longest": round(took[-1], 3),
                "lost": [reason for _, _, lost, _ in results for reason in lost],
                "failed": [reason for *_, failed in results for reason in failed],
            }
        )
    )


def main(arguments: Sequence[str] = ("10", "25")) -> int:
    if not namespaces.inside():
        return namespaces.rerun_inside("benchmarks.full_link", arguments)
    mbit, megabytes, *rest = arguments
    measure(float(mbit), float(megabytes), int(rest[0]) if rest else namespaces.QUEUE, *rest[1:])
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
