"""How long a step waits for a round that is near, and how often reports are believed."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from swarmcli.optim.epoch.end import LAST_CALL, MOST_EPOCHS, LastMoment
from tests.optim.optim_swarm import Swarm, together
from tests.simulation import simulated
from tests.suites import soak


def moment(left: float, *, rate: float = 5.0) -> LastMoment:
    """The last moment of a peer with this rate, in an epoch whose rest the others do in `left` seconds."""
    tracker = SimpleNamespace(
        performance_ema=SimpleNamespace(samples_per_second=rate),
        seconds_to_round=left,
        local_progress=SimpleNamespace(epoch=5),
    )
    return LastMoment(tracker)  # type: ignore[arg-type]


def test_it_waits_while_the_end_is_less_than_half_a_batch_away() -> None:
    assert moment(0.9).patience(10) == pytest.approx(2.0)  # a batch of ten samples takes two seconds
    assert moment(1.1).patience(10) == 0.0
    assert moment(0.9, rate=0.0).patience(10) == 0.0  # it is not known how long a batch takes
    assert moment(2.0).patience(50) == pytest.approx(2.0 + LAST_CALL), "no longer than it should take, and a little"


def test_reports_that_misled_it_are_believed_more_and_more_seldom() -> None:
    last, waited = moment(0.1), list[int]()
    for epoch in range(5, 5 + 4 * MOST_EPOCHS):
        last._tracker.local_progress = SimpleNamespace(epoch=epoch)  # type: ignore[assignment]
        if last.patience(10):
            waited.append(epoch)
            last.was_answered(begun=False)
            assert last.patience(10) == 0.0, "in this epoch"
    assert waited[:4] == [5, 6, 8, 12] and waited[-1] - waited[-2] == MOST_EPOCHS
    last._tracker.local_progress = SimpleNamespace(epoch=1000)  # type: ignore[assignment]
    last.was_answered(begun=True)
    assert last.patience(10) > 0


@pytest.mark.parametrize(
    ("peers", "batches", "pace"), [(2, 1, 0.1), *soak([(2, 5, 1.0), (2, 1, 1.0), (4, 1, 0.3), (4, 5, 1.0)])]
)
@simulated
async def test_trainers_in_step_compute_no_batch_that_the_epoch_does_not_need(
    peers: int, batches: int, pace: float
) -> None:
    """This also holds where an epoch takes less time than passes between two reports."""
    async with Swarm(latency=0.002) as swarm:
        target = 4 * peers * batches
        trainers = [await swarm.trainer(seed=1, pace=pace, target=target) for _ in range(peers)]
        await together(*(trainer.core.join() for trainer in trainers))
        await together(*(trainer.train(10) for trainer in trainers))
        for trainer in trainers:
            assert [event.samples for event in trainer.epochs[5:]] == [target] * 5
