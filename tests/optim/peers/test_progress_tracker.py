"""The shell of the tracker, from a thread that is not the loop's."""

import logging
import threading
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from swarmcli.dht import DHT
from swarmcli.network.identity import Identity
from swarmcli.optim import ProgressTracker
from tests.optim.optim_swarm import until
from tests.optim.shells import dhts

QUICK: dict[str, Any] = {"min_refresh_period": 0.05, "max_refresh_period": 0.1, "default_refresh_period": 0.1}


def tracker(dht: DHT, **options: Any) -> ProgressTracker:
    return ProgressTracker(dht, "run", 100, start=True, **QUICK | options)


def test_two_trackers_over_tcp() -> None:
    with dhts(2) as (first, second):
        one, other = tracker(first), tracker(second)
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
        assert not one.dropped_reports
        for each in (one, other):
            each.shutdown()
            each.shutdown()
        with pytest.raises(RuntimeError, match="shut down"):
            one.run_in_background()


def test_with_keys_of_their_own_two_trackers_of_one_peer_are_two_peers() -> None:
    with dhts(2) as (first, second):
        key = Ed25519PrivateKey.generate()
        one, two = tracker(first, private_key=key), tracker(first, private_key=Identity.generate())
        watcher = tracker(second)
        assert one.local_progress.peer_id == Identity(key).peer_id
        assert len({one.local_progress.peer_id, two.local_progress.peer_id, bytes(first.peer_id)}) == 3
        one.report_local_progress(0, 30)
        two.report_local_progress(0, 70)
        first.run_coroutine(until(lambda: watcher.global_progress.samples_accumulated == 100))
        assert watcher.global_progress.num_peers == 3
        first.run_coroutine(until(lambda: one.accumulated_enough_samples))
        one.shutdown()
        first.run_coroutine(until(lambda: watcher.global_progress.samples_accumulated == 70))
        for each in (two, watcher):
            each.shutdown()


def test_the_status_is_logged_at_the_level_that_was_asked_for(dht: DHT, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "swarmcli.optim.peers")
    quiet = tracker(dht)
    dht.run_coroutine(quiet._core.refresh())
    assert not caplog.records
    quiet.shutdown()
    loud = tracker(dht, status_loglevel=logging.INFO)
    loud.report_local_progress(0, 30)
    dht.run_coroutine(loud._core.refresh())
    loud.shutdown()
    assert any("run: 30 of 100 samples for epoch 0 from 1 peers" in record.getMessage() for record in caplog.records)


def test_one_that_is_no_daemon_keeps_the_process_until_it_is_shut_down(dht: DHT) -> None:
    keeping = tracker(dht, daemon=False)
    keepers = [each for each in threading.enumerate() if each.name == "swarm-keeps-the-process"]
    assert [each.daemon for each in keepers] == [False]
    keeping.shutdown()
    keepers[0].join(60)
    assert not keepers[0].is_alive()


def test_the_dht_may_end_first() -> None:
    before = threading.enumerate()
    with dhts(1) as (dht,):
        left = tracker(dht)
    left.shutdown()
    assert not [each for each in threading.enumerate() if each.name == "swarm-loop" and each not in before]


@pytest.mark.parametrize(
    ("option", "error"),
    [
        ({"private_key": X25519PrivateKey.generate()}, TypeError),
        ({"status_loglevel": "loud"}, ValueError),
        ({"performance_ema_alpha": 0.0}, ValueError),
        ({"metadata_expiration": 0.0}, ValueError),
        ({"min_refresh_period": 11.0}, ValueError),
        ({"expected_drift_peers": -1}, ValueError),
    ],
)
def test_arguments_that_make_no_sense_are_refused_by_name(dht: DHT, option, error) -> None:
    with pytest.raises(error, match=next(iter(option))):
        tracker(dht, **option)
