"""The history of epochs against one that goes through all that was heard, each time; and what a liar does to it."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest

from swarmcli.events import EpochAdvanced, EpochCredited, EpochReported
from swarmcli.journal import Journal, RunRecord
from swarmcli.run.alerts import Alerts
from swarmcli.run.history import LOSSES, RECENT_EPOCHS, EpochHistory
from swarmcli.run.values import RunStatus


def reported(draw: random.Random, epoch: int) -> EpochReported:
    peer, told = draw.choice("abcdef"), max(0, epoch + draw.randrange(-4, 3))
    return EpochReported(peer, told, draw.uniform(1, 5), epoch * 10, draw.uniform(0, 9))


def test_it_tells_the_same_as_going_through_everything() -> None:
    draw, history = random.Random(0), EpochHistory()
    told: dict[tuple[int, str], EpochReported] = {}
    for epoch in range(1, 100):
        history.note(EpochAdvanced(epoch, "ab", 100, 10, 3, None, 8.0, 0.1))
        for _ in range(draw.randrange(12)):
            report = reported(draw, epoch)
            history.note(report)
            told[report.epoch, report.peer] = report
        shown = [each for each in told.values() if epoch - LOSSES < each.epoch <= epoch]
        losses = []
        for number in sorted({each.epoch for each in shown}):
            ranked = sorted(each.loss for each in shown if each.epoch == number)
            losses.append(sum(ranked) / 2 if len(ranked) == 2 else ranked[(len(ranked) - 1) // 2])
        assert history.losses() == pytest.approx(losses)
        recent = [each for each in shown if each.epoch > epoch - RECENT_EPOCHS]
        counts = {peer: [each.samples for each in recent if each.peer == peer] for peer in "abcdef"}
        grown = {peer: max(each) - min(each) for peer, each in counts.items() if len(each) > 1}
        once = {each.peer: each for each in recent if len(counts[each.peer]) == 1}
        paced = {peer: min(each.samples, 8.0 * each.samples_per_second) for peer, each in once.items() if grown}
        total = sum(grown.values()) + sum(paced.values())
        shares = {peer: each / total for peer, each in (grown | paced).items()} if total else {"a": 1.0}
        assert history.shares({"a": 1.0}) == pytest.approx(shares)


def test_of_four_one_that_claims_an_absurd_loss_moves_neither_curve_nor_alert(tmp_path: Path) -> None:
    history, alerts = EpochHistory(), Alerts()
    status = RunStatus(
        run_id="r", state="training", peer_id="a", role="monitor", epoch=0, samples=0, target=100,
        samples_per_second=1.0,
    )  # fmt: skip
    honest, begun = [5.0 - epoch / 20 for epoch in range(41)], []
    with Journal(tmp_path / "journal.sqlite", run=RunRecord("r", "monitor", "a"), clock=lambda: 5.0) as journal:
        for epoch in range(1, 41):
            events = [
                EpochAdvanced(epoch, "ab", 100, 0, 4, None, 8.0, 0.1),
                EpochCredited(epoch, 100 * epoch, dict.fromkeys("abcd", 25.0), {}, 8.0),
                *(EpochReported(peer, epoch, honest[epoch], 25 * epoch, 3.0) for peer in "abc"),
                EpochReported("d", epoch, 1e30 if epoch > 10 else honest[epoch], 25 * epoch, 1e9),
                *(EpochReported(f"stranger {each}", epoch, 1e30, 0, 1e9) for each in range(9)),
            ]
            for event in events:
                history.note(event)
                journal.record(event)
            for told in history.news():
                journal.record(told)
            losses = history.losses()
            begun += alerts.look(replace(status, epoch=epoch, now=8.0 * epoch, losses=tuple(losses)))[0]
        assert losses == honest[1:]
        assert [alert.kind for alert in begun if alert.kind == "diverged"] == []
        journal.flush()
        with journal.read() as reader:
            assert [row.loss for row in reader.chart("r")] == honest[1:]


@pytest.mark.parametrize(
    ("reports", "credited", "loss"),
    [
        ({"a": 2.0, "b": 4.0}, {"a": 30.0, "b": 10.0}, 2.5),  # of two the mean: nobody could say which one lies
        ({"a": 2.0, "b": 3.0, "c": 9.0}, {"a": 1.0, "b": 1.0, "c": 1.0}, 3.0),
        ({"a": 2.0, "b": 3.0, "c": 9.0}, {"a": 7.0, "b": 2.0, "c": 2.0}, 2.0),  # who gave more than half
        ({"a": 2.0, "b": 3.0, "c": 9.0}, {"a": 2.0}, 2.0),  # the others are not known to have given anything
        ({"a": 2.0, "b": 3.0, "c": 9.0}, {"d": 2.0}, 3.0),  # who has given tells nothing: all alike
        ({"a": 2.0, "b": 3.0, "c": float("nan")}, {}, 3.0),
        ({}, {}, 7.0),  # its own where nobody has told anything
    ],
)
def test_the_loss_of_an_epoch_is_the_median_of_what_those_tell_who_gave_samples(
    reports: dict[str, float], credited: dict[str, float], loss: float
) -> None:
    history = EpochHistory()
    history.note(EpochAdvanced(5, "ab", 100, 10, 3, 7.0, 8.0, 0.1))
    for peer, told in reports.items():
        history.note(EpochReported(peer, 5, told, 10, 1.0))
    history.note(EpochCredited(5, 500, credited, {}, 8.0))
    assert history.losses() == [loss]


def test_news_are_epochs_whose_loss_has_changed_up_to_the_one_that_this_peer_has_reached() -> None:
    history = EpochHistory()
    history.note(EpochAdvanced(5, "ab", 100, 10, 3, None, 8.0, 0.1))
    history.note(EpochReported("a", 5, 2.0, 10, 1.0))
    history.note(EpochReported("a", 6, 1.0, 10, 1.0))
    assert [(each.epoch, each.loss, each.peers) for each in history.news()] == [(5, 2.0, 1)]
    assert history.news() == []
    history.note(EpochAdvanced(6, "ab", 100, 10, 3, None, 8.0, 0.1))
    history.note(EpochReported("b", 5, 4.0, 10, 1.0))
    assert [(each.epoch, each.loss, each.peers) for each in history.news()] == [(5, 3.0, 2), (6, 1.0, 1)]
