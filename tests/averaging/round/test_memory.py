"""What a round takes in memory beside the tensors, in real processes: at most 1.3 times the tensors and 192 MiB, and
with a lossy codec 2.5 times the tensors more."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.suites import soak

MIB = 1 << 20
TENSORS = 192  # MiB; large beside what else moves in a process
PEERS = 2


@contextmanager
def peers(prefix: str, codec: str, rounds: int) -> Iterator[list[subprocess.Popen[str]]]:
    """Processes that average with each other; none of them outlives the block."""
    started: list[subprocess.Popen[str]] = []
    contacts: list[str] = []
    try:
        for _ in range(PEERS):
            command = [sys.executable, "-m", "tests.averaging.memory_process", str(TENSORS), prefix, codec]
            command += [str(rounds), *contacts]
            started.append(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))
            contacts = contacts or [_line(started[0]).strip()]
        _line(started[1])
        yield started
        for process in started:
            process.communicate(timeout=60)
        assert [process.returncode for process in started] == [0] * PEERS
    finally:
        for process in started:
            process.kill()
            process.communicate()


def _line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line, f"the process ended with {process.wait()}"
    return line


@pytest.mark.e2e
@pytest.mark.parametrize(("codec", "rounds"), [("none", 1), *soak([("none", 3), ("float16", 3)])])
def test_the_peak_of_a_round(codec: str, rounds: int) -> None:
    """Also of rounds in turn: once, on a busy machine, one round's memory was not free when the next took its own."""
    with peers("memory", codec, rounds) as processes:
        told = [json.loads(_line(process)) for process in processes]
    assert all(each["members"] == [PEERS] * rounds for each in told)
    beside = [each["peak"] / MIB for each in told]
    print(f"{codec}: {beside} MiB beside tensors of {TENSORS} MiB")
    audited = 64 + 64  # inputs that are kept in memory, and parts that wait for their turn to be added
    kept = 2.5 * TENSORS if codec != "none" else 0  # the last average, and the differences from it
    assert max(beside) <= 1.3 * TENSORS + kept + 64 + audited
    assert min(beside) > 0.5 * TENSORS  # the measurement sees the averages that lie beside the inputs
