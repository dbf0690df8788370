from __future__ import annotations

import os
import signal
import threading

import pytest

from swarmcli.cli.ending import stop_on_signals, words
from swarmcli.errors import BootstrapError, ConnectError


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_asks_and_the_second_ends(number: signal.Signals) -> None:
    stop = threading.Event()
    told: list[signal.Signals] = []
    ended: list[int] = []
    with stop_on_signals(stop, on_first=told.append, end_process=ended.append):
        os.kill(os.getpid(), number)
        assert stop.wait(10)
        assert told == [number] and ended == []
        os.kill(os.getpid(), signal.SIGINT)
        assert ended == [130] and told == [number]


def test_the_handlers_of_before_come_back_also_after_an_error() -> None:
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    with pytest.raises(ZeroDivisionError), stop_on_signals(threading.Event()):
        assert signal.getsignal(signal.SIGINT) is not before[0]
        _ = 1 / 0
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


def test_a_signal_in_the_middle_of_a_wait_on_the_same_event_does_not_lock_up() -> None:
    stop = threading.Event()
    threads = threading.active_count()
    with stop_on_signals(stop):
        # The handler runs in this thread while it holds the event's lock.
        with stop._cond:  # type: ignore[attr-defined]
            os.kill(os.getpid(), signal.SIGTERM)
        assert stop.wait(10)
    assert threading.active_count() == threads


def test_without_a_signal_nothing_happens() -> None:
    stop = threading.Event()
    with stop_on_signals(stop):
        pass
    assert not stop.is_set()


def test_that_private_addresses_lead_nowhere_from_outside_is_said_where_there_are_no_others() -> None:
    refused = ConnectError("connection refused")
    at_home = BootstrapError("nobody", {"tcp://192.168.1.2:31330": refused, "tcp://[fd00::7]:31330": refused})
    assert "swarm netcheck" in words(at_home)
    for other in ("tcp://203.0.113.7:31330", "tcp://example.org:31330", "tcp://127.0.0.1:31330", "what is this"):
        told = words(BootstrapError("nobody", {**at_home.attempts, other: refused}))
        assert "swarm netcheck" not in told and "anybody in the run has another link" in told
