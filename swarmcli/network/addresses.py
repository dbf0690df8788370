"""Where peers can be dialed: URLs `tcp://host:port[/peer id]` and, inside one process, `memory://name[/peer id]`."""

from __future__ import annotations

import ipaddress
import re
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from swarmcli.errors import AddressError
from swarmcli.network.identity import PeerID
from swarmcli.network.limits import MAX_ADDRESS, MAX_ADDRESSES

Scheme = Literal["tcp", "memory"]

_HOST_NAME = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_.-]{0,251}[A-Za-z0-9_.])?")
_EXPECTED = "expected tcp://host:port, tcp://host:port/peerid or tcp://[ipv6]:port"


@dataclass(frozen=True, slots=True)
class Address:
    """Where a peer can be dialed. `port` is 0 for the memory transport; `peer_id` is None when it is not known."""

    scheme: Scheme
    host: str
    port: int = 0
    peer_id: PeerID | None = None

    def __str__(self) -> str:
        return format_address(self)


def parse_address(text: str) -> Address:
    """Reads an address. Raises AddressError with what was given and what was expected."""
    if not isinstance(text, str) or len(text) > MAX_ADDRESS:
        raise AddressError(f"an address is text of at most {MAX_ADDRESS} characters, got {str(text)[:80]!r}")
    scheme, separator, rest = text.partition("://")
    if not separator or scheme not in get_args(Scheme):
        raise AddressError(f"{text!r} is no address: {_as_url(text)}{_EXPECTED}")
    place, slash, peer_text = rest.partition("/")
    peer_id = PeerID.parse(peer_text) if slash else None
    if scheme == "memory":
        if not _HOST_NAME.fullmatch(place):
            raise AddressError(f"{text!r} names no peer: expected memory://name or memory://name/peerid")
        return Address("memory", place, 0, peer_id)
    host, port = _split_host(text, place)
    return Address("tcp", host, port, peer_id)


def format_address(address: Address) -> str:
    """The URL that `parse_address` reads."""
    host = f"[{address.host}]" if ":" in address.host else address.host
    place = host if address.scheme == "memory" else f"{host}:{address.port}"
    peer = "" if address.peer_id is None else f"/{address.peer_id.text}"
    return f"{address.scheme}://{place}{peer}"


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

    def learn(self, peer: PeerID, addresses: tuple[str, ...]) -> None:
        """Takes in hearsay. No addresses: nothing new."""
        if addresses:
            self._entry(peer).heard = _bounded(addresses)

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


def _as_url(text: str) -> str:
    """What a multiaddr, as hivemind has them, is here; "" if it is none."""
    found = re.match(r"/(ip4|ip6|dns|dns4|dns6)/([^/]+)/tcp/([0-9]+)(/|$)", text)
    if found is None:
        return "addresses are URLs over TCP here, no multiaddrs; " if text.startswith("/") else ""
    host = f"[{found[2]}]" if found[1] == "ip6" else found[2]
    return f"what hivemind writes so is here tcp://{host}:{found[3]}; "


def _split_host(text: str, place: str) -> tuple[str, int]:
    host, colon, port_text = place.rpartition(":")
    # At most five ASCII digits: int() alone would also take "+1", "1_0", blanks and digits of other scripts.
    if not colon or not re.fullmatch(r"[0-9]{1,5}", port_text) or not 0 < int(port_text) < 65536:
        raise AddressError(f"{text!r} has no port from 1 to 65535: {_EXPECTED}")
    if host.startswith("[") and host.endswith("]"):
        try:
            host = str(ipaddress.IPv6Address(host[1:-1]))
        except ValueError as error:
            raise AddressError(f"{text!r} has no IPv6 address in its brackets: {_EXPECTED}") from error
    elif not _HOST_NAME.fullmatch(host):
        raise AddressError(f"{text!r} has no host name or IP address: {_EXPECTED}")
    return host, int(port_text)


def _bounded(addresses: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(address for address in addresses if len(address) <= MAX_ADDRESS)[:MAX_ADDRESSES]


def check_addresses(addresses: Sequence[str]) -> None:
    """Raises ValueError if a peer claims more or longer addresses than it may."""
    if len(addresses) > MAX_ADDRESSES or any(len(address) > MAX_ADDRESS for address in addresses):
        raise ValueError(f"a peer has at most {MAX_ADDRESSES} addresses of {MAX_ADDRESS} characters")
