"""Peers of one machine share its processors: each takes so many threads that together they have one per core.

Teams of threads that do not fit onto the cores wait for each other at the end of every operation. Two trainers with two
threads each on two cores took five times as long for a step as with one thread each.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from swarmcli.machine.registry import LocalPeer, LocalPeers, RegistryEntry
from swarmcli.machine.sensors import OthersUse
from swarmcli.optim.config import Role
from swarmcli.recipe import Recipe
from swarmcli.threads import count_threads_by


class ProcessorShare:
    """How many threads are this process's share, while other peers of this machine come and go.

    The threads that torch would take, less one for each core that other programs keep busy, are divided among the
    trainers; the remainder goes to the oldest of them. A monitor, which computes now and then, takes as many as a
    further trainer would get.
    """

    def __init__(
        self, peers: LocalPeers, entry: RegistryEntry, threads: int, *, shared: bool = True, every: float = 1.0
    ) -> None:
        """`entry`: this process's in the registry. `threads`: how many there are for all; if `shared` is False, for
        this process alone. `every`: seconds between two looks at which peers are there; one takes about 0.1 ms for each
        peer."""
        self._peers = peers
        self.entry = entry
        self._all = self._count = threads
        self._shared = shared
        self._every = every
        self._looked = -math.inf
        self._others = OthersUse()

    def count(self) -> int:
        """Returns how many threads are this process's share now. Any thread may call it."""
        now = time.monotonic()
        if now >= self._looked + self._every:
            self._looked = now
            self._count = self._share() if self._shared else self._all
        return self._count

    def _share(self) -> int:
        try:
            self.entry.renew()
            living = self._peers.living()
        except OSError:
            return self._count
        trainers = [peer.pid for peer in living if peer.role == "trainer"]
        me = self.entry.peer.pid
        others = [pid for pid in trainers if pid != me]
        place = trainers.index(me) if me in trainers else len(others)
        busy = round((self._others.read([peer.pid for peer in living]) or 0.0) * (os.cpu_count() or 1))
        each, rest = divmod(max(1, self._all - busy), len(others) + 1)
        return min(self._all, max(1, each + (place < rest)))

    def take(self) -> None:
        """Sets torch's threads to this process's present share. To be called between two steps."""
        if torch.get_num_threads() != (count := self.count()):
            torch.set_num_threads(count)


@contextmanager
def sharing_processors(recipe: Recipe, role: Role, home: Path, every: float = 1.0) -> Iterator[ProcessorShare]:
    """Shows this process to the other peers of the machine while the block lasts, and yields its share.

    `local.threads` and OMP_NUM_THREADS are a person's own choice: then nothing is divided here. `every`: see
    ProcessorShare.
    """
    peers, me = LocalPeers(), LocalPeer.here(role, recipe.run_id, home)
    shared = recipe.local.threads is None and "OMP_NUM_THREADS" not in os.environ
    with peers.entered(me) as entry:
        threads = recipe.local.threads or torch.get_num_threads()
        share = ProcessorShare(peers, entry, threads, shared=shared, every=every)
        with count_threads_by(share.count):
            yield share
