"""A save that is killed in any of its steps, and one whose disk is full from any of them on: see killed_saves."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from .killed_saves import BEFORE


@pytest.mark.e2e
@pytest.mark.skipif(not hasattr(os, "fork"), reason="children are forked, so that torch is imported once")
def test_whatever_step_of_a_save_is_the_last_a_whole_newest_checkpoint_is_there(tmp_path: Path) -> None:
    memory = Path("/dev/shm")  # where an fsync costs nothing; which disk it is makes no difference to the steps
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else tmp_path) as place:
        command = [sys.executable, "-m", "tests.training.killed_saves", place]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        ended = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
    assert ended.returncode == 0, ended.stderr[-3000:]
    told = [json.loads(line) for line in ended.stdout.splitlines() if line.startswith("{")]
    assert [each["scenario"] for each in told[::2]] == list(BEFORE)
    for each in told:
        last = each["last"]
        assert last["write"] >= 6 and last["fsync"] >= 12 and last["replace"] >= 5, each
        assert last["rename"] >= (3 if each["scenario"] in ("same", "set-back") else 2), each
