from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import typer

from swarmcli.cli.site import process as module
from swarmcli.cli.site.notes import Network, Notes
from swarmcli.cli.site.place import Place
from swarmcli.cli.site.process import SiteProcess, ends_with_parent
from swarmcli.errors import BootstrapError, CheckpointError, DataError, FingerprintError, SiteError
from swarmcli.training import stop_on_signals


@pytest.fixture
def process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SiteProcess:
    monkeypatch.setattr(module, "LINGER_SECONDS", 0.0)
    return SiteProcess(Place(1, 2, 1), Notes(tmp_path))


def end_of(process: SiteProcess, error: Exception) -> int:
    with pytest.raises(typer.Exit) as end, process.running():
        raise error
    return end.value.exit_code


def another(process: SiteProcess) -> SiteProcess:
    return SiteProcess(Place(0, 2, 0), process.notes)


def test_a_broken_site_is_started_again_and_told_of_by_the_launcher(
    process: SiteProcess, capsys: pytest.CaptureFixture[str]
) -> None:
    assert end_of(process, SiteError("rank 0 is gone")) == 75
    assert process.notes is not None and process.notes.broken
    assert capsys.readouterr().err == ""


def test_one_process_tells_what_no_new_start_would_change(process: SiteProcess) -> None:
    with pytest.raises(FingerprintError), process.running():
        raise FingerprintError("another recipe")
    assert end_of(another(process), FingerprintError("another recipe")) == 4
    assert end_of(another(process), DataError("no data")) == 1


class Clock:
    """Time that passes in sleep alone; `events` happen at their seconds."""

    def __init__(self, events: dict[float, Callable[[], object]]) -> None:
        self.now = 0.0
        self._events = events

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now = round(self.now + seconds, 3)
        self._events.pop(self.now, lambda: None)()


@pytest.mark.parametrize(("happens", "seconds"), [("nothing", 2), ("another tells", 30), ("it is stopped", 1)])
def test_who_knows_only_that_others_are_gone_lets_the_one_that_knows_why_end_first(
    process: SiteProcess, monkeypatch: pytest.MonkeyPatch, happens: str, seconds: float
) -> None:
    notes = process.notes
    assert notes is not None
    events = {
        "nothing": lambda: None,
        "another tells": notes.first_to_tell,
        "it is stopped": lambda: setattr(notes, "stop", signal.SIGUSR1),
    }
    clock = Clock({1.0: events[happens]})
    monkeypatch.setattr(module, "time", clock)
    monkeypatch.setattr(module, "LINGER_SECONDS", 2.0)
    assert end_of(process, SiteError("rank 0 is gone")) == 75
    assert clock.now == pytest.approx(seconds)


def test_rank_0_says_at_once_that_it_knows_why_and_tells_it_when_it_has_left_the_swarm(process: SiteProcess) -> None:
    notes = process.notes
    assert notes is not None
    with pytest.raises(SiteError), process.claiming():
        raise SiteError("rank 1 is gone")
    assert not notes.told
    error = CheckpointError("it does not exist")
    with pytest.raises(CheckpointError), process.running():
        with pytest.raises(CheckpointError), process.claiming():
            raise error
        assert notes.told
        raise error


def test_a_fault_of_our_own_shows_where_once_and_the_site_is_started_again(
    process: SiteProcess, capsys: pytest.CaptureFixture[str]
) -> None:
    assert end_of(process, ZeroDivisionError("oops")) == 75
    said = capsys.readouterr().err
    assert "ZeroDivisionError: oops" in said and "in process 1 of the site" in said
    assert end_of(another(process), ZeroDivisionError("oops")) == 75
    assert capsys.readouterr().err == ""


def test_under_torchrun_errors_go_their_way() -> None:
    with pytest.raises(SiteError), SiteProcess(Place(1, 2, 1), None).running():
        raise SiteError("rank 0 is gone")


def test_swarm_sends_signals_that_nobody_else_sends(process: SiteProcess) -> None:
    assert set(process.signals).isdisjoint(SiteProcess(Place(1, 2, 1), None).signals)


def test_a_signal_from_before_the_handlers_is_heard(process: SiteProcess) -> None:
    stop = threading.Event()
    heard: list[signal.Signals] = []
    assert process.notes is not None
    with stop_on_signals(stop, on_first=heard.append, signals=process.signals):
        process.heed(stop)
        assert not stop.is_set()
        process.notes.stop = signal.SIGUSR2
        process.heed(stop)
        assert stop.wait(10) and heard == [signal.SIGUSR2]


def test_an_orphan_ends_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PARENT_SECONDS", 0.01)
    ended, codes = threading.Event(), []
    parents = iter([1, 1, 1])
    monkeypatch.setattr(os, "getppid", lambda: next(parents, 2))

    def end(code: int) -> None:
        codes.append(code)
        ended.set()

    with ends_with_parent(end_process=end):
        assert ended.wait(10)
    assert codes == [1]
    with ends_with_parent(end_process=end):
        pass
    assert codes == [1]
    ended.clear()
    with ends_with_parent(3, end_process=end):  # it was gone before this process had come so far
        assert ended.wait(10)


def test_epochs_are_noted_for_the_launcher(process: SiteProcess) -> None:
    network = Network(31330, ("tcp://10.0.0.1:4",))
    assert not process.restarted
    process.note_epoch(4, network)
    assert process.notes is not None and (process.notes.epoch, process.notes.network) == (4, network)
    assert process.restarted
    SiteProcess(Place(0, 2, 0), None).note_epoch(4, network)


def test_a_site_whose_old_acquaintances_are_gone_begins_without_them(process: SiteProcess) -> None:
    assert process.notes is not None
    process.notes.network = Network(31330, ("tcp://10.0.0.1:4",))
    assert end_of(process, BootstrapError("nobody answers")) == 75
    assert process.notes.network == Network()
    with pytest.raises(BootstrapError), process.running():
        raise BootstrapError("nobody answers")


def test_how_the_command_ends_is_its_own_affair(process: SiteProcess) -> None:
    with pytest.raises(typer.Exit) as end, process.running():
        raise typer.Exit(130)
    assert end.value.exit_code == 130


def test_torchrun_says_that_it_has_started_a_site_again(monkeypatch: pytest.MonkeyPatch) -> None:
    process = SiteProcess(Place(0, 2, 0), None)
    assert not process.restarted
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert process.restarted
