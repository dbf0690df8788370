"""`swarm doctor` beside a real peer, and after it was killed."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.end_to_end.forked import command
from tests.end_to_end.swarm import Swarm

pytestmark = pytest.mark.e2e


def test_all_is_well_with_a_run_until_its_peer_is_killed(swarm: Callable[..., Swarm], tmp_path: Path) -> None:
    run = swarm(5)
    data = ["--set", f"local.data_dir={run.directory}"]
    own = {"SWARM_DATA_DIR": str(tmp_path / "data"), "SWARM_RUNTIME_DIR": str(tmp_path / "runtime")}

    def doctor(*words: str) -> tuple[int, list[dict[str, Any]]]:
        done = command(["doctor", "--json", *data, *words], os.environ | own, tmp_path)
        return done.returncode, [json.loads(line) for line in done.stdout.splitlines()]

    monitor = run.start("monitor", "monitor", "--port", "0", environment=own)
    run.wait(lambda: (run.home("monitor") / "peer.json").exists(), "the monitor is up", monitor)
    link = run.told("monitor")["link"]
    code, found = doctor(link)
    assert code == 0 and {each["outcome"] for each in found} <= {"OK", "SKIP"}, found
    well = {each["check"] for each in found if each["outcome"] == "OK"}
    assert {"torch", "contact", "recipe", "identity", "journal"} <= well

    monitor.kill()
    run.wait(lambda: monitor.returncode is not None, "the monitor is gone")
    code, found = doctor(link)
    assert code == 1
    failed = [each for each in found if each["outcome"] == "FAIL"]
    assert failed and all(each["check"] == "contact" and "nothing listens there" in each["text"] for each in failed)
    assert all("ask for another link" in each["fix"] for each in failed)
