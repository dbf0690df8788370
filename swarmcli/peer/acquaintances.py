"""Peers through which a peer finds the network again when its contacts are gone. Not all of them need be in its run."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Collection, Iterable, Sequence

from swarmcli.dht import DHT
from swarmcli.events import EpochAdvanced, Event, PeerConnected
from swarmcli.network.addresses import parse_address
from swarmcli.network.identity import PeerID
from swarmcli.peer.home import CONTACTS, Home, addresses_in, remembered


class Acquaintances:
    """The peers that one peer knows: those that its home remembers, and those that run on this computer. Any thread may
    call it."""

    def __init__(self, home: Home, contacts: Sequence[str], of_run: Callable[[], Collection[PeerID]]) -> None:
        """`of_run`: the peers that take part in the run."""
        self._home, self._contacts, self._of_run = home, contacts, of_run
        self._remembered = -math.inf  # when addresses were last written

    def here(self) -> list[str]:
        """Returns addresses of peers that run in the homes beside this one, and of peers that this one and those knew
        when they last ran."""
        own = self._home.path
        homes = [home for home in sorted(own.parent.glob("*-[1-9]*")) if home != own][:8]
        running = [address for home in homes for address in addresses_in(home / "peer.json", "addresses")]
        left = [address for home in homes for address in remembered(home)]
        found = dict.fromkeys((*remembered(own), *running, *left))
        return [each for each in found if each not in self._contacts][:32]

    def note(self, dht: DHT, event: Event) -> None:
        """Hears events on the loop, and writes a small file, once a second at most, since a peer that is killed writes
        none."""
        due = time.monotonic() >= self._remembered + 1.0
        if due and isinstance(event, EpochAdvanced | PeerConnected) and dht.is_alive():
            self.remember(dht.node.known_addresses())

    def remember(self, known: Iterable[str]) -> None:
        """Keeps peers of the run first, and peers of earlier times last: a peer that has lost everybody forgets
        nobody."""
        self._remembered = time.monotonic()
        before, of_run = remembered(self._home.path), set(self._of_run())
        by_peer: dict[PeerID | None, dict[str, None]] = {}
        for address in (*known, *before):
            parsed = parse_address(address)
            if parsed.scheme == "tcp":
                by_peer.setdefault(parsed.peer_id, {})[address] = None
        # Eight peers, each at three addresses: those that have left the run cost a few dials at the next start.
        first = sorted(by_peer, key=lambda peer: peer not in of_run)[:8]
        kept = [address for peer in first for address in list(by_peer[peer])[:3]]
        if kept != before:
            self._home.leave(CONTACTS, json.dumps(kept))
