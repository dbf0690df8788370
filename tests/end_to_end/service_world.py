"""A user manager of systemd in namespaces of its own, which test_service.py runs under `unshare`: a monitor is
installed as a service from a session that ends, then killed, then removed. Prints what was seen as one JSON object."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

SECONDS = 120.0  # for anything, on a busy machine


def until(look: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + SECONDS
    while not (found := look()):
        if time.monotonic() > deadline:
            raise TimeoutError
        time.sleep(0.1)
    return found


def ask(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


def peers(recipe: Path) -> list[int]:
    """The processes of the service."""
    return [each.pid for each in psutil.process_iter() if str(recipe) in _words(each) and "--quiet" in _words(each)]


def _words(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def swarm(*words: str) -> subprocess.CompletedProcess[str]:
    """Runs `swarm` in a session of its own, of which no process is left when this returns, as after a logout."""
    return subprocess.run(
        [sys.executable, "-m", "swarmcli", *words], capture_output=True, text=True, start_new_session=True
    )


def main(recipe: Path) -> dict[str, Any]:
    Path("/run/systemd").mkdir(exist_ok=True)
    subprocess.run(["mount", "-t", "tmpfs", "none", "/run/systemd"], check=True)
    Path("/run/systemd/system").mkdir()  # by this directory programs see that systemd is there
    with subprocess.Popen(["/lib/systemd/systemd", "--user", "--log-target=console"], stderr=subprocess.DEVNULL) as it:
        until(lambda: ask("systemctl", "--user", "show", "-p", "Version"))
        installed = swarm("service", "install", str(recipe), "--role", "monitor", "--", "--web", "0")
        soon = Path(os.environ["XDG_CONFIG_HOME"]) / "systemd/user/swarm-small-monitor.service.d/soon.conf"
        soon.parent.mkdir(parents=True)
        soon.write_text("[Service]\nRestartSec=0\n")
        ask("systemctl", "--user", "daemon-reload")
        unit = soon.parent.with_suffix("")
        checked = subprocess.run(["systemd-analyze", "--user", "verify", str(unit)], capture_output=True, text=True)
        home = recipe.parent / "runs" / "small" / "monitor-1"
        until((home / "peer.json").exists)
        (first,) = peers(recipe)
        os.kill(first, signal.SIGKILL)
        (second,) = until(lambda: [pid for pid in peers(recipe) if pid != first])
        status = json.loads(swarm("service", "status", "--json").stdout)
        removed = swarm("service", "remove")
        until(lambda: not peers(recipe))
        it.terminate()
    return {
        "installed": installed.stderr,
        "complaints": [line for line in checked.stderr.splitlines() if unit.name in line],
        "again": second != first,
        "status": status,
        "removed": removed.stderr,
        "left": unit.exists(),
    }


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]))))
