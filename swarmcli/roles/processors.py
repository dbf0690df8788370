"""Peers of one machine share its processors: each takes so many threads that together they have one per core.

Teams of threads that do not fit onto the cores wait for each other at the end of every operation. Two trainers with two
threads each on two cores took five times as long for a step as with one thread each.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from swarmcli.optim.config import Role
from swarmcli.recipe import Recipe
from swarmcli.roles.local_peers import LocalPeer, LocalPeers
from swarmcli.threads import count_threads_by

LOOK_SECONDS = 1.0  # between two looks at who is there; one takes about 0.1 ms for each peer


class ProcessorShare:
    """How many threads are this process's share, as long as other peers of this machine come and go.

    All threads that torch would take are divided by the trainers; what is left over goes to the oldest of them. A
    monitor, which computes now and then, takes as many as one trainer more would get.
    """

    def __init__(self, peers: LocalPeers, me: LocalPeer, threads: int, *, shared: bool = True) -> None:
        """`threads`: how many there are for all; with `shared` false, for this process, whoever else is there."""
        self._peers = peers
        self._me = me
        self._all = self._count = threads
        self._shared = shared
        self._looked = -LOOK_SECONDS

    def count(self) -> int:
        """From any thread."""
        now = time.monotonic()
        if self._shared and now >= self._looked + LOOK_SECONDS:
            self._looked = now
            self._count = self._share()
        return self._count

    def _share(self) -> int:
        try:
            self._peers.enter(self._me)  # again, if the file is gone: old files of temporary directories are removed
            trainers = [peer for peer in self._peers.living() if peer.role == "trainer"]
        except OSError:
            return self._count
        others = [peer for peer in trainers if peer.pid != self._me.pid]
        place = trainers.index(self._me) if self._me in trainers else len(others)
        each, rest = divmod(self._all, len(others) + 1)
        return max(1, each + (place < rest))

    def take(self, *ignored: object) -> None:
        """Gives this thread, between two steps, as many threads for its arithmetic as its share is now."""
        if torch.get_num_threads() != (count := self.count()):
            torch.set_num_threads(count)


@contextmanager
def sharing_processors(recipe: Recipe, role: Role, home: Path) -> Iterator[ProcessorShare]:
    """Shows this process to the other peers of the machine while the block lasts, and gives its share.

    `local.threads` and OMP_NUM_THREADS are a person's own choice: then nothing is divided here.
    """
    peers, me = LocalPeers(), LocalPeer.here(role, recipe.run_id, home)
    shared = recipe.local.threads is None and "OMP_NUM_THREADS" not in os.environ
    share = ProcessorShare(peers, me, recipe.local.threads or torch.get_num_threads(), shared=shared)
    with peers.entered(me), count_threads_by(share.count):
        yield share
