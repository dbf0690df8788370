"""Actions in a thread of their own: in order, and nothing they raise is lost."""

import threading

import pytest

from swarmcli.optim.state.delayed_actions import DelayedActions


def test_they_run_in_order_beside_their_caller() -> None:
    actions, go_on, seen = DelayedActions("test"), threading.Event(), []
    assert actions.are_done
    assert not actions.are_pending
    actions.submit(lambda: go_on.wait(30))
    for number in range(3):
        actions.submit(lambda number=number: seen.append(number) or number)
    assert actions.are_pending
    assert not actions.are_done
    assert not actions.wait(0.001)
    go_on.set()
    assert actions.collect() == [True, 0, 1, 2]
    assert seen == [0, 1, 2]
    assert not actions.are_pending
    actions.close()


def test_an_error_is_raised_once_and_later_actions_run() -> None:
    actions = DelayedActions("test")
    actions.submit(lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        actions.collect()
    actions.submit(lambda: 5)
    assert actions.collect() == [5]
    actions.close()
    actions.close()
    assert "test_0" not in {thread.name for thread in threading.enumerate()}
