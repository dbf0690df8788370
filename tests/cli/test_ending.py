from __future__ import annotations

import errno
import os
import signal
import threading
from pathlib import Path

import pytest

from swarmcli.cli.ending import interrupted_soon, plight, stop_on_signals, words
from swarmcli.errors import BootstrapError, ConnectError


class Asked:
    """What signals asked for, in the order in which they came, and how the process was ended."""

    def __init__(self) -> None:
        self.wishes: list[tuple[signal.Signals, bool]] = []
        self.codes: list[int] = []

    def __call__(self, number: signal.Signals, hurry: bool) -> None:
        self.wishes.append((number, hurry))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_asks_the_second_hurries_and_the_third_ends(number: signal.Signals) -> None:
    asked = Asked()
    with stop_on_signals(asked, end_process=asked.codes.append):
        os.kill(os.getpid(), number)
        os.kill(os.getpid(), signal.SIGINT)
        assert not asked.codes
        os.kill(os.getpid(), number)
        assert asked.codes == [130]
    assert sorted(asked.wishes, key=lambda wish: wish[1]) == [(number, False), (signal.SIGINT, True)]


@pytest.mark.parametrize(
    ("number", "raises", "code"),
    [(signal.SIGINT, KeyboardInterrupt, 130), *((each, SystemExit, 0) for each in (signal.SIGTERM, signal.SIGHUP))],
)
def test_what_has_just_begun_cleans_up_and_ends_soon_after_a_signal_whatever_holds_it_up(
    number: signal.Signals, raises: type[BaseException], code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("swarmcli.cli.ending.SOON", 0.0)
    monkeypatch.setattr("swarmcli.cli.ending._forget_terminal", lambda: None)
    monkeypatch.delenv("RANK", raising=False)
    ended, before = threading.Event(), signal.signal(number, signal.default_int_handler)
    monkeypatch.setattr("swarmcli.cli.ending.os._exit", lambda given: ended.set() if given == code else None)
    try:
        with pytest.raises(raises), interrupted_soon():
            try:
                os.kill(os.getpid(), number)
            finally:
                assert ended.wait(60), "it was held up"
        assert signal.getsignal(number) is signal.default_int_handler
    finally:
        signal.signal(number, before)


@pytest.mark.skipif(not hasattr(signal, "SIGHUP"), reason="this system has no hangup")
def test_a_closed_terminal_asks_to_stop_and_asks_no_harder_when_it_says_so_twice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("swarmcli.cli.ending._forget_terminal", lambda: None)
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    asked = Asked()
    try:
        with stop_on_signals(asked, end_process=asked.codes.append):
            for _ in range(3):
                os.kill(os.getpid(), signal.SIGHUP)
        assert asked.wishes == [(signal.SIGHUP, False)] and not asked.codes
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        with stop_on_signals(asked):
            assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN  # nohup's wish
    finally:
        signal.signal(signal.SIGHUP, before)


def test_what_this_computer_refuses_is_no_fault_of_the_program(tmp_path: Path) -> None:
    assert "the disk is full" in plight(OSError(errno.ENOSPC, "No space left on device"))
    assert "no further thread" in plight(RuntimeError("can't start new thread"))
    assert "no further thread" in plight(BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable"))
    assert "Permission denied; name another directory" in plight(
        PermissionError(errno.EACCES, "Permission denied", tmp_path)
    )
    for said in ("Could not determine home directory.", "could not determine the home directory for '~/.config', set"):
        assert "set HOME, or SWARM_DATA_DIR" in plight(RuntimeError(said)), "of pathlib, of platformdirs"
    assert "set TMPDIR, or SWARM_DATA_DIR" in plight(FileNotFoundError(2, "No usable temporary directory found in []"))
    for error in (OSError(errno.EIO, "Input/output error"), ValueError(), PermissionError(errno.EACCES, "denied")):
        assert not plight(error)


def no_thread(*ignored: object) -> None:
    raise RuntimeError("can't start new thread")


def test_where_no_thread_is_left_signals_are_heard_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = Asked()
    with stop_on_signals(asked):
        monkeypatch.setattr(threading.Thread, "start", no_thread)
        os.kill(os.getpid(), signal.SIGTERM)
    assert asked.wishes == [(signal.SIGTERM, False)]


def test_the_handlers_of_before_come_back_also_after_an_error() -> None:
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    with pytest.raises(ZeroDivisionError), stop_on_signals(Asked()):
        assert signal.getsignal(signal.SIGINT) is not before[0]
        _ = 1 / 0
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


def test_a_signal_in_the_middle_of_a_wait_does_not_lock_up() -> None:
    stop = threading.Event()
    threads = set(threading.enumerate())  # one of an earlier test may be about to end
    with stop_on_signals(lambda number, hurry: stop.set()):
        # The handler runs in this thread while it holds the event's lock.
        with stop._cond:  # type: ignore[attr-defined]
            os.kill(os.getpid(), signal.SIGTERM)
        assert stop.wait(60)
    assert set(threading.enumerate()) <= threads


def test_that_private_addresses_lead_nowhere_from_outside_is_said_where_there_are_no_others() -> None:
    refused = ConnectError("connection refused")
    at_home = BootstrapError("nobody", {"tcp://192.168.1.2:31330": refused, "tcp://[fd00::7]:31330": refused})
    assert "swarm doctor --network" in words(at_home)
    for other in ("tcp://203.0.113.7:31330", "tcp://example.org:31330", "tcp://127.0.0.1:31330", "what is this"):
        told = words(BootstrapError("nobody", {**at_home.attempts, other: refused}))
        assert "--network" not in told and "anybody in the run has another link" in told
