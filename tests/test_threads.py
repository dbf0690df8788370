"""Arithmetic beside the training keeps to one thread, and takes no threads from anybody else."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable
from typing import TypeVar

import pytest
import torch

from swarmcli.threads import count_threads_by, on_all_threads, on_one_thread

T = TypeVar("T")


def in_a_thread(work: Callable[[], T]) -> T:
    results: list[T] = []
    thread = threading.Thread(target=lambda: results.append(work()))
    thread.start()
    thread.join()
    return results[0]


def test_one_thread_here_and_as_many_as_before_everywhere_else() -> None:
    # In a process of its own, for the tests themselves run with one.
    code = (
        "import torch; torch.set_num_threads(3)\n"
        "from tests.test_threads import counts; assert counts() == ([1, 3, 3, 1, 1], 3, 3), counts()"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def counts() -> tuple[list[int], int, int]:
    """torch's threads in a worker: alone, with all, in a thread that it begins, alone again, twice. Then in another
    thread, and in this one."""
    seen: list[int] = []

    def worker() -> None:
        seen.append(on_one_thread(torch.get_num_threads))
        seen.append(on_all_threads(torch.get_num_threads))
        on_one_thread(lambda: None)
        seen.append(in_a_thread(torch.get_num_threads))
        seen.extend(on_one_thread(torch.get_num_threads) for _ in range(2))

    in_a_thread(worker)
    return seen, in_a_thread(torch.get_num_threads), torch.get_num_threads()


def test_a_team_is_as_large_as_this_process_may_have_now() -> None:
    before, allowed = torch.get_num_threads(), 3

    def worker() -> list[int]:
        nonlocal allowed
        seen = [on_one_thread(torch.get_num_threads), on_all_threads(torch.get_num_threads)]
        allowed = 2
        return [*seen, on_all_threads(torch.get_num_threads), on_one_thread(torch.get_num_threads)]

    try:
        with count_threads_by(lambda: allowed):
            assert in_a_thread(worker) == [1, 3, 2, 1]
    finally:
        torch.set_num_threads(before)


def test_the_main_thread_is_the_users() -> None:
    before = torch.get_num_threads()
    assert on_one_thread(torch.get_num_threads) == before == on_all_threads(torch.get_num_threads)


def test_where_no_thread_is_left_work_beside_the_loop_is_done_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    def work() -> int:
        with monkeypatch.context() as here:
            here.setattr(threading.Thread, "start", fail)
            return on_one_thread(lambda: 7)

    assert in_a_thread(work) == 7
