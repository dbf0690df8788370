"""Journals of real processes: killed without warning, and out of room on a real file system."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from swarmcli.errors import JournalError
from swarmcli.journal import JournalReader

pytestmark = pytest.mark.e2e
ROOT = Path(__file__).parents[2]
Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def start() -> Iterator[Start]:
    processes: list[subprocess.Popen[str]] = []

    def begin(*arguments: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1, cwd=ROOT
        )
        processes.append(process)
        return process

    yield begin
    for process in processes:
        process.kill()
        process.communicate()


def tell(process: subprocess.Popen[str], command: str) -> str:
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write(command + "\n")
    return process.stdout.readline().strip()


def peer(start: Start, path: Path) -> subprocess.Popen[str]:
    return start("-m", "tests.journal.peer_process", str(path))


def test_a_killed_process_leaves_a_journal_that_can_be_read_and_a_new_one_goes_on_in_it(
    tmp_path: Path, start: Start
) -> None:
    """Nobody flushes: what can be read, the writer committed by itself, and the kill takes only what came after."""
    path = tmp_path / "journal.sqlite"
    process = peer(start, path)
    for number in range(1, 200):
        assert tell(process, f"epoch {number}") == "recorded"
    while True:  # bounded by the test's own time limit
        with suppress(JournalError), JournalReader(path) as reader:  # the writer may not have made the tables yet
            if len(reader.epochs("stdlib-lm")) == 199:
                break
    assert tell(process, "epoch 200") == "recorded"
    process.kill()
    process.wait()
    with JournalReader(path) as reader:
        epochs = [row.epoch for row in reader.epochs("stdlib-lm")]
        (run,) = reader.runs()
    assert epochs in (list(range(1, 200)), list(range(1, 201)))
    assert run.finished is None and run.pid == process.pid
    second = peer(start, path)
    tell(second, "epoch 201")
    assert tell(second, "flush") == "written"
    with JournalReader(path) as reader:
        assert [row.epoch for row in reader.epochs("stdlib-lm")] == [*epochs, 201] and len(reader.runs()) == 2


def test_out_of_room_the_process_goes_on_warns_once_and_writes_later(tmp_path: Path, start: Start) -> None:
    """A limit on file sizes is the full disk that a test may make: the system refuses the write."""
    path = tmp_path / "journal.sqlite"
    process = peer(start, path)
    assert tell(process, "flush") == "written"
    assert tell(process, "small") == "small"
    for number in range(1, 500):
        tell(process, f"epoch {number}")
    assert [tell(process, "flush") for _ in range(3)] == ["failed"] * 3
    assert tell(process, "notices").count("warning: the journal cannot be written") == 1
    assert tell(process, "large") == "large"
    assert tell(process, "flush") == "written"
    assert tell(process, "notices").endswith("info: the journal is written again; no row was lost")
    with JournalReader(path) as reader:
        assert [row.epoch for row in reader.epochs("stdlib-lm")] == list(range(1, 500))
