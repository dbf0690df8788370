"""Peers that are forked from a process which has imported what they need: a fresh one computes for eight seconds before
it says a word. All else is as `swarm` starts it: a session, an environment and files of their own.

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
    """As Children, which exec."""

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
    """A forked process as Child knows one: what it uses of subprocess.Popen."""

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
    from tests.forkserver import CONTEXT  # here, since not every system has one

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
    os.closerange(3, 1024)  # among them what would keep the process alive that this one is forked from
    os.environ.clear()
    os.environ.update(environment, **{VARIABLE: str(os.getppid())})
    os.chdir(place)
    sys.argv = ["swarm", *words]
    gc.freeze()  # what was there before the fork stays, and is not copied by being looked at

    from swarmcli.cli.main import main

    try:
        main()
    finally:
        with suppress(Exception):
            atexit._run_exitfuncs()  # which a forked process of multiprocessing leaves out


def _enter(prefix: list[str]) -> None:
    """Does what the command nsenter would do before it becomes another one; see benchmarks/_homes.py."""
    if not prefix:
        return
    target = next(word.partition("=")[2] for word in prefix if word.startswith("--target="))
    libc = ctypes.CDLL(None, use_errno=True)
    files = [os.open(f"/proc/{target}/ns/{kind}", os.O_RDONLY) for kind in ("user", "net") if f"--{kind}" in prefix]
    for file in files:
        if libc.setns(file, 0) != 0:
            raise OSError(ctypes.get_errno(), f"cannot enter the namespaces of {target}")
        os.close(file)
