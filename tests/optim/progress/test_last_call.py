"""How often reports are believed that never come true."""

from swarmcli.optim.progress.last_call import MOST_EPOCHS, LastCall


def test_one_wait_in_vain_ends_the_waiting_of_its_epoch_only() -> None:
    call = LastCall()
    assert call.is_worth_it(7)
    call.was_answered(7, begun=False)
    assert not call.is_worth_it(7)
    assert call.is_worth_it(8)


def test_a_peer_that_always_lies_is_believed_more_and_more_seldom() -> None:
    call, waits = LastCall(), []
    for epoch in range(400):
        if call.is_worth_it(epoch):
            waits.append(epoch)
            call.was_answered(epoch, begun=False)
    assert waits[:6] == [0, 1, 3, 7, 15, 31]
    assert waits[-1] - waits[-2] == MOST_EPOCHS


def test_a_round_that_begins_restores_the_trust() -> None:
    call = LastCall()
    for epoch in (0, 1, 3):
        call.was_answered(epoch, begun=False)
    call.was_answered(7, begun=True)
    call.was_answered(8, begun=False)
    assert not call.is_worth_it(8)
    assert call.is_worth_it(9)
