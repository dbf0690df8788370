"""The history of epochs against one that goes through all that was heard, each time."""

from __future__ import annotations

import random

import pytest

from swarmcli.events import EpochAdvanced, EpochReported
from swarmcli.run.history import LOSSES, RECENT_EPOCHS, EpochHistory


def reported(draw: random.Random, epoch: int) -> EpochReported:
    peer = draw.choice("abcdef")
    return EpochReported(
        peer, max(0, epoch + draw.randrange(-4, 3)), draw.uniform(1, 5), epoch * 10, draw.uniform(0, 9)
    )


@pytest.mark.parametrize("seed", range(2))
def test_it_tells_the_same_as_going_through_everything(seed: int) -> None:
    draw, history = random.Random(seed), EpochHistory()
    told: dict[tuple[int, str], EpochReported] = {}
    for epoch in range(1, 100):
        history.note(EpochAdvanced(epoch, "ab", 100, 10, 3, None, 8.0, 0.1))
        for _ in range(draw.randrange(12)):
            report = reported(draw, epoch)
            history.note(report)
            told[report.epoch, report.peer] = report
        shown = [each for each in told.values() if epoch - LOSSES < each.epoch <= epoch]
        means = []
        for number in sorted({each.epoch for each in shown}):
            weights = [(each.loss, max(each.samples_per_second, 1e-3)) for each in shown if each.epoch == number]
            means.append(sum(loss * weight for loss, weight in weights) / sum(weight for _, weight in weights))
        assert history.losses() == pytest.approx(means)
        recent = [each for each in shown if each.epoch > epoch - RECENT_EPOCHS]
        counts = {peer: [each.samples for each in recent if each.peer == peer] for peer in "abcdef"}
        grown = {peer: max(each) - min(each) for peer, each in counts.items() if len(each) > 1}
        total = sum(grown.values())
        if total:
            assert history.shares({"a": 1.0}) == pytest.approx({peer: each / total for peer, each in grown.items()})
        else:
            assert history.shares({"a": 1.0}) == {"a": 1.0}


def test_however_many_have_told_a_report_is_added_to_them_and_nothing_is_copied() -> None:
    history = EpochHistory()
    history.note(EpochAdvanced(5, "ab", 100, 10, 3, None, 8.0, 0.1))
    history.note(EpochReported("a", 5, 2.0, 10, 1.0))
    kept, means = history._reports[5], history.losses()
    history.note(EpochReported("b", 5, 4.0, 10, 1.0))
    assert history._reports[5] is kept and len(kept) == 2
    assert (means, history.losses()) == ([2.0], [3.0]) and 5 in history._means
