"""The image and the compose file, as far as they can be checked without an engine."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import yaml
from typer.main import get_command

from swarmcli.cli.main import app

ROOT = Path(__file__).parents[1]
COMPOSE = yaml.safe_load((ROOT / "docker" / "compose.yaml").read_text())
SERVICES = COMPOSE["services"]


@pytest.mark.parametrize("name", SERVICES)
def test_every_service_runs_a_command_that_exists(name: str) -> None:
    verb, *arguments = shlex.split(SERVICES[name]["command"])
    command = get_command(app).commands[verb]  # type: ignore[attr-defined]
    context = command.make_context(verb, list(arguments))
    recipe = context.params["recipe"]
    assert (ROOT / recipe.relative_to("/")).is_file()
    for contact in context.params["peer"]:
        host = re.fullmatch(r"tcp://([a-z0-9-]+):31330", contact)
        assert host is not None and host[1] in SERVICES


def test_the_cast_is_complete() -> None:
    verbs = sorted(service["command"].split()[0] for service in SERVICES.values())
    assert verbs == ["aux", "join", "join", "monitor"]
    assert "--client-mode" in SERVICES["auxiliary"]["command"]


def test_every_service_keeps_its_files_in_a_volume_of_its_own() -> None:
    mounted = [service["volumes"] for service in SERVICES.values()]
    assert sorted(volume.partition(":")[0] for [volume] in mounted) == sorted(COMPOSE["volumes"])
    assert all("--home /runs" in service["command"] for service in SERVICES.values())


def test_published_ports_are_those_that_the_monitor_is_told() -> None:
    command = SERVICES["monitor"]["command"]
    inside = [entry.rpartition(":")[2] for entry in SERVICES["monitor"]["ports"]]
    assert inside == ["31330", "8080"]
    assert "--port 31330" in command and "--web 8080" in command


def test_what_the_image_copies_is_there() -> None:
    dockerfile = (ROOT / "docker" / "Dockerfile").read_text()
    sources = [
        source
        for line in re.findall(r"^COPY (?!--from)(.+)$", dockerfile, re.MULTILINE)
        for source in line.split()[:-1]
    ]
    assert {"pyproject.toml", "swarmcli", "coordinator_web", "recipes"} <= set(sources)
    assert all((ROOT / source).exists() for source in sources)
    ignored = (ROOT / ".dockerignore").read_text().split()
    assert not set(sources) & set(ignored)
