"""Small calls beside a link that bulk data keep full for minutes: nobody is taken for dead, and no call waits long."""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
import sys

import pytest

from benchmarks import _namespaces as namespaces
from swarmcli.errors import EndOfStream
from swarmcli.events import PeerDisconnected
from swarmcli.network import Endpoint, PeerID, Stream
from swarmcli.testing import MemoryNetwork
from tests.simulation import simulated

from .worlds import Number, endpoints


async def swallow(peer: PeerID, request: Number, stream: Stream) -> None:
    with contextlib.suppress(EndOfStream):
        while True:
            await stream.receive(Number)


async def pour(source: Endpoint, target: PeerID, pieces: int) -> None:
    async with source.stream(target, "swallow", Number(0), timeout=60) as stream:
        for _ in range(pieces):
            await stream.send(Number(0), [bytes(100_000)])
        await stream.finish()
        with contextlib.suppress(EndOfStream):
            await stream.receive(Number)


async def longest_call(caller: Endpoint, target: PeerID, *, many: int = 1) -> float:
    """Seconds of the slowest of so many calls at once."""
    began = asyncio.get_running_loop().time()
    await asyncio.gather(
        *(caller.call(target, "double", Number(each), Number, timeout=60) for each in range(many)),
    )
    return asyncio.get_running_loop().time() - began


@simulated
async def test_calls_beside_a_full_link_are_answered_within_seconds_and_nobody_is_lost() -> None:
    """10 kB/s each way, and four streams of it: 1.6 MB take minutes."""
    network = MemoryNetwork(seed=1, latency=0.02)
    async with endpoints(network, 3) as peers:
        lost: list[PeerDisconnected] = []
        for peer in peers:
            peer.serve_stream("swallow", Number, swallow)
            peer.events.subscribe(lambda event: lost.append(event) if isinstance(event, PeerDisconnected) else None)
            network.set_bandwidth(peer.peer_id, 10e3)
        first, *others = peers
        began = asyncio.get_running_loop().time()
        pouring = [asyncio.create_task(pour(first, other.peer_id, 4)) for other in others for _ in range(2)]
        took = []
        while not all(task.done() for task in pouring):
            took.append(await longest_call(first, others[0].peer_id, many=10))
            took.append(await longest_call(others[1], first.peer_id))
        await asyncio.gather(*pouring)
        assert asyncio.get_running_loop().time() - began > 120
        assert max(took) < 3, max(took)
        assert not lost


@pytest.mark.e2e
@pytest.mark.parametrize(
    ("mbit", "megabytes"),
    [pytest.param(10, 10, id="some seconds"), pytest.param(10, 344, id="minutes", marks=pytest.mark.soak)],
)
def test_behind_real_links_that_are_full_nobody_is_lost(mbit: int, megabytes: int) -> None:
    if not namespaces.permitted():
        pytest.skip("this system makes no network namespaces with shaped links")
    command = [sys.executable, "-m", "benchmarks.full_link", str(mbit), str(megabytes)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=550)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert not found["lost"] and not found["failed"], found
