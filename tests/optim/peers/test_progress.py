"""The arithmetic of progress, as tables."""

import math

import pytest
from pydantic import ValidationError

from swarmcli.optim.config import RefreshOptions
from swarmcli.optim.peers.progress import (
    FAR_AHEAD,
    LONGEST_DRAWN,
    LocalTrainingProgress,
    PerformanceEMA,
    borne_out,
    estimate_global_progress,
    expected_samples,
)

NOW = 1000.0
OPTIONS = RefreshOptions()


def report(
    peer: int, epoch: int, samples: int, rate: float = 0.0, *, age: float = 0.0, client: bool = False
) -> LocalTrainingProgress:
    return LocalTrainingProgress(
        peer_id=bytes([peer]) * 32,
        epoch=epoch,
        samples_accumulated=samples,
        samples_per_second=rate,
        time=NOW - age,
        client_mode=client,
    )


@pytest.mark.parametrize(
    ("others", "local", "epoch", "samples", "peers", "clients"),
    [
        pytest.param([], report(1, 3, 5), 3, 5, 1, 0, id="alone: own progress"),
        pytest.param([report(2, 3, 7)], report(1, 3, 5), 3, 12, 2, 0, id="two at one epoch"),
        pytest.param([report(2, 4, 7)], report(1, 3, 5), 4, 7, 2, 0, id="a listening peer is ahead"),
        pytest.param([report(2, 4, 7, client=True)], report(1, 3, 5), 3, 5, 2, 1, id="a client ahead counts not"),
        pytest.param([report(2, 2, 7)], report(1, 3, 5), 3, 5, 2, 0, id="a peer behind adds no samples"),
        pytest.param([report(1, 9, 99)], report(1, 3, 5), 3, 5, 1, 0, id="own record is older than own count"),
    ],
)
def test_epoch_samples_and_peers(others, local, epoch, samples, peers, clients) -> None:
    progress = estimate_global_progress(others, local, target_batch_size=100, now=NOW, options=OPTIONS)
    assert (progress.epoch, progress.samples_accumulated) == (epoch, samples)
    assert (progress.num_peers, progress.num_clients) == (peers, clients)


@pytest.mark.parametrize(
    ("others", "local", "seconds_left"),
    [
        pytest.param([], report(1, 0, 0), math.inf, id="nobody computes"),
        pytest.param([], report(1, 0, 20, 4.0), 20.0, id="alone"),
        pytest.param([report(2, 0, 20, 4.0)], report(1, 0, 20, 6.0), 6.0, id="rates add up"),
        pytest.param([report(2, 0, 20, 4.0, age=5)], report(1, 0, 20, 6.0), 4.0, id="samples since the report"),
        pytest.param([report(2, 0, 20, 4.0, age=-5)], report(1, 0, 20, 6.0), 6.0, id="never fewer than reported"),
        pytest.param([report(2, 0, 20, 4.0)], report(1, 1, 20, 6.0), 8.0, id="a peer behind will catch up"),
        pytest.param([report(2, 0, 90, 4.0)], report(1, 0, 20, 6.0), 0.0, id="enough already"),
    ],
)
def test_time_that_remains(others, local, seconds_left) -> None:
    progress = estimate_global_progress(others, local, target_batch_size=100, now=NOW, options=OPTIONS)
    assert progress.eta_next_epoch == pytest.approx(NOW + seconds_left)


@pytest.mark.parametrize(
    ("told", "samples"),
    [
        pytest.param(report(2, 3, 40, 5.0), 40, id="as it has just told"),
        pytest.param(report(2, 3, 40, 5.0, age=2.0), 50, id="and what it did since"),
        pytest.param(report(2, 3, 40, 5.0, age=-3.0), 40, id="a clock that runs ahead adds nothing"),
        pytest.param(report(2, 3, 0, 5.0, age=100.0), LONGEST_DRAWN * 5, id="for as long as reports take to come"),
        pytest.param(report(2, 3, 98, 5.0, age=2.0), 100, id="no more than an epoch has"),
        pytest.param(report(2, 2, 77, 5.0, age=6.0), 20, id="of the epoch before: since this one began"),
        pytest.param(report(2, 0, 77, 5.0, age=6.0), 20, id="of an earlier one: epochs are shorter than reports apart"),
        pytest.param(report(2, 2, 77, 5.0, age=LONGEST_DRAWN), 0, id="an old one of an earlier epoch"),
        pytest.param(report(2, 4, 77, 5.0), 0, id="of a later epoch"),
    ],
)
def test_how_many_samples_a_report_stands_for(told, samples) -> None:
    assert expected_samples(told, 3, NOW - 4.0, 100, NOW) == pytest.approx(samples)


def test_alone_looks_again_after_the_default_period() -> None:
    progress = estimate_global_progress([], report(1, 0, 99, 50.0), target_batch_size=100, now=NOW, options=OPTIONS)
    assert progress.next_fetch_time == NOW + OPTIONS.default_refresh_period


@pytest.mark.parametrize(
    "broken",
    [
        {"epoch": -1},
        {"epoch": True},
        {"samples_accumulated": "many"},
        {"samples_accumulated": 1 << 60},
        {"samples_per_second": math.inf},
        {"samples_per_second": math.nan},
        {"samples_per_second": 1e13},
        {"time": math.nan},
        {"peer_id": b"short"},
        {"more": 1},
    ],
)
def test_malformed_reports_are_refused(broken) -> None:
    good = report(1, 0, 0).model_dump()
    assert LocalTrainingProgress.model_validate(good)
    with pytest.raises(ValidationError):
        LocalTrainingProgress.model_validate(good | broken)


def test_rate_is_exact_from_the_first_interval_and_leaves_pauses_out() -> None:
    ema = PerformanceEMA(alpha=0.1)
    assert ema.samples_per_second == 0.0
    ema.resume(10.0)
    ema.update(20, 12.0)
    assert ema.samples_per_second == pytest.approx(10.0)
    ema.resume(100.0)  # 88 seconds of averaging
    ema.update(20, 102.0)
    assert ema.samples_per_second == pytest.approx(10.0)
    ema.update(20, 103.0)
    assert 10.0 < ema.samples_per_second < 20.0


def test_a_rate_that_is_known_to_change_follows_at_once() -> None:
    ema = PerformanceEMA(alpha=0.1)
    ema.scale(0.5)  # of nothing yet
    ema.resume(0.0)
    ema.update(20, 2.0)
    ema.scale(0.25)
    assert ema.samples_per_second == pytest.approx(2.5)
    ema.update(20, 10.0)
    assert ema.samples_per_second == pytest.approx(2.5)


@pytest.mark.parametrize(
    ("latest", "epoch", "samples", "eta"),
    [
        pytest.param(None, 6, 30, NOW + 2, id="a lone claim far ahead leads nobody on"),
        pytest.param(6, 6, 30, NOW + 2, id="one that nothing bears out leads nobody on"),
        pytest.param(3, 5, 20, NOW + 3, id="this peer believes itself"),
    ],
)
def test_epochs_beyond_what_is_known_of_the_others_add_no_samples(latest, epoch, samples, eta) -> None:
    """Lineages tell the Optimizer how far the others are; what a peer reports beyond that counts as nothing."""
    progress = estimate_global_progress(
        [report(2, 1 << 40, 7, 1.0), report(3, 6, 30, 1.0)],
        report(1, 5, 20, 29.0),
        target_batch_size=92 if latest != 3 else 113,
        now=NOW,
        options=OPTIONS,
        latest_epoch=latest,
    )
    assert (progress.epoch, progress.samples_accumulated) == (epoch, samples)
    assert progress.eta_next_epoch == pytest.approx(eta)
    assert progress.num_peers == 3


@pytest.mark.parametrize(
    ("own", "reported", "latest"),
    [(3, [], 3), (0, [50], 50), (0, [50, 51], 51), (0, [50, 50 + FAR_AHEAD], 50 + FAR_AHEAD), (5, [5, 1 << 40], 5)],
)
def test_which_epoch_is_borne_out_by_reports_alone(own, reported, latest) -> None:
    assert borne_out(own, reported) == latest
