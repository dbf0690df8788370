"""The parent of a site's processes on one machine: it starts them, and again when one of them dies.

Nothing here listens: the processes inherit a socket pair each to their launcher (link.py), meet at a file in a
directory of this user alone, and talk to each other on the loopback interface.
"""

from __future__ import annotations

import os
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec
import psutil
from filelock import FileLock

from swarmcli.cli.console import err
from swarmcli.cli.ending import ExitCode, stop_on_signals
from swarmcli.cli.site.link import VARIABLE, Failed, ProcessPipe, Past, Start, StopProcess
from swarmcli.errors import SiteError

PREFIX = "swarm-site-"  # of directories where processes meet


@dataclass(frozen=True, slots=True)
class LauncherOptions:
    """How long a launcher looks after a site that breaks."""

    max_deaths: int = 6  # in a row, without an epoch that ended in between
    poll: float = 0.1  # seconds between two looks at the processes
    grace: float = 5.0  # seconds for those of a broken site to end by themselves; a frozen one never does
    stale: float = 3600.0  # seconds after which a directory that no launcher holds is removed


LAUNCHER = LauncherOptions()


def start_site(processes: int, arguments: Sequence[str]) -> int:
    """Runs this very command, with these words behind `swarm`, in so many processes on this machine; their exit code.

    Raises SiteError on Windows, where a process cannot inherit its line to the launcher.
    """
    if sys.platform == "win32":
        raise SiteError(
            "--nproc (local.site.processes) starts processes that inherit sockets, which Windows cannot; leave it out "
            "and start one trainer for each device, with local.device: cuda:0, cuda:1, ..."
        )

    def say(text: str) -> None:
        if err.is_terminal:
            # A process that was killed while it showed the run left the cursor invisible, at the end of a line.
            err.show_cursor(True)
            err.print()
        err.print(text, soft_wrap=True)

    return Launcher(["-m", "swarmcli", *arguments], processes, say=say).run()


class Launcher:
    """Runs `command`, words for Python, as so many processes of one site until it has ended.

    `say` is told what happens to the site. For the main thread: the kernel ends the processes with the thread that
    started them. They are in sessions of their own, so that Ctrl-C reaches the launcher alone, which asks them to stop.
    """

    def __init__(self, command: Sequence[str], processes: int, *, say: Callable[[str], None]) -> None:
        self._command = command
        self._size = processes
        self._say = say
        self._asked: list[StopProcess] = []
        self._passing = threading.Lock()
        self._past = Past()
        self._processes: list[Process] = []  # of the present life

    def run(self) -> int:
        """The exit code for the shell. Raises SiteError when the site dies again and again."""
        with (
            private_directory() as self._directory,
            stop_on_signals(self._ask_to_stop, end_process=self._end_at_once),
        ):
            return self._live_and_live_again()

    def _live_and_live_again(self) -> int:
        deaths, life = 0, 0
        while True:
            reached, life = self._past.epoch, life + 1
            ended = self._live(self._directory / f"life-{life}")
            if told := most_telling(ended):
                self._say(told.words)
            if self._asked:
                interrupted = any(stop.number == signal.SIGINT for stop in self._asked)
                return ExitCode.INTERRUPTED if interrupted else ExitCode.DONE
            if all(process.code == ExitCode.DONE for process in ended):
                return ExitCode.DONE
            code = final_code(ended)
            if code is not None:
                return code
            deaths = 1 if self._past.epoch > reached else deaths + 1
            why = cause(ended)
            if deaths >= LAUNCHER.max_deaths:
                raise SiteError(
                    f"{why}; that was the end number {deaths} of this site without an epoch in between, so it is not "
                    "started again; look at the lines above, or try fewer processes or a smaller micro_batch_size"
                )
            self._say(f"{why}; the site starts again from its last state ({deaths} of {LAUNCHER.max_deaths - 1})")

    def _live(self, store: Path) -> list[Process]:
        """One life of the site: its processes, all of which have ended."""
        self._processes = []
        try:
            for rank in range(self._size):
                self._processes.append(self._start(rank, store))
            self._pass_on()  # what was asked while they were being started
            self._look_after_processes()
        finally:
            for process in self._processes:
                process.end()
        return self._processes

    def _start(self, rank: int, store: Path) -> Process:
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        with theirs:
            start = Start(theirs.fileno(), os.getpid(), str(store), self._past)
            started = subprocess.Popen(
                [sys.executable, *self._command],
                stdin=subprocess.DEVNULL,
                env=environment(rank, self._size) | {VARIABLE: msgspec.json.encode(start).decode()},
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        return Process(rank, started, ProcessPipe(ours))

    def _look_after_processes(self) -> None:
        """Returns when all have ended. Once the site is broken, the others get a moment to end by themselves: rank 0
        says goodbye to the swarm."""
        deadline: float | None = None
        with selectors.DefaultSelector() as words:
            for process in self._processes:
                words.register(process.line, selectors.EVENT_READ, process)
            while any(process.runs for process in self._processes):
                for key, _ in words.select(LAUNCHER.poll):
                    if not self._hear(key.data):
                        words.unregister(key.fileobj)
                        key.data.await_end(LAUNCHER.poll)
                now = time.monotonic()
                if deadline is None and any(process.broke for process in self._processes):
                    deadline = now + LAUNCHER.grace
                elif deadline is not None and now >= deadline:
                    for process in self._processes:
                        process.kill()
        for process in self._processes:
            self._hear(process)  # the last words of one that ended meanwhile

    def _hear(self, process: Process) -> bool:
        """Takes in what the process has said; False when it will say no more."""
        messages = process.line.receive()
        for message in messages or ():
            if isinstance(message, Past):
                self._past = message
            elif isinstance(message, Failed):
                process.failed = message
        return messages is not None

    def _ask_to_stop(self, number: signal.Signals, again: bool) -> None:
        self._asked.append(StopProcess(number, again))
        self._pass_on()

    def _pass_on(self) -> None:
        """Each process hears once of each wish to stop, whoever of two threads comes first."""
        with self._passing:
            for process in self._processes:
                process.ask(self._asked)

    def _end_at_once(self, code: int) -> None:
        for process in self._processes:
            process.kill()
        shutil.rmtree(self._directory, ignore_errors=True)
        os._exit(code)


class Process:
    """A process of the present life: what it said, and how it ended."""

    def __init__(self, rank: int, started: subprocess.Popen[bytes], line: ProcessPipe) -> None:
        self.rank = rank
        self.line = line
        self.failed: Failed | None = None  # what it said of its failure
        self.killed = False  # by the launcher
        self._started = started
        self._asked = 0  # wishes to stop that it has heard

    def ask(self, wishes: Sequence[StopProcess]) -> None:
        """Tells it of those that are new."""
        for wish in wishes[self._asked :]:
            self.line.send(wish)
            self._asked += 1

    @property
    def code(self) -> int | None:
        """Its exit code, negative if a signal ended it; None while it runs. One that was killed when it had told with
        which code it ends has that code."""
        code = self._started.poll()
        return self.failed.code if self.failed and code is not None and code < 0 else code

    @property
    def runs(self) -> bool:
        return self._started.poll() is None

    @property
    def broke(self) -> bool:
        """Whether the site cannot go on for this process's sake. One that stops because it was asked to did not."""
        return self.failed is not None or self.code not in (None, ExitCode.DONE, ExitCode.INTERRUPTED)

    def await_end(self, seconds: float) -> None:
        with suppress(subprocess.TimeoutExpired):
            self._started.wait(seconds)

    def kill(self) -> None:
        if self.runs:
            self.killed = True
            self._started.kill()

    def end(self) -> None:
        """Nothing of it is left afterwards."""
        self.kill()
        self._started.wait()
        self.line.close()


def most_telling(ended: Collection[Process]) -> Failed | None:
    """One failure is enough to read: the others saw the same, or what followed from it."""
    told = [process.failed for process in ended if process.failed and process.failed.words]
    return min(told, key=lambda failed: failed.code == ExitCode.START_AGAIN, default=None)


def final_code(ended: Collection[Process]) -> int | None:
    """The exit code of a process that knew what it did: starting again would end the same way. None: start again."""
    known = [process.code for process in ended if process.code is not None and process.code > 0]
    return next((code for code in known if code != ExitCode.START_AGAIN), None)


def cause(ended: Collection[Process]) -> str:
    """Returns what happened first, as far as exit codes tell: the others end because one has."""

    def by_likelihood(process: Process) -> tuple[int, int]:
        if process.failed:
            return (1 if process.failed.words else 4), process.rank  # 4: because another has gone
        if process.killed:
            return 2, process.rank
        if process.code == -signal.SIGABRT:
            return 3, process.rank  # so NCCL ends a process that waits for a silent one
        return (0 if (process.code or 0) < 0 else 4), process.rank

    first = min(ended, key=by_likelihood)
    code = first.code or 0
    if first.failed or code >= 0:
        return f"process {first.rank} of this site has given up"
    if first.killed:
        return f"process {first.rank} of this site did not answer any more"
    name = signal.Signals(-code).name
    return f"process {first.rank} of this site was ended by {name}" + (
        " (perhaps there is too little memory)" if name == "SIGKILL" else ""
    )


def environment(rank: int, size: int) -> dict[str, str]:
    """Returns the environment that a process inherits: its place, by torchrun's names; the loopback interface for all that the processes say
    to each other; and silence of libraries."""
    loopback = loopback_interface()
    return {
        "TORCH_CPP_LOG_LEVEL": "ERROR",
        **os.environ,
        "GLOO_SOCKET_IFNAME": loopback,
        "NCCL_SOCKET_IFNAME": f"={loopback}",  # "=": this very name, not all that begin with it
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(size),
    }


def loopback_interface() -> str:
    """The name of the interface that has 127.0.0.1. Raises SiteError: there is none."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(address.address == "127.0.0.1" for address in addresses):
            return name
    raise SiteError("no interface of this machine has the address 127.0.0.1, by which the processes of a site talk")


@contextmanager
def private_directory() -> Iterator[Path]:
    """A directory that only this user can look into, gone at the end. Those of launchers that were killed go as well:
    a launcher holds a lock on its own for as long as it lives."""
    for stale in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        with suppress(OSError):  # another user's, or in use
            age = time.time() - stale.lstat().st_mtime  # before the lock, whose file makes a directory young
            if age > LAUNCHER.stale and not stale.is_symlink():  # a younger one may not be locked yet
                with _locked(stale):
                    shutil.rmtree(stale)
    directory = Path(tempfile.mkdtemp(prefix=PREFIX))  # its mode is 0700
    try:
        with _locked(directory):
            yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)


@contextmanager
def _locked(directory: Path) -> Iterator[None]:
    """Raises OSError: another launcher holds it, or another user."""
    with FileLock(directory / "in-use", timeout=0, thread_local=False):
        yield
