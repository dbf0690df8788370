"""Where peers can be dialed, as URLs:

    tcp://host:port[/peer id]
    relay://<relay's peer id>/<peer id>    through another peer, which splices two connections
    memory://name[:port][/peer id]         inside one process

A text is an address only once it has been parsed; what comes from other peers goes through `readable`.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import IntEnum
from functools import lru_cache
from typing import Literal, NamedTuple, get_args

from swarmcli.errors import AddressError
from swarmcli.network.bounds import MAX_ADDRESS, MAX_ADDRESSES
from swarmcli.network.identity import PeerID

Scheme = Literal["tcp", "memory", "relay"]
Family = Literal["IPv4", "IPv6", "memory"]

_HOST_NAME = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_.-]{0,251}[A-Za-z0-9_.])?")
_ZONE = re.compile(r"[A-Za-z0-9_.-]{1,16}")  # the interface of a link-local address
_EXPECTED = "expected tcp://host:port, tcp://host:port/peerid or tcp://[ipv6]:port"
_EXPECTED_RELAY = "expected relay://relayid/peerid"
_READ_AT_MOST = 4 * MAX_ADDRESSES  # texts of one list that are looked at; only the peer that names more loses by it


@dataclass(frozen=True, slots=True)
class Address:
    """Where a peer can be dialed. `peer_id` is None when it is not known.

    A relay address has no host and no port, but names the relay and the peer behind it; the address book knows where
    the relay itself is dialed. `port` is 0 for a peer of the memory transport that has its host for itself.
    """

    scheme: Scheme
    host: str
    port: int = 0
    peer_id: PeerID | None = None
    relay: PeerID | None = None

    @property
    def direct(self) -> bool:
        """Whether it leads to the peer itself."""
        return self.relay is None

    def __str__(self) -> str:
        """The URL that `parse_address` reads."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        place = f"{host}:{self.port}" if self.port else host
        if self.relay is not None:
            place = self.relay.text
        peer = "" if self.peer_id is None else f"/{self.peer_id.text}"
        return f"{self.scheme}://{place}{peer}"


class Scope(IntEnum):
    """From where an IP address can be dialed. A larger scope holds the smaller ones."""

    HOST = 0  # from the same machine
    LAN = 1  # from the same private network: several have the same addresses for unlike machines
    INTERNET = 2


_NETWORKS = {
    None: (
        *("0.0.0.0/8", "224.0.0.0/3", "::/128", "ff00::/8"),  # unspecified, multicast and reserved
        # Like host names, these mean something else in each network: translators to IPv4 have the first two (RFC 6052
        # and 8215), and proxies invent the last ones for whatever name is dialed (they are for benchmarks: RFC 2544).
        *("64:ff9b::/96", "64:ff9b:1::/48", "198.18.0.0/15"),
    ),
    Scope.HOST: ("127.0.0.0/8", "::1/128"),
    Scope.LAN: (
        *("10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "169.254.0.0/16", "fc00::/7", "fe80::/10", "fec0::/10"),
        "100.64.0.0/10",  # between a provider and its customers' routers (RFC 6598)
    ),
}
_SCOPES = [(ipaddress.ip_network(each), scope) for scope, networks in _NETWORKS.items() for each in networks]


@lru_cache(maxsize=8192)  # strangers name the same few hosts again and again
def scope_of(host: str) -> Scope | None:
    """The scope of an IP address; None for a host name and for addresses that no single machine has."""
    try:
        found: ipaddress.IPv4Address | ipaddress.IPv6Address = ipaddress.ip_address(host)
    except ValueError:
        return None
    if isinstance(found, ipaddress.IPv6Address):
        found = found.ipv4_mapped or found
    return next((scope for network, scope in _SCOPES if found in network), Scope.INTERNET)


def parse_address(text: str) -> Address:
    """Reads an address. Raises AddressError with what was given and what was expected."""
    if not isinstance(text, str) or len(text) > MAX_ADDRESS:
        raise AddressError(f"an address is text of at most {MAX_ADDRESS} characters, got {str(text)[:80]!r}")
    scheme, separator, rest = text.partition("://")
    if not separator or scheme not in get_args(Scheme):
        raise AddressError(f"{text!r} is no address: {_as_url(text)}{_EXPECTED}")
    place, slash, peer_text = rest.partition("/")
    if scheme == "relay":
        if not slash:
            raise AddressError(f"{text!r} names no peer after its relay: {_EXPECTED_RELAY}")
        return Address("relay", "", 0, PeerID.parse(peer_text), PeerID.parse(place))
    peer_id = PeerID.parse(peer_text) if slash else None
    if scheme == "memory":
        name, colon, port_text = place.partition(":")
        if not _HOST_NAME.fullmatch(name) or (colon and not _is_port(port_text)):
            raise AddressError(f"{text!r} names no peer: expected memory://name or memory://name/peerid")
        return Address("memory", name, int(port_text or 0), peer_id)
    host, port = _split_host(text, place)
    return Address("tcp", host, port, peer_id)


def place_of(text: str) -> str:
    """An address without scheme and peer id, for people, who know hosts and not keys. Raises AddressError."""
    return str(replace(parse_address(text), peer_id=None)).partition("://")[2]


def readable(addresses: Iterable[str], peer: PeerID, horizon: Scope = Scope.HOST) -> tuple[str, ...]:
    """Those of the addresses that some peer names for `peer` which may be believed and tried.

    Left out are host names, which are resolved for this peer's user alone, and addresses below `horizon`: the narrowest
    scope that the peer that names them shares with us (see `Endpoint.horizon`). Direct ones come first, at most
    MAX_ADDRESSES. Never raises for a stranger's text.
    """
    found: dict[str, bool] = {}
    for text in tuple(addresses)[:_READ_AT_MOST]:
        read = _read(text) if len(text) <= MAX_ADDRESS else None
        if read is not None and read.peer_id in (None, peer) and read.scope >= horizon and read.relay != peer:
            found.setdefault(read.bare, read.relay is None)
    return tuple(sorted(found, key=lambda text: not found[text]))[:MAX_ADDRESSES]


def bounded(addresses: Iterable[str]) -> tuple[str, ...]:
    """Cuts a list of addresses to what may be kept and passed on without reading it. If some are too many or too long,
    only the peer that named them loses by it."""
    return tuple(address for address in tuple(addresses)[:_READ_AT_MOST] if len(address) <= MAX_ADDRESS)[:MAX_ADDRESSES]


def is_direct(text: str) -> bool:
    """Whether an address that has been read leads to the peer itself, and not to a relay."""
    return not text.startswith("relay://")


class _Read(NamedTuple):
    """What `readable` needs of one address. Kept, since neighbours in the hash table name the same addresses again and
    again."""

    bare: str  # without the peer's id where it can do without
    peer_id: PeerID | None
    relay: PeerID | None
    scope: Scope


@lru_cache(maxsize=8192)  # of at most MAX_ADDRESS characters each
def _read(text: str) -> _Read | None:
    """None for text that is no address, and for addresses that only this peer's own user may name."""
    try:
        address = parse_address(text)
    except AddressError:
        return None
    scope: Scope | None = Scope.INTERNET
    if address.direct:
        # An interface's name means nothing elsewhere. Names of the memory transport need no resolution.
        scope = scope_of(address.host) if "%" not in address.host else None
        if scope is None and address.scheme == "memory":
            scope = Scope.INTERNET
    if scope is None:
        return None
    bare = replace(address, peer_id=None) if address.direct else address
    return _Read(str(bare), address.peer_id, address.relay, scope)


def _is_port(text: str) -> bool:
    # At most five ASCII digits: int() alone would also take "+1", "1_0", blanks and digits of other scripts.
    return bool(re.fullmatch(r"[0-9]{1,5}", text)) and 0 < int(text) < 65536


def _as_url(text: str) -> str:
    """Says how a multiaddr of hivemind is written here; "" if the text is none."""
    found = re.match(r"/(ip4|ip6|dns|dns4|dns6)/([^/]+)/tcp/([0-9]+)(/|$)", text)
    if found is None:
        return "addresses are URLs over TCP here, no multiaddrs; " if text.startswith("/") else ""
    host = f"[{found[2]}]" if found[1] == "ip6" else found[2]
    return f"what hivemind writes so is here tcp://{host}:{found[3]}; "


def _split_host(text: str, place: str) -> tuple[str, int]:
    host, colon, port_text = place.rpartition(":")
    if not colon or not _is_port(port_text):
        raise AddressError(f"{text!r} has no port from 1 to 65535: {_EXPECTED}")
    if host.startswith("[") and host.endswith("]"):
        try:
            found = ipaddress.IPv6Address(host[1:-1])
            if found.scope_id is not None and not _ZONE.fullmatch(found.scope_id):
                raise ValueError("no name of an interface")
            host = str(found)
        except ValueError as error:
            raise AddressError(f"{text!r} has no IPv6 address in its brackets: {_EXPECTED}") from error
    elif not _HOST_NAME.fullmatch(host):
        raise AddressError(f"{text!r} has no host name or IP address: {_EXPECTED}")
    return host, int(port_text)
