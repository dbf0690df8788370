"""Routers of a memory network: peers behind them dial out, and nobody dials in except at forwarded ports."""

from __future__ import annotations

from typing import Literal

from swarmcli.network.identity import PeerID

Translation = Literal["independent", "dependent"]  # of the peer that is dialed (RFC 4787, section 4.1)


class MemoryRouter:
    """A home's router with a stateful filter: each connection from inside is seen at `host`, at a port of its own. A
    dial from outside to a port that is not forwarded meets silence; with `refuses`, the SYN of a simultaneous dial is
    refused."""

    def __init__(
        self, host: str, behind: MemoryRouter | None, hairpin: bool, translation: Translation, refuses: bool
    ) -> None:
        """See MemoryNetwork.router."""
        self.host = host
        self.behind = behind
        self.hairpin = hairpin
        self.translation = translation
        self.refuses = refuses
        self._shown: dict[tuple[PeerID, int], int] = {}  # a peer and its port → the outer port
        self._forwarded: dict[int, PeerID] = {}
        self._next_port = 20_000

    def forward(self, port: int, peer: PeerID) -> str:
        """Forwards this port to a peer directly behind this router; returns the outer address. Port 0: all ports that
        are not forwarded otherwise."""
        self._forwarded[port] = peer
        return f"memory://{self.host}:{port}" if port else f"memory://{self.host}"

    def forget(self, port: int) -> None:
        """No longer forwards this port."""
        self._forwarded.pop(port, None)

    def inside(self, port: int) -> PeerID | None:
        """The peer that a dial from outside reaches."""
        return self._forwarded.get(port) or self._forwarded.get(0)

    def outer_address(self, source: tuple[PeerID, int] | None = None) -> str:
        """The address at which one more connection from inside is seen. `source`: the peer and its port; an independent
        translation gives these the same outer port each time."""
        port = self._shown.get(source) if source is not None and self.translation == "independent" else None
        if port is None and source is not None and self._keeps(source[1]):
            port = self._shown[source] = source[1]
        elif port is None:
            port = self._next_port = self._next_port + 1
            if source is not None:
                self._shown[source] = port
        return f"memory://{self.host}:{port}"

    def _keeps(self, port: int) -> bool:
        """Whether the outer port has the same number, as at most routers: unless that is taken."""
        return self.translation == "independent" and port not in self._shown.values()


def networks(router: MemoryRouter | None) -> list[MemoryRouter | None]:
    """The networks into which a peer behind this router can dial: its own first, the open one (None) last."""
    found = [router]
    while router is not None:
        router = router.behind
        found.append(router)
    return found


def seen_through(dialer: MemoryRouter | None, listener: MemoryRouter | None) -> MemoryRouter | None:
    """The router whose address a listener sees instead of the dialer's own; None: it sees the dialer."""
    seen = None
    while dialer is not listener and dialer is not None:
        seen, dialer = dialer, dialer.behind
    return seen
