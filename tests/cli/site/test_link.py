"""A launcher and its process, each at its end of a socket pair."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator

import msgspec
import pytest

from swarmcli.cli.processes import ends_with_parent
from swarmcli.cli.site.link import VARIABLE, Failed, ProcessPipe, LauncherLink, Past, Start, StopProcess


class Launcher:
    """Holds the other end of a link, and knows with what codes the process was ended."""

    def __init__(self) -> None:
        ours, self._theirs = socket.socketpair()
        ours.settimeout(60)
        self.line = ProcessPipe(ours)
        self.codes: list[int] = []
        self.ended = threading.Event()

    def link(self) -> LauncherLink:
        start = Start(self._theirs.detach(), os.getpid(), store="")
        return LauncherLink(start, end_process=self._end)

    def _end(self, code: int) -> None:
        self.codes.append(code)
        self.ended.set()


@pytest.fixture
def launcher() -> Iterator[Launcher]:
    launcher = Launcher()
    yield launcher
    launcher.line.close()


def test_what_a_process_tells_arrives_in_order_and_is_what_it_knows(launcher: Launcher) -> None:
    link = launcher.link()
    told = [Past(7, "/home", ("tcp://10.0.0.1:4",)), Failed(4, "two\nlines" * 2000)]
    for message in told:
        link.tell(message)
    assert link.past == told[0]
    link.close()
    heard = []
    while (messages := launcher.line.receive()) is not None:
        heard += messages
    assert heard == told
    assert launcher.codes == []


def test_a_process_ends_when_its_launcher_has_ended(launcher: Launcher) -> None:
    link = launcher.link()
    launcher.line.leave()
    assert launcher.ended.wait(60)
    assert launcher.codes == [1]
    link.tell(Failed(75))  # to nobody
    link.close()


@pytest.mark.parametrize("before", [True, False])
def test_each_wish_to_stop_is_heard_once_also_when_it_came_before_anybody_listened(
    launcher: Launcher, before: bool
) -> None:
    link, heard, came = launcher.link(), [], threading.Event()

    def hear(number: signal.Signals, again: bool) -> None:
        heard.append((number, again))
        if again:
            came.set()

    if not before:
        link.on_stop(hear)
    launcher.line.send(StopProcess(signal.SIGTERM))
    launcher.line.send(StopProcess(signal.SIGINT, again=True))
    if before:
        launcher.line.leave()
        assert launcher.ended.wait(60)  # all that was said has been heard
        link.on_stop(hear)
    assert came.wait(60)
    link.close()
    assert heard == [(signal.SIGTERM, False), (signal.SIGINT, True)]


def test_a_process_whose_parent_is_no_longer_its_launcher_ends_before_it_begins() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        start = Start(theirs.fileno(), launcher=1, store="")  # this test is not process 1
        words = [
            sys.executable,
            "-c",
            "from swarmcli.cli.site.link import LauncherLink; LauncherLink.found(); print('went on')",
        ]
        done = subprocess.run(
            words,
            env=os.environ | {VARIABLE: msgspec.json.encode(start).decode()},
            pass_fds=[theirs.fileno()],
            capture_output=True,
        )
    assert (done.returncode, done.stdout) == (1, b"")


def test_an_orphan_of_torchrun_ends_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    ended, codes = threading.Event(), []
    parents = iter([1, 1, 1])
    monkeypatch.setattr(os, "getppid", lambda: next(parents, 2))

    def end(code: int) -> None:
        codes.append(code)
        ended.set()

    with ends_with_parent(end_process=end, every=0.01):
        assert ended.wait(60)
    assert codes == [1]
