from __future__ import annotations

import itertools
import json
import os
import signal
from errno import ENOSPC
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import typer

from swarmcli.cli.site import launcher
from swarmcli.cli.site.launcher import samples_in_journal
from swarmcli.cli.site.process import Launch, SiteProcess, WorldRank, world_rank_of_process
from swarmcli.errors import BootstrapError, CheckpointError, FingerprintError, SiteError
from swarmcli.events import EpochAdvanced
from swarmcli.journal import JOURNAL_NAME, Journal, JournalReader, RunRecord
from swarmcli.peer.activity import STAYS_ASKED

RANK = WorldRank(1, 2, 1)


class Site:
    """A process of a site in one of its lives, and where its launcher looks for errors."""

    def __init__(self, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.file = directory / "error.json"
        monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(self.file))

    def end_with(self, error: Exception, life: int = 0) -> tuple[int, str]:
        """The exit code, and what the launcher finds; "": nothing."""
        self.file.unlink(missing_ok=True)
        with pytest.raises(typer.Exit) as end, SiteProcess(RANK, Launch("/home", "store", life)).running():
            raise error
        found = (
            json.loads(self.file.read_text()) if self.file.exists() else {"message": "", "code": end.value.exit_code}
        )
        assert found["code"] == end.value.exit_code
        return end.value.exit_code, found["message"]


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Site:
    return Site(tmp_path, monkeypatch)


def test_a_broken_site_is_started_again_and_what_no_new_start_would_change_is_told_with_its_code(site: Site) -> None:
    assert site.end_with(FingerprintError("another recipe")) == (4, "swarm: another recipe")
    assert site.end_with(typer.Exit(130)) == (130, "")  # how the command ends is its own affair
    assert site.end_with(SiteError("rank 0 is gone")) == (75, "has given up: rank 0 is gone")
    code, said = site.end_with(ZeroDivisionError("oops"))
    assert code == 75, "a fault of our own shows where"
    assert "test_process.py" in said and "ZeroDivisionError: oops" in said and "in process 1 of the site" in said


def test_a_site_whose_contacts_are_gone_when_it_starts_again_tries_again(site: Site) -> None:
    assert site.end_with(BootstrapError("nobody answers"))[0] == 3
    assert site.end_with(BootstrapError("nobody answers"), life=1)[0] == 75


def test_rank_0_tells_an_error_before_it_leaves_the_swarm_and_no_second_time(site: Site) -> None:
    process = SiteProcess(RANK, Launch("/home", "store", 0))
    with pytest.raises(typer.Exit) as end, process.running():
        with pytest.raises(CheckpointError), process.telling():
            raise CheckpointError("it does not exist")
        told = site.file.read_text()
        assert json.loads(told)["message"] == "swarm: it does not exist"
        raise SiteError("rank 1 is gone")  # which follows from that
    assert site.file.read_text() == told and end.value.exit_code == 75


def test_on_a_full_disk_an_error_leaves_no_half_word_for_the_launcher(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    assert site.end_with(FingerprintError("another recipe")) == (4, "")
    assert not site.file.exists(), "torch's launcher would fail on what it cannot read"


def test_under_torchrun_errors_go_their_way_and_its_patience_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    process, ends = SiteProcess(RANK, None), list[int]()
    monkeypatch.setattr("swarmcli.cli.site.process.end_with_parent", ends.append)
    with pytest.raises(SiteError), process.running(), process.telling():
        raise SiteError("rank 0 is gone")
    assert ends == [os.getppid()], "and with torchrun it ends"
    assert process.patience == 10.0 and process.store is None and not process.restarted
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert process.restarted
    monkeypatch.setenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "300")
    assert process.patience == 280.0


def test_its_place_is_what_torchrun_says_and_a_lone_process_is_no_site() -> None:
    for alone in ({}, {"WORLD_SIZE": "4"}, {"RANK": "0", "WORLD_SIZE": "1"}, {"RANK": "0"}):
        assert world_rank_of_process(alone) is None
    environment = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1"}
    assert world_rank_of_process(environment) == WorldRank(rank=5, size=8, local_rank=1)
    with pytest.raises(SiteError, match="RANK='first' and WORLD_SIZE='4' in the environment are no numbers"):
        world_rank_of_process({"RANK": "first", "WORLD_SIZE": "4"})


def test_a_launcher_waits_longer_than_any_peer_stays_and_tells_its_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "environ", os.environ.copy())
    configs = list[Any]()
    monkeypatch.setattr(
        "torch.distributed.launcher.api.elastic_launch", lambda config, _: configs.append(config) or list
    )
    launcher.launch(tmp_path, 0, 2, [])
    (config,) = configs
    if hasattr(config, "shutdown_timeout"):  # an older torch waits for 30 seconds, and its processes know that
        assert config.shutdown_timeout > STAYS_ASKED + 60
        assert SiteProcess(RANK, None).patience > STAYS_ASKED


def test_a_site_that_dies_again_and_again_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

    lives = list[int]()

    def die(home: Path, life: int, *_: object) -> None:
        lives.append(life)
        assert life < 100
        raise ChildFailedError("swarm", {1: ProcessFailure(1, 1234, -9, "")})

    monkeypatch.setattr(launcher, "launch", die)
    with pytest.raises(SiteError, match=r"process 1 of this site was ended by SIGKILL .* the site has ended 6 times"):
        launcher.run_site(tmp_path, 2, [], lambda text: None)
    assert lives == list(range(6))


def test_epochs_between_deaths_make_a_site_worth_starting_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

    run, moments = RunRecord("small", "trainer", "a" * 52), itertools.count(1_790_000_000.0)

    def die(home: Path, life: int, *_: object) -> None:
        with Journal(home / JOURNAL_NAME, run=run, clock=lambda: next(moments)) as journal:
            own = 8 if life < 20 else 0  # later ones it takes over from others
            journal.record(EpochAdvanced(life + 1, "ab", 64, own, 2, 2.5, 8.0, 0.25))
        raise ChildFailedError("swarm", {1: ProcessFailure(1, 1234, -9, "")})

    monkeypatch.setattr(launcher, "launch", die)
    with pytest.raises(SiteError, match="the site has ended 6 times and no epoch has counted"):
        launcher.run_site(tmp_path, 2, [], bool, partial(samples_in_journal, tmp_path, "small"))
    with JournalReader(tmp_path / JOURNAL_NAME) as journal:
        assert journal.epochs("small", limit=1)[-1].epoch == 20 + 5


def test_a_signal_between_two_lives_of_a_site_ends_it_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

    def die(*_: object) -> None:
        raise ChildFailedError("swarm", {1: ProcessFailure(1, 1234, -9, "")})

    def signalled(text: str) -> None:
        raise SignalException(text, signal.SIGINT)  # as torch's handler does, which stays where it was

    monkeypatch.setattr(launcher, "launch", die)
    assert launcher.run_site(tmp_path, 2, [], signalled) == 130
