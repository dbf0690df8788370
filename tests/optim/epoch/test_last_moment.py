"""How long a step waits for a round that is near, and how often reports are believed."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest

from swarmcli.optim.epoch.end import LAST_CALL, LastMoment, seconds_left_to_others
from swarmcli.optim.peers.progress import LocalTrainingProgress
from swarmcli.testing import virtual_time
from tests.optim.optim_swarm import Swarm, together
from tests.suites import soak

NOW, TARGET = 100.0, 100


def report(epoch: int, samples: int, rate: float, time: float = NOW, peer: int = 1) -> LocalTrainingProgress:
    return LocalTrainingProgress(
        peer_id=bytes([peer]) * 32,
        epoch=epoch,
        samples_accumulated=samples,
        samples_per_second=rate,
        time=time,
        client_mode=False,
    )


OWN = report(5, 50, 5.0, peer=0)


@pytest.mark.parametrize(
    ("others", "seconds"),
    [
        pytest.param([], math.inf, id="nobody else"),
        pytest.param([report(5, 50, 0.0)], math.inf, id="nobody computes"),
        pytest.param([report(5, 40, 5.0)], 2.0, id="the rest at their rate"),
        pytest.param([report(5, 40, 5.0, NOW - 1)], 1.0, id="less what they did since their report"),
        pytest.param([report(5, 40, 5.0, NOW + 3)], 2.0, id="a clock that runs ahead adds nothing"),
        pytest.param([report(5, 40, 5.0, NOW - 9)], 0.0, id="already done"),
        pytest.param([report(4, 77, 5.0), report(6, 77, 5.0)], math.inf, id="other epochs do not count"),
        pytest.param([report(5, 20, 2.0), report(5, 20, 3.0, peer=2)], 2.0, id="rates add up"),
    ],
)
def test_when_the_others_will_have_done_the_rest(others: list[LocalTrainingProgress], seconds: float) -> None:
    assert seconds_left_to_others(others, OWN, TARGET, NOW) == pytest.approx(seconds)


def moment(left: float, *, rate: float = 5.0, enough: bool = False) -> LastMoment:
    """Of a peer with this rate, in an epoch whose rest the others do in `left` seconds."""
    tracker = SimpleNamespace(
        accumulated_enough_samples=enough,
        performance_ema=SimpleNamespace(samples_per_second=rate),
        reports=(report(5, TARGET - 50 - round(10 * left), 10.0),),
        local_progress=OWN,
        target_batch_size=TARGET,
    )
    return LastMoment(tracker, SimpleNamespace(now=lambda: NOW))  # type: ignore[arg-type]


def test_it_waits_while_the_end_is_less_than_half_a_batch_away() -> None:
    assert moment(0.9).patience(10) == pytest.approx(2.0)  # a batch of ten samples takes two seconds
    assert moment(1.1).patience(10) == 0.0
    assert moment(0.9, rate=0.0).patience(10) == 0.0  # it is not known how long a batch takes


def test_a_mate_that_has_not_been_heard_of_since_the_last_round_counts_from_its_end() -> None:
    clock = SimpleNamespace(now=lambda: NOW - 10)
    mate = report(3, 77, 5.0, NOW - 30)
    tracker = moment(0.0)._tracker
    tracker.reports = (mate,)  # type: ignore[misc]
    last = LastMoment(tracker, clock)  # type: ignore[arg-type]
    last.begin_epoch([mate.peer_id])
    clock.now = lambda: NOW
    assert last.patience(10) == pytest.approx(LAST_CALL)  # it has done its half
    last.begin_epoch()
    assert last.patience(10) == 0.0


def test_it_waits_no_longer_than_the_end_should_take_and_a_little() -> None:
    assert moment(2.0).patience(50) == pytest.approx(2.0 + LAST_CALL)


def test_a_reason_that_misled_it_counts_no_more_in_this_epoch() -> None:
    expected, reported = moment(0.1), moment(0.1, enough=True)
    assert reported.patience(10) == LAST_CALL
    for each in (expected, reported):
        each.patience(10)
        each.was_answered(begun=True)
        assert each.patience(10) > 0
        each.was_answered(begun=False)
        assert each.patience(10) == 0.0


@pytest.mark.parametrize(("peers", "batches"), [(2, 5), *soak([(2, 1), (4, 1), (4, 5)])])
def test_trainers_in_step_compute_no_batch_that_the_epoch_does_not_need(peers: int, batches: int) -> None:
    async def main() -> None:
        async with Swarm(latency=0.002) as swarm:
            target = 4 * peers * batches
            trainers = [await swarm.trainer(seed=1, pace=1.0, target=target) for _ in range(peers)]
            await together(*(trainer.core.join() for trainer in trainers))
            await together(*(trainer.train(10) for trainer in trainers))
            for trainer in trainers:
                assert [event.samples for event in trainer.epochs[4:]] == [target] * 6

    virtual_time.run(main())
