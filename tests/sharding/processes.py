"""Checks that run in N real processes with a torch.distributed world of gloo between them.

A test hands a function of its module to a world, which calls it in every rank and returns what each returned::

    def sums(start: float) -> torch.Tensor:              # runs in every rank; a module's function, not a nested one
        total = torch.tensor(start + dist.get_rank())
        dist.all_reduce(total)
        return total

    def test_sums(worlds: Worlds) -> None:               # `worlds` is a fixture of tests/sharding and of tests/sites
        assert [float(each) for each in worlds(2).run(sums, 1.0)] == [3.0, 3.0]

`worlds(size)` keeps one world of each size for all tests of a module: the ranks are forked from a process that has
imported torch already (some 0.2 s per world), and a check in a warm world costs what it computes. Before each check the
rank is seeded with 0, after it all ranks meet in a barrier. A rank has one thread of torch. Modules share no world: a
group that is destroyed and made again under the same name finds the addresses of the former one in the store.

What goes in and out is pickled. `pytest.raises` works inside of a check; a failing `assert` there shows its line, not
its values.

A rank that raises, dies or takes too long fails the test with its traceback and its stderr; the whole world is then
killed and a later check gets a new one. For tests in which that is the point, `outcomes` says how each rank fared.
`worlds(size, grouped=False)` has no process group yet, only the environment torchrun makes (RANK, WORLD_SIZE, ...,
a store to meet at), a fresh one for each check: the check forms the group and takes it apart.
"""

from __future__ import annotations

import faulthandler
import gc
import os
import pickle
import sys
import tempfile
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from time import monotonic
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.forkserver import CONTEXT

SECONDS = 120.0  # for a check, and for a collective in it, on a machine that is busy with other tests
GRACE_SECONDS = 10.0  # for the others to tell what they saw of a rank that failed


class RankFailed(AssertionError):
    """A rank of the world raised, died or took too long."""


@dataclass(frozen=True)
class Outcome:
    """How a check ended in one rank: with a value, or with the traceback or the signal it died of and its stderr."""

    value: Any = None
    error: str | None = None


class Worlds:
    """The worlds of a module's tests, one of each kind, each started when it is first asked for."""

    def __init__(self) -> None:
        self._worlds: dict[tuple[int, bool], World] = {}

    def __call__(self, size: int, *, grouped: bool = True) -> World:
        key = (size, grouped)
        if key not in self._worlds:
            self._worlds[key] = World(size, grouped=grouped)
        return self._worlds[key]

    def close(self) -> None:
        for world in self._worlds.values():
            world.close()


class World:
    """`size` processes that run the checks they are given, one after the other, each in all of them.

    A check that takes longer than `seconds` fails with the stacks of where its ranks were. Without `grouped` the ranks
    are left to form the process group themselves, from their environment.
    """

    def __init__(self, size: int, *, seconds: float = SECONDS, grouped: bool = True) -> None:
        self.size = size
        self._seconds = seconds
        self._grouped = grouped
        self._ranks: list[_Rank] = []
        self._store: dist.TCPStore | None = None
        self._directory: tempfile.TemporaryDirectory[str] | None = None

    def run(self, check: Callable[..., Any], *arguments: Any) -> list[Any]:
        """What `check(*arguments)` returned in each rank, by rank. Raises RankFailed if any did not return."""
        outcomes = self._outcomes(check, arguments, end_at_failure=True)
        failures = [f"rank {rank}: {each.error}" for rank, each in enumerate(outcomes) if each.error is not None]
        if failures:
            raise RankFailed("\n".join(failures))
        return [each.value for each in outcomes]

    def outcomes(self, check: Callable[..., Any], *arguments: Any) -> list[Outcome]:
        """How `check(*arguments)` ended in each rank, by rank, after all of them have ended it one way or another."""
        return self._outcomes(check, arguments, end_at_failure=False)

    def close(self) -> None:
        """Ends all ranks; nothing of them is left when it returns."""
        for rank in self._ranks:
            rank.kill()
        self._ranks = []
        self._store = None
        if self._directory is not None:
            self._directory.cleanup()
            self._directory = None

    def _outcomes(self, check: Callable[..., Any], arguments: Sequence[Any], *, end_at_failure: bool) -> list[Outcome]:
        assert "<" not in check.__qualname__, f"{check.__qualname__} is not a function of a module"
        if not self._ranks:
            self._start()
        if self._store is None or not self._grouped:  # groups formed one after the other must not meet at one store
            self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        order = pickle.dumps((check, arguments, self._seconds, self._store.port))
        for rank in self._ranks:
            rank.tell(order)
        outcomes: list[Outcome] = []
        try:
            outcomes = self._collect(end_at_failure)
        finally:
            if not outcomes or any(each.error is not None for each in outcomes):
                self.close()  # also after an interrupted test, whose ranks are in the middle of something
        return outcomes

    def _collect(self, end_at_failure: bool) -> list[Outcome]:
        deadline = monotonic() + self._seconds + GRACE_SECONDS  # the ranks end themselves before
        ended: dict[int, Outcome] = {}
        while len(ended) < self.size:
            waiting = {self._ranks[rank].pipe: rank for rank in range(self.size) if rank not in ended}
            ready = wait(list(waiting), max(0.0, deadline - monotonic()))
            for index in [waiting[pipe] for pipe in ready] or waiting.values():  # type: ignore[index]
                ended[index] = self._ranks[index].outcome()
                if ended[index].error is not None and end_at_failure:
                    self._ranks[index].kill()  # which the others notice in their collectives
                    deadline = min(deadline, monotonic() + GRACE_SECONDS)
        return [ended[rank] for rank in range(self.size)]

    def _start(self) -> None:
        self._directory = tempfile.TemporaryDirectory(prefix="world-")
        for rank in range(self.size):
            self._ranks.append(_Rank(rank, self._environment(rank), Path(self._directory.name), self._grouped))

    def _environment(self, rank: int) -> dict[str, str]:
        """As torchrun would make it."""
        return {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "GROUP_RANK": "0",
            "WORLD_SIZE": str(self.size),
            "LOCAL_WORLD_SIZE": str(self.size),
            "MASTER_ADDR": "127.0.0.1",
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_RESTART_COUNT": "0",
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo0" if sys.platform == "darwin" else "lo",
        }


class _Rank:
    """One process of a world, as the test sees it."""

    def __init__(self, rank: int, environment: dict[str, str], directory: Path, grouped: bool) -> None:
        self._stderr = directory / f"rank-{rank}"
        self.pipe, theirs = CONTEXT.Pipe()
        self._process = CONTEXT.Process(
            target=_live, args=(theirs, environment, str(self._stderr), grouped), name=f"rank {rank}", daemon=True
        )
        self._process.start()
        theirs.close()

    def tell(self, order: bytes) -> None:
        if not self.pipe.closed:
            self.pipe.send_bytes(order)

    def outcome(self) -> Outcome:
        """Of the check it was told; a rank that has nothing to say by now is killed."""
        if self.pipe.poll():
            try:
                value, error = pickle.loads(self.pipe.recv_bytes())  # noqa: S301, it is this very test's
                return Outcome(value, error and self._with_stderr(error))
            except (EOFError, ConnectionResetError):
                self._process.join(GRACE_SECONDS)
                return Outcome(error=self._with_stderr(f"ended with {self._process.exitcode}"))
        self.kill()
        return Outcome(error=self._with_stderr("said nothing in time"))

    def kill(self) -> None:
        self._process.kill()
        self._process.join()
        self.pipe.close()

    def _with_stderr(self, error: str) -> str:
        text = self._stderr.read_text(errors="replace") if self._stderr.exists() else ""
        return f"{error}\n{text[-4000:]}"


def _live(pipe: Connection, environment: dict[str, str], stderr: str, grouped: bool) -> None:
    """What the process does: checks, until its test is gone."""
    output = os.open(stderr, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.environ.update(environment)
    torch.set_num_threads(1)
    gc.freeze()  # what was there before the fork need not be looked through after each check
    while True:
        try:
            order = pipe.recv_bytes()
        except EOFError:
            return
        pipe.send_bytes(_run(order, grouped))


def _run(order: bytes, grouped: bool) -> bytes:
    check, arguments, seconds, port = pickle.loads(order)  # noqa: S301, it is this very test's
    os.environ["MASTER_PORT"] = str(port)
    os.ftruncate(2, 0)  # what earlier checks had to say
    faulthandler.dump_traceback_later(seconds, exit=True, file=2)  # shows where it hangs
    try:
        if grouped and not dist.is_initialized():
            dist.init_process_group("gloo", timeout=timedelta(seconds=seconds))
        torch.manual_seed(0)
        told = pickle.dumps((check(*arguments), None))
        gc.collect()
        if grouped:
            dist.barrier()
        return told
    except (Exception, pytest.fail.Exception):  # the latter is what `pytest.raises` raises
        return pickle.dumps((None, traceback.format_exc()))
    finally:
        faulthandler.cancel_dump_traceback_later()
