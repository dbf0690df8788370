"""`swarm service` with the real user manager of systemd."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from swarmcli.recipe.templates import compose

WORLD = ["unshare", "--mount", "--pid", "--fork", "--mount-proc", "--kill-child"]
ROOT = Path(__file__).parent.parent.parent


def can_be_had() -> bool:
    return (
        Path("/lib/systemd/systemd").exists() and subprocess.run([*WORLD, "true"], capture_output=True).returncode == 0
    )


@pytest.mark.e2e
def test_a_service_outlives_its_session_and_is_started_again(tmp_path: Path) -> None:
    if not can_be_had():
        pytest.skip("no systemd, or no namespaces, on this machine")
    recipe = tmp_path / "small.yaml"
    recipe.write_text(compose("small.yaml", "small"))
    environment = {
        **os.environ,
        "HOME": str(tmp_path),
        "XDG_CONFIG_HOME": str(tmp_path / "config"),
        "XDG_RUNTIME_DIR": str(tmp_path / "runtime"),
        "SWARM_RUNTIME_DIR": str(tmp_path / "peers"),
        "SWARM_DATA_DIR": str(tmp_path / "data"),
        "PYTHONPATH": str(ROOT),
    }
    (tmp_path / "runtime").mkdir(mode=0o700)
    command = [*WORLD, sys.executable, "-m", "tests.end_to_end.service_world", str(recipe)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout.splitlines()[-1])
    assert "the service small-monitor runs" in seen["installed"] and not seen["complaints"]
    assert seen["again"] and seen["status"]["running"] and seen["status"]["state"] == "active"
    assert "small-monitor is gone" in seen["removed"] and not seen["left"]
