"""What a peer tells of itself, within bounds; test_core.py has what its epochs told."""

from __future__ import annotations

import asyncio
import math

import pytest
from pydantic import ValidationError

from swarmcli.events import Events
from swarmcli.network.identity import PeerID
from swarmcli.optim.peers.report import MAX_RECENT, PeerMetrics, ReportedEvaluation, ReportedLoss
from swarmcli.optim.state.lineage import LineagePosition
from tests.simulation import simulated


def metrics() -> PeerMetrics:
    return PeerMetrics(PeerID(bytes(32)), Events())


def at(epoch: int) -> LineagePosition:
    return LineagePosition(epoch, 24 * epoch, bytes(32))


@pytest.mark.parametrize("loss", [math.nan, -math.inf, 1e30, -1e308])
def test_nobody_can_tell_a_loss_of_which_no_mean_can_be_taken(loss: float) -> None:
    with pytest.raises(ValidationError):
        ReportedLoss(epoch=1, loss=loss, samples=8)


@simulated
async def test_only_the_latest_epochs_are_kept() -> None:
    own = metrics()
    for epoch in range(MAX_RECENT + 5):
        own.note_loss(1.0, 1)
        own.end_epoch(at(epoch))
    assert [each.epoch for each in own.recent] == list(range(5, MAX_RECENT + 5))


@pytest.mark.parametrize("loss", [math.nan, math.inf, -1e300])
@simulated
async def test_a_loss_that_is_no_number_is_left_out(loss: float) -> None:
    own = metrics()
    own.note_loss(loss, 8)
    own.note_loss(1.0, 1)
    assert own.end_epoch(at(1)).loss == 1.0


@simulated
async def test_waiting_is_no_part_of_an_epoch() -> None:
    own = metrics()
    own.begin()
    await asyncio.sleep(12)
    own.leave_out(10.0)
    assert own.end_epoch(at(2)).seconds == 2.0


@simulated
async def test_metrics_are_told_with_their_evaluation_within_bounds() -> None:
    own = metrics()
    own.note_evaluation(2, math.nan, 8, {})
    assert own.evaluation is None
    own.note_evaluation(
        3, 0.5, 8, {"accuracy": 0.75, "Not a name": 1.0, "f1": math.nan, **{f"m{n}": 1.0 for n in range(9)}}
    )
    assert own.evaluation is not None
    assert own.evaluation.metrics == {"accuracy": 0.75, **{f"m{n}": 1.0 for n in range(7)}}


@pytest.mark.parametrize("told", [{"\x1b[2J": 1.0}, {"a" * 25: 1.0}, {"f1": 1e300}, {f"m{n}": 1.0 for n in range(9)}])
def test_nobody_can_tell_metrics_beyond_the_bounds(told: dict[str, float]) -> None:
    with pytest.raises(ValidationError):
        ReportedEvaluation(epoch=1, loss=1.0, samples=8, metrics=told)
