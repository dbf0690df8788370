"""A user's own command and the peers that run on the computer: found, shown, stopped, forgotten once killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from swarmcli.machine.registry import VARIABLE, LocalPeers
from tests.end_to_end import forked
from tests.end_to_end.swarm import Swarm

pytestmark = pytest.mark.e2e

MakeSwarm = Callable[..., Swarm]


@pytest.fixture(autouse=True)
def registry(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> LocalPeers:
    monkeypatch.setenv(VARIABLE, str(tmp_path / "registry"))
    return LocalPeers()


def command(*words: str) -> subprocess.CompletedProcess[str]:
    return forked.command(words, os.environ)


def shown() -> dict[str, Any]:
    """What `swarm status` shows, by name. A busy peer may not answer within the few seconds that the command waits; it
    then has no `state`."""
    return {each["name"]: each for each in json.loads(command("status", "--json").stdout)}


def test_peers_are_found_stopped_and_forgotten(swarm: MakeSwarm, registry: LocalPeers) -> None:
    run = swarm(100_000)
    monitor = run.start_monitor()
    ada = run.start("join", "ada")
    run.wait_for_epoch("ada", 2, ada, monitor)
    found: dict[str, Any] = {}

    def both_answer() -> bool:
        found.update(shown())
        return len(found) == 2 and all("state" in each for each in found.values())

    run.wait(both_answer, "both answer", ada, monitor)
    assert {name: each["role"] for name, each in found.items()} == {"ada": "trainer", "monitor": "monitor"}
    assert found["ada"]["state"]["run"]["epoch"] >= 2 and found["ada"]["state"]["can_control"]
    run.wait(lambda: "Training at" in command("status").stdout, "it says what it does", ada, monitor)
    assert f"{found['monitor']['page'].partition('?')[0]}" == run.told("monitor")["dashboard"]
    os.kill(monitor.pid, signal.SIGKILL)
    run.wait_for_end(monitor, -signal.SIGKILL)
    assert list(shown()) == ["ada"]
    assert {file.stem for file in registry.directory.iterdir()} == {registry.peers()[0].stem}
    assert command("stop", "--peer", "monitor").returncode == 1
    done = command("stop", "--peer", "ada")
    assert (done.returncode, done.stdout) == (0, "") and "ada (trainer of test-run): has stopped" in done.stderr
    run.wait_for_end(ada)
    assert ada.last_words(1).startswith(
        "saved epoch"
    ) and "because you asked (swarm stop, or the page)" in ada.last_words(40)
    assert shown() == {} and list(registry.directory.iterdir()) == []


def test_one_that_hangs_is_shown_and_can_be_ended(swarm: MakeSwarm, registry: LocalPeers) -> None:
    run = swarm(100_000)
    auxiliary = run.start_contact("aux", "bob")
    os.kill(auxiliary.pid, signal.SIGSTOP)
    assert "bob (process" in shown()["bob"]["error"]
    assert command("stop", "--now").returncode == 0
    run.wait_for_end(auxiliary, -signal.SIGKILL)
    assert shown() == {}
