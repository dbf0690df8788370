"""Commands: what rank 0 wants of all other ranks of its site while their main threads compute or wait.

rank 0, any thread but the loop's                every other rank, its Follower's thread
commands.run(command, transfer)  ── command ───▶ handlers[type(command)](command)
    transfer()                   ◀─ tensors ─▶     the other half of the transfer
                                 ◀── done ─────
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
import torch

from swarmcli.errors import SiteError
from swarmcli.sites.links import receive_message, receive_tensors, send_message, send_tensors
from swarmcli.sites.site import Site

T = TypeVar("T")
logger = logging.getLogger(__name__)

_NOTHING: Any = lambda: None  # noqa: E731  # a transfer of nothing


class Command(msgspec.Struct, tag=True, frozen=True):
    """One kind of command. Its fields say what is to be done; tensors follow in collectives of the orders group.

    Subclasses need names that are unique among the kinds that a site's Followers know.
    """


class LeaveSite(Command, frozen=True):
    """The last one: Followers end, and nothing more comes."""


class LeaderCommands:
    """Where rank 0 gives its commands, one after the other. Thread-safe; every call blocks, so never on an event loop.

    Once a command has failed the ranks no longer agree on what comes next: all connections of the site are closed,
    `failed` says why, and so does every later command. `check` is for the main thread, which may hear of it no other
    way.
    """

    def __init__(self, site: Site) -> None:
        if site.rank != 0:
            raise ValueError(f"this is rank {site.rank}: only rank 0 gives commands")
        self.site = site
        self._lock = threading.Lock()
        self._left = False
        self.failed: SiteError | None = None

    def run(self, command: Command, transfer: Callable[[], T] = _NOTHING) -> T:
        """Has every other rank carry it out, runs `transfer`, this rank's own part, meanwhile, and returns its value.

        When it returns all ranks are done: the others have the site's timeout to say so after this rank's own part.
        Raises SiteError; an error of `transfer` goes to the caller as it is, and the site is broken by it all the same.
        """
        with self._lock:
            self.check()
            if self._left:
                raise SiteError(f"{type(command).__name__}: the site has been told to end")
            done = False
            try:
                self._send(command)
                result = transfer()
                for rank in self.site.others:
                    receive_tensors(self.site.commands, [torch.empty(1, dtype=torch.uint8)], rank, self.site.timeout)
                done = True
            finally:  # also for a KeyboardInterrupt: the others wait in the middle of the command
                if not done:
                    error = sys.exception()
                    why = error or type(error).__name__
                    self.failed = SiteError(f"{type(command).__name__} came to no end at rank 0: {why}")
                    logger.error("%s", self.failed)
                    self.site.break_off()
            return result

    def check(self) -> None:
        """Raises SiteError if a command has failed."""
        if self.failed is not None:
            raise SiteError(str(self.failed)) from self.failed

    def close(self) -> None:
        """Lets the others' Followers end. Idempotent; does nothing where a command has failed."""
        with self._lock:
            if self.failed is None and not self._left:
                self._left = True
                self._send(LeaveSite())

    def _send(self, command: Command) -> None:
        for rank in self.site.others:
            send_message(self.site.commands, command, rank)


class CommandFollower:
    """The thread in which a rank other than 0 carries out commands, one at a time.

    A handler may touch what the main thread uses only under a lock, or where the main thread waits for rank 0
    meanwhile. If it raises, the connections of the site are closed, which wakes the main threads of all ranks, and
    `failed` holds the error.
    """

    def __init__(self, site: Site, handlers: Mapping[type[Command], Callable[[Any], None]]) -> None:
        """`handlers` by the kind of command. Starts nothing."""
        if site.rank == 0:
            raise ValueError("this is rank 0: it gives the orders")
        self._site = site
        self._handlers = dict(handlers)
        self._kinds: Any = reduce(or_, [LeaveSite, *handlers])
        self._thread = threading.Thread(target=self._run, name="swarm-follower", daemon=True)
        self.failed: Exception | None = None

    def start(self) -> None:
        self._thread.start()

    def join(self) -> None:
        """Returns when rank 0 has let this rank go. Raises SiteError if it came to another end."""
        self._thread.join()
        self.check()

    def check(self) -> None:
        """Raises SiteError if the thread has ended by an error."""
        if self.failed is not None:
            raise SiteError(f"rank {self._site.rank} can follow no more commands: {self.failed}") from self.failed

    def _run(self) -> None:
        try:
            while self._follow():
                send_tensors(self._site.commands, [torch.zeros(1, dtype=torch.uint8)], 0)
        except Exception as error:
            self.failed = error
            logger.error("this rank of the site can follow no more commands", exc_info=error)
            self._site.break_off()

    def _follow(self) -> bool:
        """Waits for a command and carries it out; False for the last one."""
        command = receive_message(self._kinds, self._site.commands, 0)
        if isinstance(command, LeaveSite):
            return False
        self._handlers[type(command)](command)
        return True
