from __future__ import annotations

import math

import pytest

from swarmcli.optim.membership.ledger import MAX_RECENT, EpochLoss, Ledger


def test_an_epochs_loss_is_the_mean_over_its_samples() -> None:
    ledger = Ledger()
    ledger.begin(10.0)
    ledger.note_loss(4.0, 1)
    ledger.note_loss(2.0, 3)
    ledger.samples = 4
    assert ledger.end_epoch(12.5, 1) == (2.5, 2.5)
    assert (ledger.last_loss, list(ledger.recent)) == (2.5, [EpochLoss(1, 2.5, 4)])


def test_an_epoch_without_samples_has_no_loss_and_keeps_the_last_one() -> None:
    ledger = Ledger()
    ledger.note_loss(4.0, 1)
    ledger.end_epoch(1.0, 1)
    assert ledger.end_epoch(2.0, 2) == (None, 1.0)
    assert ledger.last_loss == 4.0
    assert [each.epoch for each in ledger.recent] == [1]


def test_losses_of_parameters_that_were_replaced_are_forgotten() -> None:
    ledger = Ledger()
    ledger.note_loss(5.5, 8)
    ledger.forget_losses()
    assert ledger.end_epoch(1.0, 400)[0] is None
    assert (ledger.last_loss, list(ledger.recent)) == (None, [])


@pytest.mark.parametrize("loss", [math.nan, math.inf])
def test_a_loss_that_is_no_number_is_left_out(loss: float) -> None:
    ledger = Ledger()
    ledger.note_loss(loss, 8)
    ledger.note_loss(1.0, 1)
    assert ledger.end_epoch(1.0, 1)[0] == 1.0


def test_only_the_latest_epochs_are_kept() -> None:
    ledger = Ledger()
    for epoch in range(MAX_RECENT + 5):
        ledger.note_loss(1.0, 1)
        ledger.end_epoch(float(epoch), epoch)
    assert [each.epoch for each in ledger.recent] == list(range(5, MAX_RECENT + 5))


def test_waiting_is_no_part_of_an_epoch() -> None:
    ledger = Ledger()
    ledger.begin(0.0)
    for moment in (0.0, 1.0, 2.0):
        ledger.look(moment, anyone_computes=False)
    for moment in (3.0, 4.0):
        ledger.look(moment, anyone_computes=True)
    assert ledger.end_epoch(5.0, 1) == (None, 3.0), "somebody may have begun right after the last look at nobody"
    ledger.leave_out(10.0)
    assert ledger.end_epoch(17.0, 2) == (None, 2.0)


def test_an_epoch_that_ends_between_two_looks_takes_nothing_from_the_next() -> None:
    ledger = Ledger()
    ledger.begin(0.0)
    ledger.look(0.0, anyone_computes=False)
    assert ledger.end_epoch(0.5, 1) == (None, 0.5)
    ledger.look(1.0, anyone_computes=False)
    ledger.look(2.0, anyone_computes=True)
    assert ledger.end_epoch(2.5, 2) == (None, 2.0)
