from __future__ import annotations

import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from examples import plain_loop
from examples.peers import run
from swarmcli.dht import DHT

ROOT = Path(plain_loop.__file__).parent.parent
EPOCH = re.compile(r"epoch (\d+): (\d+) samples of (\d+) peers, lineage (\w+)")

# A process that was started in the background may have inherited that interrupts are ignored.
RUN = """
import runpy, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
runpy.run_module(sys.argv.pop(1), run_name="__main__", alter_sys=True)
"""


@contextmanager
def peer(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-u", "-c", RUN, "examples.plain_loop", *arguments]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def read_until(process: subprocess.Popen[str], pattern: str) -> list[str]:
    """The lines up to the first in which the pattern is found."""
    assert process.stdout is not None
    lines: list[str] = []
    for line in process.stdout:
        lines.append(line)
        if re.search(pattern, line):
            return lines
    raise AssertionError(f"it ended before it said {pattern!r}: {lines}")


def lineages(lines: list[str]) -> dict[int, str]:
    return {int(found[1]): found[4] for line in lines if (found := EPOCH.search(line))}


@pytest.mark.e2e
def test_two_processes_train_together() -> None:
    with peer() as first:
        address = read_until(first, "others join")[-1].split()[-1]
        with peer("--seed", "1", "--peer", address) as second:
            told = [read_until(process, "[0-9]{4,} samples of 2 peers") for process in (first, second)]
            for process in (first, second):
                process.send_signal(signal.SIGINT)
            for lines, process in zip(told, (first, second), strict=True):
                lines += read_until(process, "stopped")
                assert process.wait() == 0
    one, other = map(lineages, told)
    together = {epoch for epoch in one.keys() & other.keys() if one[epoch] == other[epoch]}
    assert together, told


@pytest.mark.e2e
def test_the_loop_of_the_page_learns_and_says_goodbye(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "optimizer.md").read_text()
    blocks = re.findall(r"^```python\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    (tmp_path / "loop.py").write_text(next(block for block in blocks if "swarmcli.Optimizer(" in block))
    run_it = RUN.replace("run_module(sys.argv.pop(1)", "run_path(sys.argv.pop(1)")
    command = [sys.executable, "-u", "-c", run_it.replace(", alter_sys=True", ""), str(tmp_path / "loop.py")]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        try:
            lines = [read_until(process, "mean loss")[-1] for _ in range(4)]
            process.send_signal(signal.SIGINT)
            assert not [line for line in read_until(process, "left the run at epoch") if "Traceback" in line]
            assert process.wait() == 0
        finally:
            process.kill()
    losses = [float(line.split()[-1]) for line in lines]
    assert losses[-1] < losses[0] - 0.5, lines


def test_a_contact_that_does_not_answer_is_one_line(caplog: pytest.LogCaptureFixture) -> None:
    def train() -> None:
        DHT(["tcp://127.0.0.1:9"], start=True, host="127.0.0.1", startup_timeout=0.2)

    with pytest.raises(SystemExit, match=r"^stopped: no first contact answered within 0.2 s: tcp://127.0.0.1:9"):
        run(train)
    assert re.match("tcp://127.0.0.1:9 does not answer yet: .*; trying again for 0", caplog.messages[0]), "told at once"
