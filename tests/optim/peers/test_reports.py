"""What of the others' reports counts, and what is counted instead."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest

from swarmcli.dht import DHTNode
from swarmcli.dht.records import Record, encode_subkey, key_id
from swarmcli.network.identity import Identity
from swarmcli.optim.peers.progress import ProgressTrackerCore
from swarmcli.testing import virtual_time
from tests.optim.optim_swarm import nodes

KEY = "run_progress"


def report_of(node: DHTNode, **change: Any) -> dict[str, Any]:
    """A good report, as it is stored."""
    return {
        "peer_id": bytes(node.peer_id),
        "epoch": 0,
        "samples_accumulated": 10,
        "samples_per_second": 1.0,
        "time": node.endpoint.clock.now(),
        "client_mode": False,
    } | change


async def put(node: DHTNode, value: dict[str, Any], *, seconds: float = 60.0) -> None:
    await node.store(KEY, value, node.endpoint.clock.now() + seconds, node.own_subkey())


async def after_looking(tracker: ProgressTrackerCore) -> int:
    """How many were counted, once the reports have been read and nothing came of them."""
    await asyncio.sleep(12)
    assert tracker.global_epoch == 0
    assert tracker.global_progress.samples_accumulated == 0
    assert tracker.global_progress.num_peers == 1
    await tracker.refresh()
    counted = tracker.dropped_reports
    await asyncio.sleep(12)
    assert tracker.dropped_reports == counted, "what is not news is not counted again"
    return counted


async def tracking(node: DHTNode) -> ProgressTrackerCore:
    tracker = ProgressTrackerCore(node, "run", 100)
    await tracker.start(report=False)
    return tracker


@pytest.mark.parametrize(
    ("change", "is_counted"),
    [
        ({"epoch": -3}, True),
        ({"epoch": 1 << 48}, True),
        ({"samples_per_second": float("inf")}, True),
        ({"peer_id": bytes(32)}, False),
        ({"time": 4e9, "epoch": 9}, False),
        ({"time": 1e9, "epoch": 9}, False),
    ],
)
def test_a_report_that_is_wrong_in_one_way_changes_nothing(change, is_counted: bool) -> None:
    async def main() -> None:
        async with nodes(2) as (victim, liar):
            tracker = await tracking(victim)
            await put(liar, report_of(liar, **change))
            assert (await after_looking(tracker) > 0) == is_counted
            await tracker.shutdown()

    virtual_time.run(main())


def test_reports_that_another_signed_or_nobody_are_counted() -> None:
    """The forger is itself a replica of the key, so no other node's checks stand in its way."""

    async def main() -> None:
        async with nodes(2) as (victim, liar):
            tracker = await tracking(victim)
            await put(liar, report_of(liar, epoch=9), seconds=600.0)
            (own,) = liar.core.storage.records(key_id(KEY))
            await victim.withdraw(KEY, victim.own_subkey())
            storage, now = liar.core.storage, liar.core.now()
            stolen = victim.own_subkey(identity=Identity.from_seed(77))
            for subkey, signature in ((stolen, own.signature), (stolen, b"")):
                record = msgspec.structs.replace(own, subkey=encode_subkey(subkey), signature=signature)
                storage.put(msgspec.structs.replace(record, sequence=own.sequence + len(signature)), now)
            storage.put(Record(KEY, encode_subkey("nobody's"), own.value, own.expiration), now)
            await liar.withdraw(KEY, liar.own_subkey())
            assert await after_looking(tracker) >= 2
            await tracker.shutdown()

    virtual_time.run(main())
