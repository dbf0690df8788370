"""What a peer counts of itself: samples, losses, outcomes and how long its epochs took."""

from __future__ import annotations

import asyncio
import math

import pytest
from pydantic import ValidationError

from swarmcli.averaging import RoundResult
from swarmcli.events import EpochAdvanced, EpochReported, Event, Events
from swarmcli.network.identity import PeerID
from swarmcli.optim.modes.base import Advanced
from swarmcli.optim.peers.report import MAX_RECENT, PeerMetrics, ReportedEvaluation, ReportedLoss
from swarmcli.optim.state.lineage import LineagePosition
from swarmcli.testing import virtual_time


def metrics(seen: list[Event] | None = None) -> PeerMetrics:
    events = Events()
    if seen is not None:
        events.subscribe(seen.append)
    return PeerMetrics(PeerID(bytes(32)), events)


ROUND = RoundResult(
    round_id=bytes(32),
    weights={PeerID(bytes(32)): 12.0, PeerID(bytes([1] * 32)): 12.0},
    samples={PeerID(bytes(32)): 12.0, PeerID(bytes([1] * 32)): 12.0},
)


def at(epoch: int) -> LineagePosition:
    return LineagePosition(epoch, 24 * epoch, bytes(32))


def test_an_epochs_loss_is_the_mean_over_its_samples() -> None:
    async def main() -> None:
        seen: list[Event] = []
        own = metrics(seen)
        own.begin()
        own.note_loss(4.0, 1)
        own.note_loss(2.0, 3)
        own.samples = 4
        await asyncio.sleep(2.5)
        ended = own.end_epoch(at(1), Advanced(ROUND, own_samples=4, seconds=0.5), rate=1.6)
        assert (ended.loss, ended.seconds) == (2.5, 2.5)
        assert (own.last_loss, list(own.recent)) == (2.5, [ReportedLoss(epoch=1, loss=2.5, samples=4)])
        assert seen == [
            EpochReported(PeerID(bytes(32)).text, 1, 2.5, 4, 1.6),
            EpochAdvanced(1, bytes(32).hex(), 24, 4, 2, 2.5, 2.5, 0.5),
        ]

    virtual_time.run(main())


def test_an_epoch_without_samples_has_no_loss_and_keeps_the_last_one() -> None:
    async def main() -> None:
        seen: list[Event] = []
        own = metrics(seen)
        own.note_loss(4.0, 1)
        own.end_epoch(at(1))
        await asyncio.sleep(1)
        ended = own.end_epoch(at(2))
        assert (ended.loss, ended.seconds) == (None, 1.0)
        assert own.last_loss == 4.0
        assert [each.epoch for each in own.recent] == [1]
        assert sum(isinstance(event, EpochReported) for event in seen) == 1

    virtual_time.run(main())


@pytest.mark.parametrize("loss", [math.nan, math.inf, -1e300])
def test_a_loss_that_is_no_number_is_left_out(loss: float) -> None:
    async def main() -> None:
        own = metrics()
        own.note_loss(loss, 8)
        own.note_loss(1.0, 1)
        own.note_evaluation(1, loss, 8, {})
        assert own.end_epoch(at(1)).loss == 1.0 and own.evaluation is None

    virtual_time.run(main())


@pytest.mark.parametrize("loss", [math.nan, -math.inf, 1e30, -1e308])
def test_nobody_can_tell_a_loss_of_which_no_mean_can_be_taken(loss: float) -> None:
    with pytest.raises(ValidationError):
        ReportedLoss(epoch=1, loss=loss, samples=8)


def test_only_the_latest_epochs_are_kept() -> None:
    async def main() -> None:
        own = metrics()
        for epoch in range(MAX_RECENT + 5):
            own.note_loss(1.0, 1)
            own.end_epoch(at(epoch))
        assert [each.epoch for each in own.recent] == list(range(5, MAX_RECENT + 5))

    virtual_time.run(main())


def test_waiting_is_no_part_of_an_epoch() -> None:
    async def main() -> None:
        own = metrics()
        own.begin()
        await asyncio.sleep(12)
        own.leave_out(10.0)
        assert own.end_epoch(at(2)).seconds == 2.0

    virtual_time.run(main())


def test_metrics_are_told_with_their_evaluation_within_bounds() -> None:
    async def main() -> None:
        own = metrics()
        own.note_evaluation(
            3, 0.5, 8, {"accuracy": 0.75, "Not a name": 1.0, "f1": math.nan, **{f"m{n}": 1.0 for n in range(9)}}
        )
        assert own.evaluation is not None
        assert own.evaluation.metrics == {"accuracy": 0.75, **{f"m{n}": 1.0 for n in range(7)}}

    virtual_time.run(main())


@pytest.mark.parametrize("told", [{"\x1b[2J": 1.0}, {"a" * 25: 1.0}, {"f1": 1e300}, {f"m{n}": 1.0 for n in range(9)}])
def test_nobody_can_tell_metrics_beyond_the_bounds(told: dict[str, float]) -> None:
    with pytest.raises(ValidationError):
        ReportedEvaluation(epoch=1, loss=1.0, samples=8, metrics=told)
