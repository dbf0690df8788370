"""Whom a searching peer keeps an eye on: connections that may end, and peers whose terms differ."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterable

from swarmcli.averaging.matchmaking.candidates import Entry
from swarmcli.errors import FingerprintError
from swarmcli.events import Events, PeerRefused
from swarmcli.network.endpoint import Endpoint
from swarmcli.network.identity import PeerID


class Watches:
    """Tells as soon as the connection to a watched peer is gone, or at once if there is none."""

    def __init__(self, endpoint: Endpoint, on_lost: Callable[[PeerID], None]) -> None:
        self._endpoint = endpoint
        self._on_lost = on_lost
        self._watched: dict[PeerID, asyncio.Future[str]] = {}

    def add(self, peer: PeerID) -> None:
        if peer != self._endpoint.peer_id and peer not in self._watched:
            lost = self._watched[peer] = self._endpoint.lost(peer)
            lost.add_done_callback(lambda ended: self._ended(peer, ended))

    def discard(self, peer: PeerID) -> None:
        lost = self._watched.pop(peer, None)
        if lost is not None:
            lost.cancel()

    def clear(self) -> None:
        for peer in list(self._watched):
            self.discard(peer)

    def _ended(self, peer: PeerID, lost: asyncio.Future[str]) -> None:
        if self._watched.get(peer) is lost:
            del self._watched[peer]
            self._on_lost(peer)


class Conflicts:
    """Peers that looked for the same group with other terms."""

    def __init__(self, events: Events) -> None:
        self._events = events
        self._found: dict[PeerID, tuple[tuple[str, ...], float]] = {}
        self._anyone_agrees = False

    def note(self, peer: PeerID, keys: tuple[str, ...], since: float) -> None:
        """The terms of a peer that came up at swarm time `since` differ under `keys`. Told once for each peer."""
        if peer not in self._found:
            reason = f"its recipe differs from ours in: {', '.join(keys)}"
            self._events.emit(PeerRefused(peer.text, reason, what="group"))
        known = self._found.get(peer, (keys, math.inf))
        self._found[peer] = (keys, min(since, known[1]))

    def agreed(self) -> None:
        """Somebody with this peer's terms has answered it: whoever differs is not the run."""
        self._anyone_agrees = True

    def cover(self, others: Iterable[Entry]) -> bool:
        """Whether all of these follow somebody whose terms differ, so that none is left to form a group with."""
        return all(entry.follows in self._found for entry in others)

    def check(self, since: float, enough: int) -> None:
        """Raises FingerprintError if so many of these peers name the same keys and came up before `since`, and
        nobody agrees with this one: then they are the run, not we."""
        if self._anyone_agrees:
            return
        elders: dict[tuple[str, ...], list[PeerID]] = {}
        for peer, (keys, theirs) in self._found.items():
            if theirs < since:
                elders.setdefault(tuple(sorted(keys)), []).append(peer)
        keys, peers = max(elders.items(), key=lambda item: len(item[1]), default=((), []))
        if len(peers) >= enough:
            names = ", ".join(peer.short for peer in peers)
            raise FingerprintError(f"refused by {names}: what must agree differs in {', '.join(keys)}", keys)
