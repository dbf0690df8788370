"""What following the swarm's progress costs on the wire; docs/progress.md shows these figures."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import pytest

from swarmcli.dht import DHTNode
from swarmcli.optim.peers.progress import ProgressTrackerCore
from swarmcli.testing import virtual_time
from tests.optim.optim_swarm import nodes, together
from tests.suites import soak

EPOCH = 10.0  # seconds
EPOCHS = 3
STEP = 0.25  # seconds between two local steps of a peer


@dataclass(frozen=True)
class Cost:
    """What one peer sends and receives in one epoch, beyond what the network needs by itself."""

    messages: float  # calls and their answers
    bytes: float


def counted(peers: list[DHTNode]) -> Cost:
    statistics = [node.endpoint.statistics() for node in peers]
    return Cost(sum(2 * each.calls_made for each in statistics), sum(each.traffic.sent for each in statistics))


async def train(tracker: ProgressTrackerCore, first: int, last: int) -> None:
    """Local steps of one sample each at an even pace; the epoch ends for all at the same time."""
    steps = round(EPOCH / STEP)
    for epoch in range(first, last):
        for step in range(steps):
            await asyncio.sleep(STEP)
            tracker.report_local_progress(epoch, step + 1)
        with tracker.pause_updates():
            tracker.update_epoch(epoch + 1)


async def measure(count: int, tracking: bool) -> Cost:
    async with nodes(count) as peers:
        target = round(EPOCH / STEP) * count
        trackers = [ProgressTrackerCore(node, "run", target) for node in peers] if tracking else []
        await together(*(tracker.start() for tracker in trackers))
        await together(*(train(tracker, 0, 1) for tracker in trackers), asyncio.sleep(EPOCH))
        before = counted(peers)
        work = [train(tracker, 1, 1 + EPOCHS) for tracker in trackers]
        await together(*work, asyncio.sleep(EPOCHS * EPOCH))
        after = counted(peers)
        for tracker in trackers:
            await tracker.shutdown()
        shares = count * EPOCHS
        return Cost((after.messages - before.messages) / shares, (after.bytes - before.bytes) / shares)


# peers → at most so many messages and bytes of one peer in an epoch of ten seconds
BUDGET = {2: (30, 10_000), 8: (75, 58_000), 32: (80, 172_000)}


@pytest.mark.parametrize("count", [2, *soak([8, 32])])
def test_traffic_per_peer_and_epoch(count) -> None:
    with_trackers = virtual_time.run(measure(count, tracking=True), seed=1)
    without = virtual_time.run(measure(count, tracking=False), seed=1)
    cost = Cost(with_trackers.messages - without.messages, with_trackers.bytes - without.bytes)
    messages, volume = BUDGET[count]
    assert cost.messages <= messages and cost.bytes <= volume, cost
