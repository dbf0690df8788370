from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from swarmcli.cli.site.launcher import environment, run_site
from swarmcli.cli.site.process import Launch

pytestmark = pytest.mark.e2e

# A process of a site that needs no torch: its actions come behind this.
PROCESS = """
import json, os, signal, sys, time
from pathlib import Path
launch, rank, launcher = json.loads(os.environ["SWARM_SITE"]), int(os.environ["RANK"]), os.getppid()
life, home = launch["life"], Path(launch["home"])
signal.signal(signal.SIGINT, lambda *_: sys.exit(130))
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
whole = home / f"rank-{rank}.{life}"
whole.with_name("new-" + whole.name).write_text(json.dumps({**os.environ, "pid": os.getpid()}))
whole.with_name("new-" + whole.name).rename(whole)
while len(list(home.glob(f"rank-*.{life}"))) < 2:  # nobody dies before the other is there: it would be killed unseen
    time.sleep(0.01)

def tell(code, words):
    told = {"message": words, "timestamp": int(time.time()), "code": code}
    Path(os.environ["TORCHELASTIC_ERROR_FILE"]).write_text(json.dumps(told))

def wait():
    while True:
        time.sleep(60)

"""


class Site:
    """A site of two such processes, and what its launcher said."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.said: list[str] = []

    def run(self, actions: str) -> int:
        script = self.home / "process.py"
        script.write_text(PROCESS + actions)
        return run_site(self.home, 2, [str(script)], self.said.append)

    def lives(self) -> int:
        return len(list(self.home.glob("rank-0.*")))

    def environment(self, rank: int) -> dict[str, str]:
        return dict(json.loads((self.home / f"rank-{rank}.0").read_text()))


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    monkeypatch.setattr(os, "environ", os.environ.copy())
    yield Site(tmp_path)
    for number, handler in handlers.items():
        signal.signal(number, handler)


def test_every_process_knows_its_place_and_nothing_is_left(site: Site) -> None:
    children, threads = psutil.Process().children(), os.environ.get("OMP_NUM_THREADS")
    assert site.run("assert os.stat(Path(launch['store']).parent).st_mode & 0o777 == 0o700") == 0
    assert [site.environment(rank)["RANK"] for rank in range(2)] == ["0", "1"]
    told = site.environment(1)
    assert (told["WORLD_SIZE"], told["LOCAL_RANK"], told["LOCAL_WORLD_SIZE"]) == ("2", "1", "2")
    assert told.get("OMP_NUM_THREADS") == threads  # the processes share the cores by themselves
    assert psutil.Process().children() == children
    assert site.said == []


def test_processes_talk_to_each_other_on_loopback_whatever_the_user_has_for_other_programs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth0")
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "eth")
    told = os.environ | environment(Launch("", "", 0))
    addresses = psutil.net_if_addrs()[told["GLOO_SOCKET_IFNAME"]]
    assert "127.0.0.1" in [each.address for each in addresses]
    assert told["NCCL_SOCKET_IFNAME"] == "=" + told["GLOO_SOCKET_IFNAME"]


def test_what_would_only_repeat_itself_is_not_started_again(site: Site) -> None:
    actions = """
if rank == 0:
    tell(75, "an oddity")
    sys.exit(75)
tell(4, "another recipe")
signal.signal(signal.SIGTERM, signal.SIG_DFL)
wait()
"""
    assert site.run(actions) == 4
    assert site.lives() == 1 and site.said == ["another recipe"]
    assert site.run("sys.exit(2) if rank == 1 else wait()") == 2


@pytest.mark.parametrize(("number", "code"), [("SIGINT", 130), ("SIGTERM", 0)])
def test_a_signal_is_passed_on_and_ends_the_site_in_order(site: Site, number: str, code: int) -> None:
    assert site.run(f"os.kill(launcher, signal.{number}) if rank == 0 else None\nwait()") == code
    assert site.lives() == 1 and site.said == []


def test_a_second_signal_is_passed_on_too(site: Site) -> None:
    actions = """
signal.signal(signal.SIGINT, lambda *_: os.kill(launcher, signal.SIGINT) if rank == 0 else None)
(home / f"ready-{rank}").touch()
while len(list(home.glob("ready-*"))) < 2:
    time.sleep(0.01)
os.kill(launcher, signal.SIGINT) if rank == 0 else None
wait()
"""
    assert site.run(actions) == 130
