"""`swarm service`: what the managers of the three systems are told, and how they are asked."""

from __future__ import annotations

import plistlib
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from swarmcli.cli import service
from swarmcli.cli.service import Launchd, Service, Systemd, TaskScheduler
from swarmcli.errors import RecipeError, SwarmError, UsageError
from swarmcli.recipe.templates import compose
from tests.cli.typed import typed

SERVICE = Service(
    'lab-"1"',
    ["/opt/py thon", "-m", "swarmcli", "join", "/r/100%/$HOME.yaml"],
    {"SWARM_CONFIG": "/c d"},
    Path("/l/log"),
)


@pytest.fixture
def here(here: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    monkeypatch.setenv("PATH", str(here))
    monkeypatch.setattr(service, "manager", Systemd)
    (here / "my.yaml").write_text(compose("my.yaml", "my-run"))
    return here


def stand_in(here: Path, script: str) -> None:
    """A systemctl that notes what it is asked."""
    for name in ("systemctl", "loginctl"):
        file = here / name
        file.write_text(f'#!/bin/sh\necho "$0 $*" >> {here}/asked\n{script}\n')
        file.chmod(0o755)


def said(*words: str) -> str:
    return typed(service.app)(*words).stdout


def test_managers_read_what_is_meant_whatever_is_in_it() -> None:
    text = Systemd().text(SERVICE)
    assert 'ExecStart="/opt/py thon" "-m" "swarmcli" "join" "/r/100%%/$$HOME.yaml"\n' in text
    assert 'Environment="SWARM_CONFIG=/c d"\n' in text
    assert "Restart=on-failure" in text and "RestartPreventExitStatus=2 4" in text
    agent = plistlib.loads(Launchd().text(SERVICE).encode())
    assert agent["ProgramArguments"] == SERVICE.command and agent["KeepAlive"] == {"SuccessfulExit": False}
    task = ElementTree.fromstring(TaskScheduler().text(SERVICE))
    space = {"t": "http://schemas.microsoft.com/windows/2004/02/mit/task"}
    arguments = task.findtext(".//t:Arguments", namespaces=space) or ""
    assert '"/opt/py thon" -m swarmcli join' in arguments and 'set "SWARM_CONFIG=/c d" &' in arguments
    assert task.findtext(".//t:LogonType", namespaces=space) == "S4U"


def test_a_service_is_installed_shown_and_removed(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stand_in(here, 'case "$*" in *ActiveState*) echo active;; *Linger*) echo yes;; esac')
    said("install", "my.yaml", "--role", "monitor", "--", "--web", "0")
    file = here / "config" / "systemd" / "user" / "swarm-my-run-monitor.service"
    assert (
        f'"{sys.executable}" "-m" "swarmcli" "monitor" "{here / "my.yaml"}" "--quiet" "--web" "0"' in file.read_text()
    )
    assert "hf_secret" not in file.read_text() and f"SWARM_DATA_DIR={here / 'data'}" in file.read_text()
    assert file.stat().st_mode & 0o777 == 0o600
    asked = (here / "asked").read_text()
    assert asked.index("daemon-reload") < asked.index("enable --now swarm-my-run-monitor.service")
    assert said("status") == "my-run-monitor: runs\n"
    assert '"running": true' in said("status", "--json")
    said("remove")
    assert not file.exists() and "disable --now swarm-my-run-monitor.service" in (here / "asked").read_text()
    assert said("status") == ""


def test_one_that_does_not_run_is_told_and_the_exit_code_says_so(here: Path) -> None:
    stand_in(here, 'case "$*" in *ActiveState*) echo failed;; esac')
    said("install", "my.yaml")
    assert typed(service.app)("status", code=1).stdout == "my-run: does not run (failed)\n"
    with pytest.raises(UsageError, match="there is no service other; there are: my-run"):
        said("status", "other")
    with pytest.raises(UsageError, match="name one of the services: my-run"):
        said("remove", "other")


def test_without_a_manager_the_command_to_start_otherwise_is_named(here: Path) -> None:
    with pytest.raises(SwarmError, match=r"systemctl, which starts services .*, is not there\nwithout it.*\n.*join"):
        said("install", "my.yaml")
    assert not list(here.rglob("*.service"))
    stand_in(here, "echo Failed to connect to bus >&2; exit 1")
    with pytest.raises(SwarmError, match=r"daemon-reload` failed: Failed to connect to bus\nwithout it"):
        said("install", "my.yaml")


def test_what_stands_behind_the_dashes_is_checked_as_the_verb_would(here: Path) -> None:
    stand_in(here, "")
    with pytest.raises(RecipeError, match=r"no_such_key"):
        said("install", "my.yaml", "--", "--set", "no_such_key=1")
    with pytest.raises(RecipeError, match=r"upload"):
        said("install", "my.yaml", "--role", "auxiliary", "--", "--limit", "upload=3 apples")
    assert "No such option: --wbe" in typed(service.app)("install", "my.yaml", "--", "--wbe", "0", code=2).output
    assert not list(here.rglob("*.service"))
    done = typed(service.app)(
        "install", "my.yaml", "--", "--set", "run_id=other", "-q", "--nproc", "2", "--announce", "tcp://h:1"
    )
    assert "the service other runs" in done.stderr, "it is the peer that is to be quiet"
    assert [file.name for file in here.rglob("*.service")] == ["swarm-other.service"]


def test_one_of_the_same_run_is_replaced(here: Path) -> None:
    stand_in(here, "")
    (here / "another.yaml").write_text(compose("my.yaml", "my-run"))
    assert "already" not in typed(service.app)("install", "my.yaml").stderr
    assert f"the service my-run is there already; from now on it starts {here / 'another.yaml'}" in typed(service.app)(
        "install", "another.yaml"
    ).stderr.replace("\n", "")
    (file,) = here.rglob("*.service")
    assert "another.yaml" in file.read_text() and "my.yaml" not in file.read_text()
