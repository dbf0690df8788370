"""Commands of rank 0 to the other ranks of its site, whose main threads execute them within their steps.

rank 0, any thread but the loop's                        every other rank, its main thread
    …waits until the others wait in a step
commands.run(command, transfer)  ── command ──▶          handlers[type(command)](command)
    transfer()                   ◀─ tensors ─▶             the other half of the transfer
    …
rank 0's main thread             ── StepVerdict ──▶      the step is over
"""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable, Mapping
from functools import reduce
from operator import or_
from typing import Any, TypeVar

import msgspec

from swarmcli.errors import SiteError
from swarmcli.sites.links import receive_message, send_message
from swarmcli.sites.site import Site

T = TypeVar("T")
logger = logging.getLogger(__name__)


class Command(msgspec.Struct, tag=True, frozen=True):
    """Base of all commands. The fields say what to do; tensors follow in transfers and collectives.

    Subclasses need names that are unique among the kinds that a site's ranks know.
    """


class StepVerdict(Command, frozen=True):
    """Tells how a step went, after it is over for the swarm. The last command of each step."""

    epoch: int
    new_parameters: bool = False  # they follow
    new_buffers: bool = False  # they follow, after the parameters
    stop: bool = False
    void: bool = False  # the other ranks have to drop their sums of gradients


Handlers = Mapping[type[Command], Callable[[Any], None]]


class LeaderCommands:
    """Sends rank 0's commands, one after the other. Thread-safe; every call blocks, so never on an event loop.

    Commands run while the other ranks wait in a step: from the main thread's `open` to its `shut`. Other threads wait
    for the next `open`. After a command has failed, the ranks no longer agree on what comes next: all connections of
    the site are closed, `failed` says why, and every later command raises the same.
    """

    def __init__(self, site: Site) -> None:
        if site.rank != 0:
            raise ValueError(f"this is rank {site.rank}: only rank 0 gives commands")
        self.site = site
        self.is_open = False
        self.failed: SiteError | None = None
        self._turn = threading.Condition()  # held while a command runs
        self._waiting = 0

    def open(self) -> None:
        """From now on the main threads of the other ranks wait for commands."""
        with self._turn:
            self.is_open = True
            self._turn.notify_all()

    def shut(self) -> None:
        """Returns after all threads that waited have run their commands; later ones wait until the next `open`."""
        with self._turn:
            self._turn.wait_for(lambda: not self._waiting or self.failed)
            self.check()
            self.is_open = False

    def run(self, command: Command, transfer: Callable[[], T]) -> T:
        """Sends the command to every other rank, runs `transfer`, this rank's own part of it, and returns its value.

        The others may still be at work then; they finish it before they do anything else. Raises SiteError. An error of
        `transfer` goes to the caller as it is, but breaks the site too.
        """
        with self._turn:
            self._waiting += 1
            try:
                self._turn.wait_for(lambda: self.is_open or self.failed)
                self.check()
                done = False
                try:
                    for rank in self.site.others:
                        send_message(self.site.group, command, rank)
                    result = transfer()
                    done = True
                finally:  # for a KeyboardInterrupt too: the others wait in the middle of the command
                    if not done:
                        error = sys.exception()
                        self.fail(f"{type(command).__name__} came to no end at rank 0: {error or type(error).__name__}")
                        logger.error("%s", self.failed)
            finally:
                self._waiting -= 1
                self._turn.notify_all()
            return result

    def check(self) -> None:
        """Raises SiteError if a command has failed, or the site has."""
        if self.failed is not None:
            raise SiteError(str(self.failed)) from self.failed

    def fail(self, why: str) -> None:
        """Breaks the site: all that wait, other ranks and threads of this one, get an error. For any thread."""
        self.site.break_off()  # before the lock: a thread inside of a transfer holds it until that ends
        with self._turn:
            self.failed = self.failed or SiteError(why)
            self._turn.notify_all()


def follow(site: Site, handlers: Handlers) -> StepVerdict:
    """At the other ranks: runs commands until rank 0 says that the step is over. Waits for as long as rank 0 lives,
    since its own waits in the swarm are bounded. Raises SiteError."""
    kinds: Any = reduce(or_, handlers, StepVerdict)
    while not isinstance(command := receive_message(kinds, site.group, 0), StepVerdict):
        handlers[type(command)](command)
    return command
