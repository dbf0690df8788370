"""Commands: what rank 0 wants of the other ranks of its site, whose main threads carry them out within their steps.

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
    """One kind of command. Its fields say what is to be done; tensors follow in transfers and collectives.

    Subclasses need names that are unique among the kinds that a site's ranks know.
    """


class StepVerdict(Command, frozen=True):
    """Rank 0's word of a step, when it is over for the swarm. Nothing comes after it in this step."""

    epoch: int
    new_parameters: bool = False  # they follow
    new_buffers: bool = False  # likewise
    stop: bool = False
    void: bool = False  # the sums of gradients are worth nothing


Handlers = Mapping[type[Command], Callable[[Any], None]]


class LeaderCommands:
    """Where rank 0 gives its commands, one after the other. Thread-safe; every call blocks, so never on an event loop.

    Commands are given while the others wait in a step, between `open` and `shut` of the main thread; a thread that
    comes in between waits for the next step. Once a command has failed the ranks no longer agree on what comes next:
    all connections of the site are closed, `failed` says why, and so does every later command.
    """

    def __init__(self, site: Site) -> None:
        if site.rank != 0:
            raise ValueError(f"this is rank {site.rank}: only rank 0 gives commands")
        self.site = site
        self.is_open = False
        self.failed: SiteError | None = None
        self._turn = threading.Condition()  # held while a command is carried out
        self._waiting = 0

    def open(self) -> None:
        """The main threads of the other ranks wait for commands from now on."""
        with self._turn:
            self.is_open = True
            self._turn.notify_all()

    def shut(self) -> None:
        """Returns when everybody who waited has had a command carried out; nobody has one until the next `open`."""
        with self._turn:
            self._turn.wait_for(lambda: not self._waiting or self.failed)
            self.check()
            self.is_open = False

    def run(self, command: Command, transfer: Callable[[], T]) -> T:
        """Has every other rank carry it out, runs `transfer`, this rank's own part, meanwhile, and returns its value.

        The others may still be at it then; they do nothing else before. Raises SiteError; an error of `transfer` goes
        to the caller as it is, and the site is broken by it all the same.
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
                finally:  # also for a KeyboardInterrupt: the others wait in the middle of the command
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
        """Nobody waits for this site any more: neither another rank, nor a thread of this one. For any thread."""
        self.site.break_off()  # first: a thread inside of a transfer holds the turn until that ends
        with self._turn:
            self.failed = self.failed or SiteError(why)
            self._turn.notify_all()


def follow(site: Site, handlers: Handlers) -> StepVerdict:
    """At another rank: carries out commands until rank 0 says that the step is over. Waits for it as long as it lives:
    what that waits for, in the swarm, has bounds of its own. Raises SiteError."""
    kinds: Any = reduce(or_, handlers, StepVerdict)
    while not isinstance(command := receive_message(kinds, site.group, 0), StepVerdict):
        handlers[type(command)](command)
    return command
