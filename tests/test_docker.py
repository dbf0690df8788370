"""The image and the compose file, as far as they can be checked without an engine."""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import signal
import subprocess
import time
import urllib.request
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, TextIO

import pytest
import yaml
from fastapi.testclient import TestClient

from coordinator_web.app import create_app
from swarmcli.cli.ending import ExitCode
from swarmcli.cli.main import load
from swarmcli.journal import Journal, RunRecord
from swarmcli.peer.home import Home

ROOT = Path(__file__).parents[1]
COMPOSE = yaml.safe_load((ROOT / "docker" / "compose.yaml").read_text())
SERVICES = COMPOSE["services"]
VARIABLE = re.compile(r"\$\{(\w+):-([^}]*)\}")


def parsed(name: str, **variables: str) -> dict[str, Any]:
    """What the CLI makes of a service's command, as compose gives it."""
    text = VARIABLE.sub(lambda found: variables.get(found[1]) or found[2], SERVICES[name]["command"])
    assert "$" not in text
    verb, *arguments = shlex.split(text)
    context = load(verb).make_context(verb, list(arguments))
    return {**context.params, "verb": verb}


def published(name: str) -> dict[int, int]:
    """Port of the container → port of the machine that everybody can reach."""
    entries = [entry.split(":") for entry in SERVICES[name].get("ports", []) if entry.count(":") == 1]
    return {int(inside): int(outside) for outside, inside in entries}


@pytest.mark.parametrize("name", SERVICES)
def test_every_service_runs_a_command_that_exists_on_a_recipe_that_is_there(name: str) -> None:
    said = parsed(name)
    assert (ROOT / said["recipe"].removeprefix("/")).is_file()
    for contact in said["peer"]:
        host, port = re.fullmatch(r"tcp://([a-z0-9-]+):(\d+)", contact).groups()  # type: ignore[union-attr]
        assert parsed(host)["port"] == int(port)
        assert SERVICES[name]["depends_on"][host] == {"condition": "service_healthy"}


@pytest.mark.parametrize("name", SERVICES)
def test_a_peer_in_a_container_announces_what_leads_to_it_or_does_not_listen(name: str) -> None:
    said = parsed(name, SWARM_HOST="203.0.113.7")
    if said["client_mode"]:
        assert not said["announce"] and not published(name)
        return
    port = said["port"]
    assert published(name)[port] == port
    assert said["announce"] == [f"tcp://203.0.113.7:{port}", f"tcp://{name}:{port}"]
    assert set(parsed(name)["announce"]) == {f"tcp://{name}:{port}"}


def test_the_cast_is_complete_each_with_a_volume_and_somebody_who_can_be_dialed_reduces_for_the_trainers() -> None:
    cast = [(said["verb"], not said["client_mode"]) for said in map(parsed, SERVICES)]
    assert sorted(cast) == [("aux", True), ("join", False), ("join", False), ("monitor", True)]
    kept = {}
    for name, service in SERVICES.items():
        [mounted] = service["volumes"]
        volume, _, place = mounted.partition(":")
        assert parsed(name)["home"].is_relative_to(place), "what the peer writes outlives its container"
        kept[name] = volume
    assert len(set(kept.values())) == len(SERVICES), "two peers would have one identity"
    assert set(kept.values()) <= set(COMPOSE["volumes"])


def test_what_the_image_copies_is_there() -> None:
    dockerfile = (ROOT / "docker" / "Dockerfile").read_text()
    copied = " ".join(re.findall(r"^COPY (?!--from)(.+) \S+$", dockerfile, re.MULTILINE))
    sources = [word for word in copied.split() if not word.startswith("--")]
    assert {"pyproject.toml", "swarmcli", "coordinator_web", "recipes"} <= set(sources)
    assert all((ROOT / source).exists() for source in sources)
    ignored = (ROOT / ".dockerignore").read_text().split()
    assert not set(sources) & set(ignored)
    for service in SERVICES.values():
        assert f"docker/{service['entrypoint']}" in sources


# Whether a peer is well


def test_the_monitor_is_well_when_its_dashboard_answers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    kind, _python, _option, code = SERVICES["monitor"]["healthcheck"]["test"]
    asked: list[urllib.request.Request] = []
    said = parsed("monitor")
    home = Home.at(tmp_path)
    token = home.dashboard_token()
    home.release()

    def read(path: str) -> TextIO:
        return (tmp_path / Path(path).relative_to(said["home"])).open()

    monkeypatch.setattr(urllib.request, "urlopen", lambda request, timeout: asked.append(request))
    exec(compile(code, "healthcheck", "exec"), {"open": read})
    address, _, path = asked[0].full_url.removeprefix("http://").partition("/")
    assert kind == "CMD" and said["web_host"] == "0.0.0.0" and address == f"127.0.0.1:{said['web']}"
    source: Any = SimpleNamespace(look=lambda: {"state": "training"})
    client = TestClient(create_app(source, token=token), base_url=f"http://{address}")
    assert client.get(f"/{path}").status_code == 401
    assert client.get(f"/{path}", headers=dict(asked[0].header_items())).status_code == 200


@pytest.fixture
def healthy() -> ModuleType:
    spec = importlib.util.spec_from_file_location("healthy", ROOT / "docker" / "healthy.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_others_are_well_while_their_journal_says_so(healthy: ModuleType, tmp_path: Path) -> None:
    for name in set(SERVICES) - {"monitor"}:
        assert SERVICES[name]["healthcheck"]["test"][-1] == "/usr/local/bin/healthy.py"
    assert Path(healthy.JOURNAL).parent == parsed("trainer-1")["home"]
    path = tmp_path / Path(healthy.JOURNAL).name
    assert "unable to open" in healthy.main(str(path))
    description = RunRecord("run", "trainer", "peer", "name", "0.1")
    journal = Journal(path, run=description, clock=time.time)
    journal.flush()
    assert healthy.main(str(path)) is None
    journal.close("done")
    assert healthy.main(str(path)) == "no run is under way"
    late = Journal(path, run=description, clock=lambda: time.time() - 3600)
    late.flush()
    assert healthy.main(str(path)).startswith("no sign of life for 3")
    late.close("done")


# Starting again

FAKE = """#!/bin/sh
echo "$@" >> "$DIRECTORY/started"
code=$(head -n 1 "$DIRECTORY/codes")
sed -i 1d "$DIRECTORY/codes"
[ "$code" = wait ] || exit "$code"
trap 'exit 0' TERM
touch "$DIRECTORY/waits"
while :; do sleep 0.05; done
"""


def start(place: Path, codes: list[int | str]) -> subprocess.Popen[str]:
    """keep-running.sh around a `swarm` that ends with these codes."""
    fake = place / "swarm"
    fake.write_text(FAKE)
    fake.chmod(0o755)
    (place / "codes").write_text("".join(f"{code}\n" for code in codes))
    environment = {"PATH": f"{place}:{os.environ['PATH']}", "DIRECTORY": str(place), "SWARM_PAUSE": "0"}
    script = ROOT / "docker" / SERVICES["trainer-1"]["entrypoint"]
    return subprocess.Popen([script, "join", "a recipe"], env=environment, stderr=subprocess.PIPE, text=True)


def started(place: Path) -> list[str]:
    return (place / "started").read_text().splitlines()


@pytest.mark.parametrize("code", [ExitCode.DONE, ExitCode.REFUSED])
def test_what_would_only_repeat_itself_ends_the_container(tmp_path: Path, code: int) -> None:
    assert start(tmp_path, [int(code), 0]).wait(60) == code
    assert started(tmp_path) == ["join a recipe"]


def test_what_may_pass_is_tried_again_but_not_forever(tmp_path: Path) -> None:
    assert start(tmp_path, [1, int(ExitCode.NO_CONTACT), 137, 0]).wait(60) == 0
    assert len(started(tmp_path)) == 4
    assert start(tmp_path, [1] * 9).wait(60) == 1
    assert len(started(tmp_path)) == 4 + 6


def test_a_container_that_is_stopped_lets_its_peer_say_goodbye(tmp_path: Path) -> None:
    running = start(tmp_path, [1, "wait"])
    deadline = time.monotonic() + 60
    while not (tmp_path / "waits").exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    running.send_signal(signal.SIGTERM)
    assert running.wait(60) == 0
    assert len(started(tmp_path)) == 2
