"""The parent of a site's processes: starts them through torch's elastic launcher, and again when one of them dies.

Each life of a site is one elastic launch on a rendezvous of its own. Elastic starts the processes, watches them and
ends all when one fails; what a failure means is decided here, where it is known that some (a recipe that the run
refused) would only repeat themselves, and that a site which ends epochs between its deaths is worth starting anew.
"""

from __future__ import annotations

import logging
import os
import shutil
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any

import psutil
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from swarmcli.cli.console import err, setup_logging
from swarmcli.cli.failures import ExitCode
from swarmcli.cli.site.notes import VARIABLE, Notes
from swarmcli.errors import SiteError
from swarmcli.training.interrupt import stop_on_signals

MAX_DEATHS = 6  # in a row, without an epoch that ended in between
POLL_SECONDS = 0.2
GRACE_SECONDS = 5.0  # for processes of a broken site; a frozen one hears no SIGTERM

# What the launcher sends on, as signals that mean nothing else: elastic itself sends SIGTERM to the survivors of a
# failure, who then have nothing to finish; and who has not come to installing a handler dies of these without a word.
FORWARDED = {signal.SIGINT: signal.SIGUSR1, signal.SIGTERM: signal.SIGUSR2}

Failures = Mapping[int, ProcessFailure]


def start_site(processes: int, *, verbose: bool) -> int:
    """Runs this very command, as it was typed, in so many processes on this machine; their exit code."""
    setup_logging(verbose)

    def say(text: str) -> None:
        if err.is_terminal:
            # A process that was killed while it showed the run left the cursor invisible, at the end of a line.
            err.show_cursor(True)
            err.print()
        err.print(text, soft_wrap=True)

    return Launcher(["-m", "swarmcli", *sys.argv[1:]], processes, say=say, verbose=verbose).run()


class Launcher:
    """Runs `command` as so many processes of one site until it has ended, and says with which exit code.

    `say` is told what happens to the site. For the main thread: signals go from here to the processes, which are in
    sessions of their own, so that Ctrl-C reaches the launcher alone.
    """

    def __init__(
        self, command: Sequence[str], processes: int, *, say: Callable[[str], None], verbose: bool = False
    ) -> None:
        self._command = command
        self._processes = processes
        self._say = say
        self._verbose = verbose
        self._asked: signal.Signals | None = None
        self._killed: set[int] = set()  # processes of the site that were ended from here
        self._silent: set[int] = set()  # of them, those that had not said that they end
        self._unrelated: set[int] = set()  # children of this process that are none of the site

    def run(self) -> int:
        """The exit code for the shell. Raises SiteError when the site dies again and again."""
        self._notes = Notes(Path(tempfile.mkdtemp(prefix="swarm-site-")))
        self._notes.launcher = os.getpid()
        try:
            with (
                _environment(self._notes),
                stop_on_signals(threading.Event(), on_first=self._pass_on, end_process=self._end_at_once),
            ):
                return self._live_and_live_again()
        finally:
            shutil.rmtree(self._notes.directory, ignore_errors=True)

    def _live_and_live_again(self) -> int:
        deaths, reached = 0, 0
        while True:
            failures = self._live()
            if self._asked is not None:
                return ExitCode.INTERRUPTED if self._asked == signal.SIGINT else ExitCode.DONE
            if not failures:
                return ExitCode.DONE
            code = final_code(failures)
            if code is not None:
                return code
            epoch = self._notes.epoch
            deaths = 1 if epoch > reached else deaths + 1
            reached = epoch
            why = cause(failures, self._silent, self._killed)
            if deaths >= MAX_DEATHS:
                raise SiteError(
                    f"{why}; that was the end number {deaths} of this site without an epoch in between, so it is not "
                    "started again; look at the lines above, or try fewer processes or a smaller micro_batch_size"
                )
            self._say(f"{why}; the site starts again from its last state ({deaths} of {MAX_DEATHS - 1})")

    def _live(self) -> Failures:
        """One life of the site; nothing when all its processes ended well."""
        self._notes.begin()
        self._unrelated = {child.pid for child in psutil.Process().children()}
        over = threading.Event()
        watch = threading.Thread(target=self._end_the_broken, args=(over,), name="swarm-site-watch")
        watch.start()
        try:
            elastic_launch(self._config(), sys.executable)(*self._command)
        except ChildFailedError as error:
            return error.failures
        except SignalException as error:  # the terminal has gone; elastic has ended the processes
            self._asked = error.sigval
        finally:
            over.set()
            watch.join()
        return {}

    def _config(self) -> LaunchConfig:
        if not self._verbose:
            quiet("torch.distributed.elastic")
        known = {field.name for field in fields(LaunchConfig)}  # older torch handles all signals itself
        signals: Any = {"signals_to_handle": "SIGHUP,SIGQUIT"} if "signals_to_handle" in known else {}
        return LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=self._processes,
            run_id=self._notes.directory.name,
            rdzv_backend="c10d",
            rdzv_endpoint="127.0.0.1:0",  # any free port
            local_addr="127.0.0.1",
            max_restarts=0,
            monitor_interval=POLL_SECONDS,
            logs_specs=DefaultLogsSpecs(log_dir=str(self._notes.directory)),
            **signals,  # the others are handled here
        )

    def _end_the_broken(self, over: threading.Event) -> None:
        """Elastic waits half a minute for the survivors of a failure; what is frozen would use all of it."""
        while not over.wait(POLL_SECONDS):
            if self._notes.broken and not over.wait(GRACE_SECONDS):
                self._killed = self._kill_all()
                self._silent = self._killed - self._notes.broken
                return

    def _pass_on(self, number: signal.Signals) -> None:
        self._asked = number
        self._notes.stop = FORWARDED[number]  # for processes that are just being started
        for process in self._alive():
            process.send_signal(FORWARDED[number])

    def _alive(self) -> list[psutil.Process]:
        return [child for child in psutil.Process().children() if child.pid not in self._unrelated]

    def _kill_all(self) -> set[int]:
        processes = self._alive()
        for process in processes:
            process.kill()
        return {process.pid for process in processes}

    def _end_at_once(self, code: int) -> None:
        self._kill_all()
        shutil.rmtree(self._notes.directory, ignore_errors=True)
        os._exit(code)


def final_code(failures: Failures) -> int | None:
    """The exit code of a process that knew what it did: starting again would end the same way. None: start again."""
    known = [failure.exitcode for failure in failures.values() if failure.exitcode > 0]
    return next((code for code in known if code != ExitCode.START_AGAIN), None)


def cause(failures: Failures, silent: Collection[int] = (), killed: Collection[int] = ()) -> str:
    """What happened first, as far as exit codes tell: the others end because one has.

    The launcher had to end the processes `killed`, among them the `silent`, from which nothing was heard; the others
    had given up already.
    """

    def gave_up(failure: ProcessFailure) -> bool:
        return failure.exitcode > 0 or failure.pid in killed

    def likely(item: tuple[int, ProcessFailure]) -> tuple[bool, bool, bool, int]:
        rank, failure = item
        return failure.pid not in silent, failure.exitcode == -signal.SIGTERM, gave_up(failure), rank

    rank, failure = min(failures.items(), key=likely)
    if failure.pid in silent:
        return f"process {rank} of this site did not answer any more"
    if gave_up(failure):
        return f"process {rank} of this site has given up"
    name = signal.Signals(-failure.exitcode).name
    return f"process {rank} of this site was ended by {name}" + (
        " (perhaps there is too little memory)" if name == "SIGKILL" else ""
    )


def quiet(name: str) -> None:
    """Takes a library's log out of ours; its modules set levels of their own, so the levels above do not hold."""
    logger = logging.getLogger(name)
    logger.propagate = False
    if not logger.handlers:
        logger.addHandler(logging.NullHandler())


@contextmanager
def _environment(notes: Notes) -> Iterator[None]:
    """What the processes inherit: where the notes are, and silence of libraries."""
    added = {name: value for name, value in {"TORCH_CPP_LOG_LEVEL": "ERROR"}.items() if name not in os.environ}
    os.environ.update(added, **{VARIABLE: str(notes.directory)})
    try:
        yield
    finally:
        for name in (*added, VARIABLE, "TORCHELASTIC_SIGNALS_TO_HANDLE"):  # the last is torch's
            os.environ.pop(name, None)
