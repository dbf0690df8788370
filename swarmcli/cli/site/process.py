"""How a process of a site behaves towards whoever started it: it ends with its launcher, tells a failure once, and
says by its exit code whether starting anew makes sense."""

from __future__ import annotations

import os
import shutil
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import typer

from swarmcli.cli.failures import ExitCode, exit_code
from swarmcli.cli.site.notes import Network, Notes
from swarmcli.cli.site.place import Place, place_of_process
from swarmcli.errors import BootstrapError, ListenError, SiteError, SwarmError
from swarmcli.training.interrupt import SIGNALS

PARENT_SECONDS = 0.5  # between two looks whether the launcher is still there
LINGER_SECONDS = 2.0  # of a process that knows only that others are gone, whether one of them tells why
TELLING_SECONDS = 30.0  # that this one may take: it leaves the swarm first
INTERRUPTS = (signal.SIGINT, signal.SIGUSR1)  # of which a person's Ctrl-C is the cause


class SiteProcess:
    """This process as one of a site. Use `running` around all that it does."""

    def __init__(self, place: Place, notes: Notes | None) -> None:
        self.place = place
        self.notes = notes  # None under the volunteer's own torchrun
        self._tells: bool | None = None  # whether it is for this process to tell what went wrong

    @classmethod
    def of_environment(cls) -> SiteProcess | None:
        """What a launcher made of this process; None: no part of a site."""
        place = place_of_process()
        return cls(place, Notes.found()) if place is not None else None

    @property
    def signals(self) -> Sequence[signal.Signals]:
        """Those that ask this process to stop after its current step.

        `swarm` sends signals of its own, so that SIGTERM, with which torch's launcher ends the survivors of a failure,
        ends them at once. Under torchrun the same SIGTERM may be a person's wish.
        """
        return (signal.SIGUSR1, signal.SIGUSR2) if self.notes is not None else SIGNALS

    def heed(self, stop: threading.Event) -> None:
        """Called when the handlers are in place: hears of a signal that came before."""
        if self.notes is not None and (number := self.notes.stop) is not None and not stop.is_set():
            signal.raise_signal(number)

    @property
    def restarted(self) -> bool:
        """Whether this process knows that the site has lived before, and may have left a state to go on from. The
        agents of torchrun on several machines count for themselves, so one process may know it and another not."""
        restarts = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        return restarts != "0" or (self.notes is not None and self.notes.epoch > 0)

    def note_epoch(self, epoch: int, network: Network) -> None:
        """Tells the launcher that this life of the site was of use, and the next life where it is at home."""
        if self.notes is not None:
            self.notes.epoch = epoch
            self.notes.network = network

    @contextmanager
    def claiming(self) -> Iterator[None]:
        """For rank 0 in a session, the end of which takes a while: what it knows to be wrong comes before what the
        others will find, that rank 0 is gone."""
        try:
            yield
        except SiteError:
            raise
        except SwarmError:
            self._is_first_to_tell()
            raise

    @contextmanager
    def running(self) -> Iterator[None]:
        """Whatever goes wrong inside of it is told by one process of the site, and ends in an exit code."""
        with ends_with_parent(self.notes.launcher if self.notes else None, end_process=self._end_as_orphan):
            if self.notes is None:
                yield
                return
            try:
                yield
            except SiteError:
                # Somebody else has failed, or is silent; the launcher, who sees the exit codes, says who.
                self._linger()
                raise self._again() from None
            except typer.Exit:
                raise
            except (BootstrapError, ListenError):
                # What the life before knew of the network may be no more; the next one begins without.
                if self.notes.network == Network():
                    raise
                self.notes.network = Network()
                raise self._again() from None
            except SwarmError as error:
                if self._is_first_to_tell():
                    raise
                raise typer.Exit(exit_code(error)) from None
            except Exception:
                if self._is_first_to_tell():
                    traceback.print_exc()
                    typer.echo(
                        f"swarm: this is a fault in swarm itself, in process {self.place.rank} of the site; please "
                        "report it with the lines above",
                        err=True,
                    )
                raise self._again() from None

    def _end_as_orphan(self, code: int) -> None:
        if self.notes is not None:
            shutil.rmtree(self.notes.directory, ignore_errors=True)  # as the launcher would have
        os._exit(code)

    def _is_first_to_tell(self) -> bool:
        if self._tells is None:
            self._tells = self.notes is not None and self.notes.first_to_tell()
        return self._tells

    def _linger(self) -> None:
        """Lets a process that knows more end first: the launcher ends all when it sees the first exit code."""
        assert self.notes is not None
        begin = time.monotonic()
        while self.notes.stop is None:
            waited = time.monotonic() - begin
            if waited >= (TELLING_SECONDS if self.notes.told else LINGER_SECONDS):
                return
            time.sleep(0.1)

    def _again(self) -> typer.Exit:
        assert self.notes is not None
        self.notes.break_up()
        return typer.Exit(ExitCode.START_AGAIN)


@contextmanager
def ends_with_parent(launcher: int | None = None, *, end_process: Callable[[int], object] = os._exit) -> Iterator[None]:
    """Within this block the process ends when its parent is gone, whatever it does: nobody else would end it then.

    `launcher`: the parent that it began with, if that is known; it may be gone already.
    """
    parent, over = launcher or os.getppid(), threading.Event()

    def watch() -> None:
        while not over.wait(PARENT_SECONDS):
            if os.getppid() != parent:
                end_process(ExitCode.FAILURE)
                return

    thread = threading.Thread(target=watch, name="swarm-parent-watch")
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
