from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import psutil
import pytest
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from swarmcli.cli.site import launcher
from swarmcli.cli.site.launcher import Launcher, cause, final_code
from swarmcli.errors import SiteError

pytestmark = pytest.mark.processes

# A process of a site that needs nothing but Python: `act(rank, life)` says what it does.
PROCESS = """
import json, os, signal, sys, time
from pathlib import Path
rank, notes = int(os.environ["RANK"]), Path(os.environ["SWARM_SITE_NOTES"])
here = Path(__file__).parent
signal.signal(signal.SIGUSR1, lambda *_: sys.exit(0))
signal.signal(signal.SIGUSR2, lambda *_: sys.exit(0))
(here / f"rank-{rank}.{len(list(here.glob(f'rank-{rank}.*')))}").write_text(json.dumps(dict(os.environ)))
life = len(list(here.glob(f"rank-{rank}.*")))

def kill_self(number=signal.SIGKILL):
    os.kill(os.getpid(), number)

def wait():
    while True:
        time.sleep(60)

"""


class Site:
    """A site of two such processes, and what its launcher said."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.said: list[str] = []

    def run(self, actions: str) -> int:
        script = self.directory / "process.py"
        script.write_text(PROCESS + actions)
        return Launcher([str(script)], 2, say=self.said.append).run()

    def lives(self) -> int:
        return len(list(self.directory.glob("rank-0.*")))

    def environment(self, rank: int) -> dict[str, str]:
        return dict(json.loads((self.directory / f"rank-{rank}.0").read_text()))


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path)


def test_every_process_knows_its_place_and_nothing_is_left(site: Site) -> None:
    before, children = dict(os.environ), psutil.Process().children()
    assert site.run("") == 0
    assert [site.environment(rank)["RANK"] for rank in range(2)] == ["0", "1"]
    told = site.environment(1)
    assert (told["WORLD_SIZE"], told["LOCAL_RANK"], told["MASTER_ADDR"]) == ("2", "1", "127.0.0.1")
    assert told.get("OMP_NUM_THREADS") == before.get("OMP_NUM_THREADS")  # the processes share the cores by themselves
    assert not Path(told["SWARM_SITE_NOTES"]).exists()
    assert os.environ == before
    assert psutil.Process().children() == children
    assert site.said == []


def test_what_would_only_repeat_itself_is_not_started_again(site: Site) -> None:
    assert site.run("sys.exit(4) if rank == 1 else wait()") == 4
    assert site.lives() == 1 and site.said == []


def test_after_a_death_all_processes_start_again(site: Site) -> None:
    assert site.run("if life == 1: kill_self() if rank == 1 else wait()") == 0
    assert site.lives() == 2
    assert site.said == [
        "process 1 of this site was ended by SIGKILL (perhaps there is too little memory); the site starts again from "
        "its last state (1 of 5)"
    ]


def test_a_site_that_dies_again_and_again_is_given_up(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launcher, "MAX_DEATHS", 3)
    with pytest.raises(SiteError, match=r"process 0 of this site has given up; that was the end number 3 of this site"):
        site.run("sys.exit(75) if rank == 0 else wait()")
    assert site.lives() == 3 and len(site.said) == 2


def test_epochs_between_deaths_make_a_site_worth_starting_again(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launcher, "MAX_DEATHS", 2)
    assert site.run("(notes / 'epoch').write_text(str(life))\nif life < 4 and rank == 0: kill_self()") == 0
    assert site.lives() == 4
    assert all("(1 of 1)" in line for line in site.said)


def test_a_frozen_process_is_ended_when_another_says_that_the_site_is_broken(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launcher, "GRACE_SECONDS", 0.3)
    actions = """
if life == 1 and rank == 1:
    kill_self(signal.SIGSTOP)
if life == 1:
    (notes / f"broken.{os.getpid()}").touch()
    time.sleep(60)
"""
    assert site.run(actions) == 0
    assert site.said[0].startswith("process 1 of this site did not answer any more")


def test_a_process_that_gave_up_and_came_to_no_end_was_not_killed_by_a_lack_of_memory(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launcher, "GRACE_SECONDS", 0.3)
    actions = """
if life == 1:
    (notes / f"broken.{os.getpid()}").touch()
    wait()
"""
    assert site.run(actions) == 0
    assert site.said[0].startswith("process 0 of this site has given up;")


@pytest.mark.parametrize(("number", "code"), [("SIGINT", 130), ("SIGTERM", 0)])
def test_a_signal_is_passed_on_and_ends_the_site_in_order(site: Site, number: str, code: int) -> None:
    assert site.run(f"os.kill(os.getppid(), signal.{number}) if rank == 0 else None\nwait()") == code
    assert site.lives() == 1 and site.said == []


def test_a_second_signal_ends_what_does_not_stop(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    codes: list[int] = []
    monkeypatch.setattr(os, "_exit", codes.append)
    actions = """
signal.signal(signal.SIGUSR1, lambda *_: os.kill(os.getppid(), signal.SIGINT) if rank == 0 else None)
if rank == 0:
    os.kill(os.getppid(), signal.SIGINT)
wait()
"""
    assert site.run(actions) == 130
    assert codes[0] == 130


def failure(rank: int, code: int, pid: int = 0) -> ProcessFailure:
    return ProcessFailure(local_rank=rank, pid=pid, exitcode=code, error_file="")


def test_the_first_cause_is_told_and_not_what_followed_from_it() -> None:
    assert cause({0: failure(0, 75), 1: failure(1, -signal.SIGSEGV), 2: failure(2, -signal.SIGTERM)}) == (
        "process 1 of this site was ended by SIGSEGV"
    )
    assert cause({0: failure(0, -signal.SIGTERM), 1: failure(1, 75)}) == "process 1 of this site has given up"
    assert "did not answer" in cause({1: failure(1, -signal.SIGKILL, pid=7)}, {7})


def test_what_the_launcher_has_killed_itself_is_not_taken_for_the_cause() -> None:
    killed = {1: failure(1, -signal.SIGKILL, pid=7)}
    assert cause(killed, (), {7}) == "process 1 of this site has given up"
    assert cause({**killed, 2: failure(2, -signal.SIGSEGV, pid=8)}, (), {7}).startswith("process 2 of this site was")


def test_only_a_process_that_knew_what_it_did_ends_the_site_for_good() -> None:
    assert final_code({0: failure(0, 75), 1: failure(1, 2)}) == 2
    assert final_code({0: failure(0, 75), 1: failure(1, -9)}) is None
