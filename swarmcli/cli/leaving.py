"""How a person or the machine ends a peer's part in the run, and what is printed then."""

from __future__ import annotations

import math
import signal
import threading
from collections.abc import Callable

import typer

from swarmcli.cli.console import err
from swarmcli.cli.contributions import thanks
from swarmcli.cli.ending import INTERRUPTS, ExitCode, end_soon
from swarmcli.errors import MembershipError
from swarmcli.events import Event, MembershipEnded, Noticed
from swarmcli.journal import printable
from swarmcli.peer.activity import STAYS_ASKED, STAYS_HURRIED
from swarmcli.peer.peer import RunPeer
from swarmcli.run.watch import RunWatch


class FirstEar:
    """Hears a peer's events from the first one: prints what no view shows yet, and notes what ends the peer's part."""

    def __init__(self) -> None:
        self.stop = threading.Event()
        self.expelled = ""  # why the others no longer accept this peer
        self.prints = True

    def __call__(self, event: Event) -> None:
        if isinstance(event, Noticed) and self.prints:
            err.print(printable(event.text, 600), soft_wrap=True)
        # The others have hung up, so what it computes helps nobody. The command's last line says why.
        if isinstance(event, MembershipEnded):
            self.expelled = event.reason
            self.stop.set()


class Leaving:
    """The first Ctrl-C or SIGTERM acts as `swarm stop`: the role hands in what it has computed, then it ends. The
    second ends it after its present step."""

    def __init__(self, peer: RunPeer, watch: RunWatch, *, of_site: bool = False, patience: float = math.inf) -> None:
        """`of_site`: this process is rank 0 of a site. `patience`: seconds for which the site's launcher waits."""
        self._peer, self._watch = peer, watch
        self._of_site, self._patience = of_site, patience
        self._parted = False  # the farewell was printed
        self.interrupted = False
        self.say: Callable[[str], object] = err.print

    def signalled(self, number: signal.Signals, again: bool) -> None:
        self.interrupted = self.interrupted or number in INTERRUPTS
        self._peer.outcome = "stopped by Ctrl-C" if self.interrupted else "asked to stop"
        activity, by_hand = self._peer.activity, number in INTERRUPTS
        # Ctrl-C after `swarm stop` counts as a second Ctrl-C.
        now = again or (by_hand and activity.status().state == "stopping")
        stays = STAYS_ASKED if number == signal.SIGINT else STAYS_HURRIED
        status = activity.stop(0.0 if now else min(stays, self._patience))
        self._hurry(status.keeps)
        if again:
            self.say("leaving after the current step; Ctrl-C once more ends it at once and saves nothing")
        elif now:
            self.say("leaving after the current step")
        elif by_hand:
            self.say(
                "Ctrl-C again or `swarm stop --now` leaves without handing in"
                if status.keeps
                else "Ctrl-C again leaves at once"
            )

    def asked(self) -> None:
        """The user's command or page asks the peer to leave."""
        self._peer.outcome = "asked to stop"
        self._hurry(self._peer.activity.status().keeps)
        self.say("leaving, because you asked (swarm stop, or the page); Ctrl-C leaves without waiting")

    def _hurry(self, keeps: int) -> None:
        """A peer that has not come into the run leaves without a goodbye if that takes long. `keeps`: samples that it
        has to hand in."""
        of_site = self._of_site and self._peer.dht.is_alive()  # then the other ranks have to be told to leave as well
        if not (keeps or self._peer.summary.has_trained or of_site):
            # At exit code 0 a site's launcher would take this process for one that has done its work.
            code = ExitCode.INTERRUPTED if self.interrupted or self._of_site else ExitCode.DONE
            end_soon(self.say_farewell, code)

    def say_farewell(self) -> None:
        if not self._parted:
            self._parted = True
            err.show_cursor(True)
            err.print(self.farewell(), soft_wrap=True)

    def farewell(self) -> str:
        summary = self._peer.summary
        work = f" after {summary.samples:,} samples this time" if summary.role == "trainer" else ""
        lost = f"; {summary.lost:,} more are lost: {summary.why_lost}" if summary.lost else ""
        over = "the run has finished; " if self._watch.state == "finished" else ""
        return f"{over}left at epoch {summary.epoch}{work}{lost}; my files are in {self._peer.home.path}"

    def end(self, expelled: str) -> None:
        """Prints the last lines, after the goodbye. Ends the command with 130 after Ctrl-C; raises MembershipError if
        the run has `expelled` this peer."""
        self.say_farewell()
        if said := thanks(self._peer.summary, self._peer.standing):
            err.print(said, soft_wrap=True)
        if self._peer.saved:
            err.print(printable(self._peer.saved, 2000), soft_wrap=True)
        if expelled:
            raise MembershipError(expelled)
        if self.interrupted and self._watch.state != "finished":
            raise typer.Exit(ExitCode.INTERRUPTED)
