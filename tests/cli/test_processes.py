from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from swarmcli.cli.processes import Children
from swarmcli.journal import JOURNAL_NAME, Journal, RunRecord


def test_no_child_outlives_its_block(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), Children() as children:
        child = children.start("version", ["log", "--follow", str(tmp_path / "none")], tmp_path / "log")
        raise ZeroDivisionError
    assert child.returncode is not None
    assert not psutil.pid_exists(child.pid)
    with Children() as children:
        killed = children.start("child", ["log", "--follow", str(tmp_path)], tmp_path / "log")
        killed.kill()
        assert killed.returncode == -9, "its signal"
        wrong = children.start("wrong", ["jion"], tmp_path / "other")
        assert wrong.wait(60) == 2
        assert "jion" in wrong.last_words(), "the end of its log"


PARENT = """
import signal, sys
from pathlib import Path
from swarmcli.cli.processes import Children

with Children() as children:
    child = children.start("child", ["log", "--follow", sys.argv[1]], Path(sys.argv[1], "log"))
    print(child.pid, flush=True)
    signal.pause()
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_children_end_with_their_parent(tmp_path: Path, number: signal.Signals) -> None:
    run = RunRecord("run", "trainer", "a" * 52)
    with Journal(tmp_path / JOURNAL_NAME, run=run, clock=time.time):  # which the child would follow for ever
        parent = subprocess.Popen([sys.executable, "-c", PARENT, str(tmp_path)], stdout=subprocess.PIPE)
        assert parent.stdout is not None
        with parent.stdout:
            child = psutil.Process(int(parent.stdout.readline()))
        parent.send_signal(number)
        assert parent.wait(60) == (143 if number == signal.SIGTERM else -number)
        try:
            child.wait(60)
        except psutil.TimeoutExpired:
            child.kill()
            raise
