"""Limits of what a peer sends and receives, in virtual time."""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
import sys
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from benchmarks import _namespaces as namespaces
from swarmcli.errors import EndOfStream
from swarmcli.events import PeerDisconnected
from swarmcli.network import Endpoint, PeerID, Stream
from swarmcli.network.rates import LEAST_RATE, LinkRates
from swarmcli.testing import MemoryNetwork
from tests.simulation import simulated

from .worlds import Number, endpoints

KB = 1000
SECONDS = 10.0


async def pour(peer: Endpoint, to: Endpoint, nbytes: int = 64 * 1024, payloads: int = 1 << 30) -> None:
    """Sends payloads, and waits until they are received."""
    async with peer.stream(to.peer_id, "sink", Number(0), timeout=60) as stream:
        for _ in range(payloads):
            await stream.send(Number(1), bytes(nbytes))
        await stream.finish()
        with contextlib.suppress(EndOfStream):
            await stream.receive(Number)


def sink(peer: Endpoint) -> dict[PeerID, int]:
    """Receives, and counts bytes by sender."""
    received: dict[PeerID, int] = {}

    async def serve(sender: PeerID, request: Number, stream: Stream) -> None:
        memory = memoryview(bytearray(16 << 20))
        with contextlib.suppress(EndOfStream):
            while True:
                _, payload = await stream.receive(Number, lambda message, size: memory[:size])
                received[sender] = received.get(sender, 0) + payload.nbytes

    peer.serve_stream("sink", Number, serve)
    return received


async def over(seconds: float, traffic: Callable[[], int], *streams: Coroutine[Any, Any, None]) -> float:
    """Bytes per second that `traffic` grows by while these streams run."""
    tasks = [asyncio.ensure_future(stream) for stream in streams]
    try:
        await asyncio.sleep(1.0)
        before = traffic()
        await asyncio.sleep(seconds)
        return (traffic() - before) / seconds
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


async def longest_call(caller: Endpoint, target: PeerID, *, many: int = 1) -> float:
    """Seconds of the slowest of so many calls at once."""
    began = asyncio.get_running_loop().time()
    await asyncio.gather(
        *(caller.call(target, "double", Number(each), Number, timeout=60) for each in range(many)),
    )
    return asyncio.get_running_loop().time() - began


@pytest.mark.parametrize(("limit", "upload"), [(10 * KB, True), (10 * KB, False), (300 * KB, True)])
@simulated
async def test_what_passes_in_ten_seconds_keeps_to_the_limit(limit: float, upload: bool) -> None:
    async with endpoints(MemoryNetwork(seed=1), 4) as (limited, *others):
        limited.limit_rates(*((limit, None) if upload else (None, limit)))

        def traffic() -> int:
            passed = limited.statistics().traffic
            return passed.sent if upload else passed.received

        for peer in (limited, *others):
            sink(peer)
        streams = [pour(limited, other) if upload else pour(other, limited) for other in others]
        assert await over(SECONDS, traffic, *streams) == pytest.approx(limit, rel=0.1)


@simulated
async def test_streams_share_alike_and_calls_do_not_wait_for_them() -> None:
    async with endpoints(MemoryNetwork(seed=2), 5) as (limited, *others):
        limited.limit_rates(200 * KB, 200 * KB)
        received = sink(limited)
        for other in others:
            sink(other)

        async def slowest_call() -> float:
            worst = 0.0
            for _ in range(20):
                worst = max(worst, await longest_call(others[0], limited.peer_id))
                await asyncio.sleep(0.1)
            return worst

        alone = await slowest_call()
        calls: list[float] = []

        async def call() -> None:
            calls.append(await slowest_call())
            await asyncio.Event().wait()

        both_ways = [*(pour(other, limited) for other in others), *(pour(limited, other) for other in others)]
        await over(SECONDS, lambda: 0, *both_ways, call())
        assert calls[0] < 2 * alone
        assert min(received.values()) > 0.8 * max(received.values())


@simulated
async def test_a_limit_may_change_while_streams_run() -> None:
    async with endpoints(MemoryNetwork(seed=3, bandwidth=1000 * KB), 2) as (limited, other):
        sink(other)
        stream = asyncio.ensure_future(pour(limited, other, 16 << 20))  # one payload outlasts several limits
        loop = asyncio.get_running_loop()
        for limit, expected in ((100, 100), (20, 20), (400, 400), (None, 1000), (50, 50)):
            limited.limit_rates(limit and limit * KB, None)
            await asyncio.sleep(2.0)  # what was under way has arrived
            before, began = limited.passed().sent, loop.time()
            await asyncio.sleep(5.0)
            seen = (limited.passed().sent - before) / (loop.time() - began)
            assert seen == pytest.approx(expected * KB, rel=0.1)
        stream.cancel()
        await asyncio.wait([stream])


@pytest.mark.parametrize("rate", [0.0, -1.0, 4_999.0, float("nan"), float("inf")])
@simulated
async def test_what_no_peer_can_live_with_is_refused(rate: float) -> None:
    rates = LinkRates()
    rates.change(LEAST_RATE, None)
    for upload, download in ((rate, None), (None, rate)):
        with pytest.raises(ValueError, match="pause the peer"):
            rates.change(upload, download)
    assert rates.upload.limit == LEAST_RATE and rates.download.limit is None and rates.lower == LEAST_RATE


@simulated
async def test_calls_beside_a_full_link_are_answered_within_seconds_and_nobody_is_lost() -> None:
    """10 kB/s each way, and four streams of it: 1.6 MB take minutes."""
    network = MemoryNetwork(seed=1, latency=0.02)
    async with endpoints(network, 3) as peers:
        lost: list[PeerDisconnected] = []
        for peer in peers:
            sink(peer)
            peer.events.subscribe(lambda event: lost.append(event) if isinstance(event, PeerDisconnected) else None)
            network.set_bandwidth(peer.peer_id, 10e3)
        first, *others = peers
        began = asyncio.get_running_loop().time()
        pouring = [asyncio.create_task(pour(first, other, 100 * KB, 4)) for other in others for _ in range(2)]
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


@simulated
async def test_a_limit_that_changes_all_the_time_is_kept_all_the_same() -> None:
    """Bytes that have passed in advance under the old rate are still owed under the new one."""
    async with endpoints(MemoryNetwork(seed=4), 2) as (limited, other):
        sink(other)

        async def change() -> None:
            while True:
                for limit in (100 * KB, 101 * KB):
                    limited.limit_rates(limit, None)
                    await asyncio.sleep(0.02)

        passed = await over(SECONDS, lambda: limited.passed().sent, pour(limited, other), change())
        assert passed == pytest.approx(100 * KB, rel=0.1)
