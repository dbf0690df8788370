"""Starts peers by forking a process that has imported what they need: a fresh process takes eight seconds to import
that. Otherwise they are as `swarm` starts them, each with a session, an environment and files of its own.

Where there is no fork, and for launchers such as torchrun, processes are started as usual.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from swarmcli.cli.processes import VARIABLE, Child, Children

if TYPE_CHECKING:
    from multiprocessing.context import ForkServerProcess

SECONDS = 240.0  # for a command, on a machine that is busy with other tests


def command(
    words: Sequence[str], environment: Mapping[str, str], cwd: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """Runs `swarm` with these words to its end. It is killed after `SECONDS`."""
    if sys.platform != "linux":
        usual = [sys.executable, "-m", "swarmcli", *words]
        return subprocess.run(usual, capture_output=True, text=True, env=environment, cwd=cwd, timeout=SECONDS)
    with tempfile.TemporaryDirectory() as place:
        out, err = Path(place, "out"), Path(place, "err")
        process = _fork(words, out, err, environment, cwd=cwd)
        process.join(SECONDS)
        process.kill()
        process.join()
        return subprocess.CompletedProcess(words, process.exitcode or 0, out.read_text(), err.read_text())


class ForkedChildren(Children):
    """Children whose processes are forked instead of executed afresh."""

    def start(
        self,
        name: str,
        arguments: Sequence[str],
        log: Path,
        environment: Mapping[str, str] | None = None,
        launcher: Sequence[str] = (),
        prefix: Sequence[str] = (),
    ) -> Child:
        if launcher or sys.platform != "linux":
            return super().start(name, arguments, log, environment, launcher, prefix)
        child = _Forked(name, arguments, log, environment or {}, prefix)
        self._children.append(child)
        return child


class _Forked(Child):
    def __init__(
        self, name: str, arguments: Sequence[str], log: Path, environment: Mapping[str, str], prefix: Sequence[str]
    ) -> None:
        self.name = name
        self.log = log
        self._launched = False
        self._process: Any = _Process(_fork(arguments, log, log, {**os.environ, **environment}, prefix))


class _Process:
    """A forked process with those parts of subprocess.Popen's interface that Child uses."""

    def __init__(self, forked: ForkServerProcess) -> None:
        self._forked = forked
        self.pid = forked.pid or 0

    @property
    def returncode(self) -> int | None:
        return self._forked.exitcode

    def poll(self) -> int | None:
        return self._forked.exitcode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self._forked.kill()

    def wait(self, timeout: float | None = None) -> int | None:
        self._forked.join(timeout)
        if self.poll() is None:
            raise subprocess.TimeoutExpired("swarm", timeout or 0.0)
        return self.poll()


def _fork(
    words: Sequence[str],
    out: Path,
    err: Path,
    environment: Mapping[str, str],
    prefix: Sequence[str] = (),
    cwd: Path | None = None,
) -> ForkServerProcess:
    from tests.forkserver import CONTEXT  # imported here: not every system has a fork server

    place = str(cwd or Path.cwd())
    for file in {out, err}:
        file.touch()
    process = CONTEXT.Process(
        target=_live, args=(list(words), str(out), str(err), dict(environment), list(prefix), place)
    )
    process.start()
    return process


def _live(words: list[str], out: str, err: str, environment: dict[str, str], prefix: list[str], place: str) -> None:
    """What the process does: it becomes `swarm` with these words, in the namespaces that the prefix enters."""
    _enter(prefix)
    os.setsid()
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for number, file in ((1, out), (2, err)):
        os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666), number)
    os.closerange(3, 1024)  # among them the pipe that would keep the fork server alive
    os.environ.clear()
    os.environ.update(environment, **{VARIABLE: str(os.getppid())})
    os.chdir(place)
    sys.argv = ["swarm", *words]
    gc.freeze()  # the garbage collector leaves objects from before the fork alone: looking at one copies its page

    from swarmcli.cli.main import main

    try:
        main()
    finally:
        with suppress(Exception):
            atexit._run_exitfuncs()  # multiprocessing does not run these in a forked process


def _enter(prefix: list[str]) -> None:
    """Enters the namespaces that the prefix names, as the command nsenter does before it executes another; see
    benchmarks/_homes.py."""
    if not prefix:
        return
    target = next(word.partition("=")[2] for word in prefix if word.startswith("--target="))
    libc = ctypes.CDLL(None, use_errno=True)
    files = [os.open(f"/proc/{target}/ns/{kind}", os.O_RDONLY) for kind in ("user", "net") if f"--{kind}" in prefix]
    for file in files:
        if libc.setns(file, 0) != 0:
            raise OSError(ctypes.get_errno(), f"cannot enter the namespaces of {target}")
        os.close(file)
