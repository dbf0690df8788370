"""Progress as peers tell it to each other through the hash table."""

import asyncio
import math
from typing import Any

import msgspec
import pytest

from swarmcli.dht import DHTNode
from swarmcli.dht.records import Record, encode_subkey, key_id
from swarmcli.network.identity import Identity
from swarmcli.optim.peers.progress import ProgressTrackerCore
from tests.optim.optim_swarm import nodes
from tests.simulation import simulated


async def started(node: DHTNode, *, report: bool = True) -> ProgressTrackerCore:
    tracker = ProgressTrackerCore(node, "run", 100)
    await tracker.start(report=report)
    return tracker


@simulated
async def test_a_peer_learns_that_others_are_ahead() -> None:
    async with nodes(2) as peers:
        ahead, behind = [await started(node) for node in peers]
        with ahead.pause_updates():
            assert ahead.update_epoch() == 1
        assert not behind.ready_to_update_epoch
        await asyncio.sleep(15)
        assert behind.global_epoch == 1
        assert behind.ready_to_update_epoch
        assert behind.estimated_next_update_time <= peers[1].endpoint.clock.now()
        assert (behind.seconds_to_round, ahead.seconds_to_round) == (0.0, math.inf)  # no rate is known
        assert behind.local_progress.epoch == 0
        await ahead.shutdown()
        await behind.shutdown()


@simulated
async def test_rates_are_measured_and_the_end_is_estimated_from_them() -> None:
    async with nodes(2) as peers:
        trackers = [await started(node) for node in peers]
        for step in range(1, 5):
            await asyncio.sleep(1)
            for tracker in trackers:
                tracker.report_local_progress(0, 2 * step)
        await asyncio.sleep(10)
        for tracker in trackers:
            assert tracker.performance_ema.samples_per_second == pytest.approx(2.0)
            eta = tracker.global_progress.eta_next_epoch - peers[0].endpoint.clock.now()
            assert 10 < eta < 25  # 16 of 100 samples are reported, 4 more come each second
            alone = tracker.seconds_to_round  # of which the other one computes 2
            assert alone == pytest.approx((100 - sum(s for s, _ in tracker.expected().values())) / 2.0)
            assert alone > 1.5 * eta
        for tracker in trackers:
            await tracker.shutdown()


@simulated
async def test_a_report_speaks_of_the_moment_of_its_count_and_a_repeated_one_of_its_own() -> None:
    async with nodes(2) as peers:
        one, other = [await started(node) for node in peers]
        await asyncio.sleep(0.1)  # the first report has just gone out, the next has to wait
        one.report_local_progress(0, 10)
        counted = one.local_progress.time
        await asyncio.sleep(12)
        (report,) = other.reports
        assert (report.samples_accumulated, report.time) == (10, counted)
        await asyncio.sleep(40)
        (report,) = other.reports
        assert (report.samples_accumulated, report.time > counted + 20) == (10, True)
        await one.shutdown()
        await other.shutdown()


@simulated
async def test_time_in_which_a_step_runs_does_not_count_as_computing() -> None:
    async with nodes(1) as peers:
        tracker = await started(peers[0])
        await asyncio.sleep(1)
        tracker.report_local_progress(0, 4)
        with tracker.pause_updates():
            await asyncio.sleep(100)
            tracker.update_epoch()
        await asyncio.sleep(1)
        tracker.report_local_progress(1, 4)
        assert tracker.performance_ema.samples_per_second == pytest.approx(4.0)
        await tracker.shutdown()


# What of the others' reports counts

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
    """Waits until the reports are read, and asserts that nothing came of them. Returns how many were dropped."""
    await asyncio.sleep(12)
    assert tracker.global_epoch == 0
    assert tracker.global_progress.samples_accumulated == 0
    assert tracker.global_progress.num_peers == 1
    await tracker.refresh()
    counted = tracker.dropped_reports
    await asyncio.sleep(12)
    assert tracker.dropped_reports == counted, "what is not news is not counted again"
    return counted


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
@simulated
async def test_a_report_that_is_wrong_in_one_way_changes_nothing(change, is_counted: bool) -> None:
    async with nodes(2) as (victim, liar):
        tracker = await started(victim, report=False)
        await put(liar, report_of(liar, **change))
        assert (await after_looking(tracker) > 0) == is_counted
        await tracker.shutdown()


@simulated
async def test_reports_that_another_signed_or_nobody_are_counted() -> None:
    """The forger is itself a replica of the key, so no other node's checks stand in its way."""
    async with nodes(2) as (victim, liar):
        tracker = await started(victim, report=False)
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
