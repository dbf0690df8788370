"""The shell of the tracker, from a thread that is not the loop's."""

import pytest

from swarmcli.optim import ProgressTracker
from tests.optim.optim_swarm import until
from tests.optim.shells import dhts


def test_two_trackers_over_tcp() -> None:
    with dhts(2) as (first, second):
        options = {"start": True, "min_refresh_period": 0.05, "max_refresh_period": 0.1, "default_refresh_period": 0.1}
        one, other = (ProgressTracker(dht, "run", 100, **options) for dht in (first, second))
        one.report_local_progress(0, 30)
        other.report_local_progress(0, 70)
        first.run_coroutine(until(lambda: one.accumulated_enough_samples))
        assert one.accumulated_enough_samples
        assert one.ready_to_update_epoch
        assert one.global_progress.num_peers == 2
        assert one.local_progress.samples_accumulated == 30
        with one.pause_updates():
            assert one.update_epoch() == 1
        assert (one.global_epoch, one.local_progress.samples_accumulated) == (1, 0)
        with pytest.raises(RuntimeError, match="pause_updates"):
            one.update_epoch()
        with pytest.raises(RuntimeError, match="already"):
            one.run_in_background()
        assert one.performance_ema.samples_per_second >= 0
        assert one.estimated_next_update_time > 0
        for tracker in (one, other):
            tracker.shutdown()
            tracker.shutdown()
