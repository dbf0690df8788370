"""The peers of one user on one computer, whatever their runs, as each of them says that it goes."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

from swarmcli.errors import ControlError
from swarmcli.machine import client
from swarmcli.machine.registry import LocalPeer, LocalPeers
from swarmcli.run.values import MachinePeer, shown_as


class Neighbours:
    """Asks them through their APIs, with the tokens that this user alone can read. From any thread."""

    def __init__(self, registry: LocalPeers | None = None, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._registry = registry or LocalPeers()
        self._clock = clock
        self._lock = threading.Lock()
        self._told: Sequence[MachinePeer] = ()
        self._asked_at = float("-inf")

    def look(self) -> Sequence[MachinePeer]:
        """All of them, this one too, the oldest first. Their `url` holds a token: it is for this user alone."""
        with self._lock:
            if self._clock() - self._asked_at >= 1.0:  # every page that is open asks
                self._told = self._ask()
                self._asked_at = self._clock()
            return self._told

    def _ask(self) -> Sequence[MachinePeer]:
        try:
            peers = self._registry.peers()[:32]
        except OSError:
            return ()
        if not peers:
            return ()
        with ThreadPoolExecutor(min(8, len(peers))) as pool:
            return list(pool.map(self._describe, peers))

    def _describe(self, peer: LocalPeer) -> MachinePeer:
        sentence = url = ""
        # One that is still joining, or busy, or of a version that says other things, is shown all the same.
        with suppress(ControlError, KeyError, TypeError):
            sentence = client.get(peer, "state", registry=self._registry, timeout=1.0)["me"]["sentence"]
            url = f"{peer.api}/?token={self._registry.token(peer)}"
        return shown_as(MachinePeer, peer, name=peer.label, me=peer.pid == os.getpid(), url=url, sentence=sentence)
