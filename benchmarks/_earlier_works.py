"""The work that `earlier.py` lets two versions of this project do: it may use nothing that the older of them lacks."""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
import time
from pathlib import Path

import msgspec
import torch

from swarmcli.averaging import AveragerConfig, AveragerCore, RoundRequest
from swarmcli.clock import Clock
from swarmcli.dht import DHTNode
from swarmcli.events import EpochAdvanced, EpochReported, RoundFinished
from swarmcli.journal import Journal, RunRecord
from swarmcli.network import Endpoint, Identity
from swarmcli.network.transports.tcp.transport import TCPTransport

PEERS, CALLS, RECORDS, EPOCHS = 4, 3000, 200, 250  # the journal takes 8,192 reports at once


class Ping(msgspec.Struct, frozen=True):
    data: bytes


async def nodes(count: int) -> list[DHTNode]:
    made: list[DHTNode] = []
    for _ in range(count):
        endpoint = Endpoint(TCPTransport(Identity.generate(), host="127.0.0.1"), clock=Clock())
        await endpoint.start()
        made.append(await DHTNode.create(endpoint, initial_peers=made[0].endpoint.addresses if made else ()))
    return made


async def calls() -> dict[str, tuple[float, float]]:
    first, second = await nodes(2)
    second.endpoint.serve("echo", Ping, _echo)
    began = time.perf_counter(), time.process_time()
    for _ in range(CALLS):
        await first.endpoint.call(second.peer_id, "echo", Ping(b"x" * 64), Ping, timeout=10)
    spent = _since(began)
    for node in (first, second):
        await node.shutdown()
    return {f"{CALLS} calls": spent}


async def _echo(peer: bytes, request: Ping) -> Ping:
    return request


async def stores() -> dict[str, tuple[float, float]]:
    made = await nodes(8)
    end = made[0].endpoint.clock.now() + 600
    began = time.perf_counter(), time.process_time()
    for number in range(RECORDS):
        await made[number % 8].store(f"key {number}", number, end)
        await made[(number + 3) % 8].get(f"key {number}")
    spent = _since(began)
    for node in made:
        await node.shutdown()
    return {f"{RECORDS} stores and gets, 8 nodes": spent}


async def rounds(mebibytes: int, count: int) -> dict[str, tuple[float, float]]:
    made = await nodes(PEERS)
    cores = [
        AveragerCore([torch.full((mebibytes << 18,), float(number))], node, AveragerConfig(prefix="round"))
        for number, node in enumerate(made)
    ]
    for core in cores:
        await core.start()
    for turn in range(count + 1):  # the first round, in which the peers meet, is not counted
        if turn == 1:
            began = time.perf_counter(), time.process_time()
        for control in [core.begin_round(RoundRequest()) for core in cores]:
            await control
    spent = _since(began)
    for core, node in zip(cores, made, strict=True):
        await core.shutdown()
        await node.shutdown()
    return {f"round of {mebibytes} MiB, {PEERS} peers": (spent[0] / count, spent[1] / count)}


def journal() -> dict[str, tuple[float, float]]:
    """Writes the rows of a peer with 29 others around it, and the sums that the journal makes of them."""
    peers = [Identity.generate().peer_id.text for _ in range(30)]
    with tempfile.TemporaryDirectory() as directory:
        run = RunRecord("journal", "trainer", peers[0])
        with Journal(Path(directory, "journal.sqlite"), run=run, clock=time.time) as kept:
            kept.flush(60)
            began = time.perf_counter(), time.process_time()
            for number in range(EPOCHS):
                kept.record(EpochAdvanced(number, "ab" * 32, 4096, 128, 30, 2.5, 8.0, 0.3))
                kept.record(RoundFinished(
                    "ab" * 32, "journal.grads", "committed", "", number, peers[0], tuple(peers), tuple(peers),
                    {peers[3]: "no part arrived for 4.0 s"}, 40_000_000, 39_000_000, {"running all-reduce": 0.4},
                ))  # fmt: skip
                for peer in peers:
                    kept.record(EpochReported(peer, number, 2.5, 4096, 12.5))
            assert kept.flush(600)
            return {f"journal of {EPOCHS} epochs, {len(peers)} peers": _since(began)}


def _since(began: tuple[float, float]) -> tuple[float, float]:
    return time.perf_counter() - began[0], time.process_time() - began[1]


async def main() -> None:
    spent = await calls() | await stores() | await rounds(1, 20) | await rounds(64, 3) | journal()
    json.dump(spent, sys.stdout)


if __name__ == "__main__":
    torch.set_num_threads(1)
    asyncio.run(main())
