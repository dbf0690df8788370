"""Where peers can be dialed, as far as this endpoint has heard."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from swarmcli.network.addresses import PeerInfo
from swarmcli.network.identity import PeerID
from swarmcli.network.wire.messages import MAX_ADDRESS, MAX_ADDRESSES


@dataclass(slots=True)
class _Entry:
    own: tuple[str, ...] = ()  # what the peer itself said over an authenticated connection, or where it answered
    heard: tuple[str, ...] = ()  # what others last said; they may err or lie, so it never displaces the former


class AddressBook:
    """Bounded: the peer that was named or asked for least recently goes first."""

    def __init__(self, max_peers: int) -> None:
        self._max_peers = max_peers
        self._entries: OrderedDict[PeerID, _Entry] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def learn(self, info: PeerInfo) -> None:
        """Takes in hearsay. No addresses: nothing new."""
        if info.addresses:
            self._entry(info.peer_id).heard = _bounded(info.addresses)

    def told(self, peer: PeerID, addresses: tuple[str, ...]) -> None:
        """Takes in what the peer itself says. No addresses: it cannot be dialed, or says nothing."""
        if addresses:
            self._entry(peer).own = _bounded(addresses)

    def answered(self, peer: PeerID, address: str) -> None:
        """The peer has just proved that it is at this address: it is tried first from now on."""
        entry = self._entry(peer)
        entry.own = _bounded((address, *(other for other in entry.own if other != address)))

    def addresses_of(self, peer: PeerID) -> tuple[str, ...]:
        entry = self._entries.get(peer)
        if entry is None:
            return ()
        self._entries.move_to_end(peer)
        return tuple(dict.fromkeys((*entry.own, *entry.heard)))[:MAX_ADDRESSES]

    def _entry(self, peer: PeerID) -> _Entry:
        entry = self._entries.setdefault(peer, _Entry())
        self._entries.move_to_end(peer)
        if len(self._entries) > self._max_peers:
            self._entries.popitem(last=False)
        return entry


def _bounded(addresses: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(address for address in addresses if len(address) <= MAX_ADDRESS)[:MAX_ADDRESSES]
