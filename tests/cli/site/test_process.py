from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer

from swarmcli.cli.site.link import Failed, ProcessPipe, LauncherLink, Past, Start, StopProcess
from swarmcli.cli.site.process import SiteProcess, WorldRank, world_rank_of_process
from swarmcli.errors import BootstrapError, CheckpointError, FingerprintError, SiteError

PAST = Past(3, "/home/trainer-1", ("tcp://10.0.0.1:4",), 24)


class Site:
    """A process of a site, and the launcher's end of its link."""

    def __init__(self, past: Past = PAST) -> None:
        ours, theirs = socket.socketpair()
        ours.settimeout(60)
        self.launcher = ProcessPipe(ours)
        start = Start(theirs.detach(), os.getpid(), "store", past)
        self.process = SiteProcess(WorldRank(1, 2, 1), LauncherLink(start, end_process=lambda code: None))

    def end_with(self, error: Exception) -> int:
        with pytest.raises(typer.Exit) as end, self.process.running():
            raise error
        return end.value.exit_code

    def heard(self) -> list[object]:
        """All that the launcher is told, until the process has closed the link."""
        heard: list[object] = []
        while (messages := self.launcher.receive()) is not None:
            heard += messages
        return heard


@pytest.fixture
def site() -> Iterator[Site]:
    site = Site()
    yield site
    site.launcher.leave()
    site.launcher.close()


def test_a_broken_site_is_started_again_and_what_no_new_start_would_change_is_told_with_its_code(site: Site) -> None:
    assert site.end_with(FingerprintError("another recipe")) == 4
    assert site.heard() == [Failed(4, "swarm: another recipe")]
    with pytest.raises(typer.Exit) as end, Site().process.running():
        raise typer.Exit(130)  # how the command ends is its own affair
    assert end.value.exit_code == 130
    broken, faulty = Site(), Site()
    assert broken.end_with(SiteError("rank 0 is gone")) == 75 and broken.heard() == [Failed(75)]
    assert faulty.end_with(ZeroDivisionError("oops")) == 75
    [failed] = faulty.heard()
    assert isinstance(failed, Failed) and failed.code == 75, "a fault of our own shows where"
    assert "test_process.py" in failed.words
    assert "ZeroDivisionError: oops" in failed.words and "in process 1 of the site" in failed.words


def test_rank_0_tells_an_error_before_it_leaves_the_swarm_and_no_second_time(site: Site) -> None:
    error = CheckpointError("it does not exist")
    with pytest.raises(typer.Exit) as end, site.process.running():
        with pytest.raises(CheckpointError), site.process.telling():
            raise error
        assert site.launcher.receive() == [Failed(1, "swarm: it does not exist")]
        raise error
    assert end.value.exit_code == 1
    assert site.heard() == []


def test_what_is_noted_keeps_what_was_noted_before(site: Site) -> None:
    assert site.process.restarted and site.process.past == PAST
    site.process.note_home(Path("/elsewhere"))
    site.process.note_epoch(4, (), 32)
    expected = [Past(3, "/elsewhere", PAST.contacts, 24), Past(4, "/elsewhere", (), 32)]
    assert site.launcher.receive() == expected and site.process.past == expected[-1]


def test_a_site_whose_old_acquaintances_are_gone_begins_without_them(site: Site) -> None:
    assert site.end_with(BootstrapError("nobody answers")) == 75
    assert site.heard() == [Past(3, "/home/trainer-1", samples=24), Failed(75)]
    first = Site(Past())
    assert first.end_with(BootstrapError("nobody answers")) == 3
    assert not first.process.restarted


def test_who_is_asked_to_stop_stops_and_hears_why(site: Site) -> None:
    heard, came = [], threading.Event()

    def ask(number: signal.Signals, hurry: bool) -> None:
        heard.append((number, hurry))
        came.set()

    with site.process.stopping(ask):
        site.launcher.send(StopProcess(signal.SIGINT))
        assert came.wait(60)
    assert heard == [(signal.SIGINT, False)]


def test_under_torchrun_errors_and_signals_go_their_way(monkeypatch: pytest.MonkeyPatch) -> None:
    process, hurries = SiteProcess(WorldRank(0, 2, 0), None), list[bool]()
    with pytest.raises(SiteError), process.running(), process.telling():
        raise SiteError("rank 0 is gone")
    with process.stopping(lambda number, hurry: hurries.append(hurry)):
        signal.raise_signal(signal.SIGTERM)
    assert hurries == [False] and process.patience == 10.0
    process.note_epoch(4, (), 32)
    assert process.past == Past() and process.store is None and not process.restarted
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert process.restarted


def test_its_place_is_what_torchrun_says_and_a_lone_process_is_no_site() -> None:
    for alone in ({}, {"WORLD_SIZE": "4"}, {"RANK": "0", "WORLD_SIZE": "1"}, {"RANK": "0"}):
        assert world_rank_of_process(alone) is None
    environment = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1"}
    assert world_rank_of_process(environment) == WorldRank(rank=5, size=8, local_rank=1)
    with pytest.raises(SiteError, match="RANK='first' and WORLD_SIZE='4' in the environment are no numbers"):
        world_rank_of_process({"RANK": "first", "WORLD_SIZE": "4"})
