"""Progress as peers tell it to each other through the hash table."""

import asyncio
import math

import pytest

from swarmcli.optim.peers.progress import ProgressTrackerCore
from swarmcli.testing import virtual_time
from tests.optim.optim_swarm import nodes


async def started(node, **options) -> ProgressTrackerCore:
    tracker = ProgressTrackerCore(node, "run", 100, **options)
    await tracker.start()
    return tracker


def test_a_peer_learns_that_others_are_ahead() -> None:
    async def main() -> None:
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

    virtual_time.run(main())


def test_rates_are_measured_and_the_end_is_estimated_from_them() -> None:
    async def main() -> None:
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

    virtual_time.run(main())


def test_a_report_speaks_of_the_moment_of_its_count_and_a_repeated_one_of_its_own() -> None:
    async def main() -> None:
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

    virtual_time.run(main())


def test_time_in_which_a_step_runs_does_not_count_as_computing() -> None:
    async def main() -> None:
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

    virtual_time.run(main())
