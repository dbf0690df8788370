from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from filelock import FileLock

from swarmcli.cli.site import launcher
from swarmcli.cli.site.launcher import PREFIX, Launcher, LauncherOptions, environment
from swarmcli.errors import SiteError

pytestmark = pytest.mark.e2e

# A process of a site that needs no torch: its actions come behind this.
PROCESS = """
import json, os, signal, sys, time
from pathlib import Path
from swarmcli.cli.site.link import Failed, LauncherLink, Past
rank, here, launcher = int(os.environ["RANK"]), Path(__file__).parent, os.getppid()
told = dict(os.environ)
link = LauncherLink.found()
link.on_stop(lambda number, again: os._exit(0))
life = int(link.start.store.rpartition("-")[2])
whole = here / f"rank-{rank}.{life}"
whole.with_name("new-" + whole.name).write_text(json.dumps({**told, "store": link.start.store, "pid": os.getpid()}))
whole.with_name("new-" + whole.name).rename(whole)
while len(list(here.glob(f"rank-*.{life}"))) < 2:  # nobody dies before the other is there: it would be killed unseen
    time.sleep(0.01)

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
        return dict(json.loads((self.directory / f"rank-{rank}.1").read_text()))


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Site:
    monkeypatch.setattr(launcher, "LAUNCHER", LauncherOptions(grace=0.3))
    return Site(tmp_path)


def test_every_process_knows_its_place_and_nothing_is_left(site: Site) -> None:
    before, children = dict(os.environ), psutil.Process().children()
    assert site.run("assert os.stat(Path(link.start.store).parent).st_mode & 0o777 == 0o700") == 0
    assert [site.environment(rank)["RANK"] for rank in range(2)] == ["0", "1"]
    told = site.environment(1)
    assert (told["WORLD_SIZE"], told["LOCAL_RANK"], told["LOCAL_WORLD_SIZE"]) == ("2", "1", "2")
    assert told.get("OMP_NUM_THREADS") == before.get("OMP_NUM_THREADS")  # the processes share the cores by themselves
    assert not Path(told["store"]).parent.exists()
    assert os.environ == before
    assert psutil.Process().children() == children
    assert site.said == []


def test_processes_talk_to_each_other_on_loopback_whatever_the_user_has_for_other_programs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth0")
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "eth")
    told = environment(0, 2)
    addresses = psutil.net_if_addrs()[told["GLOO_SOCKET_IFNAME"]]
    assert "127.0.0.1" in [each.address for each in addresses]
    assert told["NCCL_SOCKET_IFNAME"] == "=" + told["GLOO_SOCKET_IFNAME"]


def test_what_a_killed_launcher_has_left_is_removed_by_a_later_one(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    stale, fresh, held = [tmp_path / f"{PREFIX}{name}" for name in ("stale", "fresh", "held")]
    for directory in (stale, fresh, held):
        directory.mkdir()
        (directory / "life-1").touch()
        at = time.time() - (0 if directory is fresh else LauncherOptions().stale + 60)
        os.utime(directory, (at, at))
    with FileLock(held / "in-use"):
        os.utime(held, (0, 0))  # the lock's file has just made it young
        assert site.run("") == 0
    assert sorted(tmp_path.glob(f"{PREFIX}*")) == [fresh, held]


def test_what_would_only_repeat_itself_is_not_started_again(site: Site) -> None:
    actions = """
if rank == 0:
    link.tell(Failed(75, "an oddity"))
else:
    link.tell(Failed(4, "another recipe"))
wait()
"""
    assert site.run(actions) == 4
    assert site.lives() == 1 and site.said == ["another recipe"]
    assert site.run("sys.exit(2) if rank == 1 else sys.exit(75)") == 2


def test_a_site_that_dies_again_and_again_is_given_up(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launcher, "LAUNCHER", replace(launcher.LAUNCHER, max_deaths=3))
    with pytest.raises(SiteError, match=r"process 0 of this site has given up; that was the end number 3 of this site"):
        site.run("link.tell(Failed(75, 'a fault')) if rank == 0 else wait()")
    assert site.lives() == 3 and site.said.count("a fault") == 3


def test_epochs_between_deaths_make_a_site_worth_starting_again(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launcher, "LAUNCHER", replace(launcher.LAUNCHER, max_deaths=2))
    assert site.run("if rank == 0:\n    link.tell(Past(life))\n    if life < 4: kill_self()") == 0
    assert site.lives() == 4 and len(site.said) == 3
    assert set(site.said) == {
        "process 0 of this site was ended by SIGKILL (perhaps there is too little memory); the site starts again from "
        "its last state (1 of 1)"
    }


@pytest.mark.parametrize(("number", "code"), [("SIGINT", 130), ("SIGTERM", 0)])
def test_a_signal_is_passed_on_and_ends_the_site_in_order(site: Site, number: str, code: int) -> None:
    assert site.run(f"os.kill(os.getppid(), signal.{number}) if rank == 0 else None\nwait()") == code
    assert site.lives() == 1 and site.said == []


def test_a_second_signal_is_passed_on_and_a_third_ends_what_does_not_stop(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    codes: list[int] = []
    monkeypatch.setattr(os, "_exit", codes.append)
    actions = """
link.on_stop(lambda number, again: os.kill(launcher, signal.SIGINT) if rank == 0 else None)
if rank == 0:
    os.kill(launcher, signal.SIGINT)
wait()
"""
    assert site.run(actions) == 130
    assert codes[0] == 130


@pytest.mark.parametrize("death", ["ABRT", "SEGV"])
def test_who_died_by_itself_is_the_cause_but_for_nccls_watchdog(site: Site, death: str) -> None:
    actions = f"""
if life == 1:
    kill_self(signal.SIG{death}) if rank == 1 else kill_self(signal.SIGSTOP)
"""
    assert site.run(actions) == 0
    [line] = site.said
    expected = (
        "process 0 of this site did not answer" if death == "ABRT" else "process 1 of this site was ended by SIGSEGV"
    )
    assert line.startswith(expected)


