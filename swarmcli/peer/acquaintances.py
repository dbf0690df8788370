"""Peers by whom one finds the network again when its contacts are gone. Whether all are of its run nobody knows."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path

from swarmcli.dht import DHT
from swarmcli.events import EpochAdvanced, Event, PeerConnected
from swarmcli.machine.registry import LocalPeers
from swarmcli.network.addresses import parse_address
from swarmcli.network.identity import PeerID
from swarmcli.peer.home import CONTACTS, LINK, Home, addresses_in, remembered


class Acquaintances:
    """Those of one peer: what its home remembers, and who runs on this computer. From any thread."""

    def __init__(
        self, home: Home, run_id: str, digest: str, contacts: Sequence[str], of_run: Callable[[], Collection[PeerID]]
    ) -> None:
        """`digest`: of the run's recipe, as in links; "": it cannot travel. `of_run`: who takes part in it."""
        self._home, self._run_id, self._digest = home, run_id, digest
        self._contacts, self._of_run = contacts, of_run
        self._remembered = -math.inf  # when they were written last

    def here(self, *, everywhere: bool = False) -> list[str]:
        """Addresses of peers that run in the homes beside this one, and of those that this one and they knew when they
        ran last. `everywhere`: also of those whose homes lie elsewhere on this computer, for a peer that finds nobody
        else."""
        own = self._home.path
        homes = [home for home in sorted(own.parent.glob("*-[1-9]*")) if home != own][:8]
        if everywhere:
            elsewhere = [Path(each.home) for each in LocalPeers().living() if each.run_id == self._run_id]
            found_there = [home for home in elsewhere if home.absolute() != own.absolute() and self._is_of_run(home)]
            homes = list(dict.fromkeys((*found_there[:8], *homes)))
        running = [address for home in homes for address in addresses_in(home / "peer.json", "addresses")]
        left = [address for home in homes for address in remembered(home)]
        found = dict.fromkeys((*remembered(own), *running, *left))
        return [each for each in found if each not in self._contacts][:32]

    def _is_of_run(self, home: Path) -> bool:
        """Whether a peer with a run id like ours takes part in this very run: others may have chosen the same name."""
        try:
            return bool(self._digest) and f"={self._digest}" in (home / LINK).read_text(encoding="utf-8")
        except (OSError, ValueError):
            return False

    def note(self, dht: DHT, event: Event) -> None:
        """Hears events on the loop, and writes a small file, once a second at most: a killed peer writes none."""
        due = time.monotonic() >= self._remembered + 1.0
        if due and isinstance(event, EpochAdvanced | PeerConnected) and dht.is_alive():
            self.remember(dht.node.known_addresses())

    def remember(self, known: Iterable[str]) -> None:
        """Those of the run first, and those of earlier times last: a peer that has lost everybody forgets nobody."""
        self._remembered = time.monotonic()
        before, of_run = remembered(self._home.path), set(self._of_run())
        by_peer: dict[PeerID | None, dict[str, None]] = {}
        for address in (*known, *before):
            parsed = parse_address(address)
            if parsed.scheme == "tcp":
                by_peer.setdefault(parsed.peer_id, {})[address] = None
        # Eight peers, each at three addresses: one that has left the run costs a few dials at the next start.
        first = sorted(by_peer, key=lambda peer: peer not in of_run)[:8]
        kept = [address for peer in first for address in list(by_peer[peer])[:3]]
        if kept != before:
            self._home.leave(CONTACTS, json.dumps(kept))
