"""Network prefixes, by which strangers are counted: one owner's addresses mostly have one in common.

Identities cost nothing, addresses of unlike networks cost something: whoever rents a machine has a /48 of IPv6 for
nothing and a few addresses of one /24. What many honest peers share for other reasons (this machine, the local network,
a carrier's customers, one relay) is a kind of its own, so that a budget can allow it more.
"""

from __future__ import annotations

import ipaddress
import random
from collections.abc import Callable, Iterable
from functools import lru_cache
from itertools import zip_longest
from typing import Literal, NamedTuple, TypeVar

from swarmcli.errors import AddressError
from swarmcli.network.addresses import Scope, parse_address, scope_of

T = TypeVar("T")
Kind = Literal["internet", "host", "LAN", "carrier", "relay", "name"]

_CARRIERS = ipaddress.ip_network("100.64.0.0/10")  # between a provider and its customers' routers (RFC 6598)


class Prefix(NamedTuple):
    """One network. `network` is the /24 or /48 in its usual form; of a relay its own network or peer id; of the memory
    transport the host's name."""

    kind: Kind
    network: str

    @property
    def shared(self) -> bool:
        """Whether many honest peers may well be in it for other reasons than one owner."""
        return self.kind in ("host", "LAN", "carrier", "relay")

    def __str__(self) -> str:
        return self.network if self.kind in ("internet", "name") else f"{self.kind} {self.network}"


@lru_cache(maxsize=8192)  # the same few hosts come with each connection and record
def prefix_of(host: str, bits_v4: int = 24, bits_v6: int = 48) -> Prefix:
    """The prefix of an IP address, given as text. A host that is no IP address (a name, also the memory transport's)
    stands for itself. Addresses that hold an IPv4 address (mapped, 6to4, Teredo) count as that one. Never raises."""
    try:
        found: ipaddress.IPv4Address | ipaddress.IPv6Address = ipaddress.ip_address(host)
    except ValueError:
        return Prefix("name", host)
    if isinstance(found, ipaddress.IPv6Address):
        found = found.ipv4_mapped or found.sixtofour or (found.teredo[1] if found.teredo else found)
    # As an integer: the name of an interface, which a link-local address may carry, is no part of a network.
    bits = bits_v4 if found.version == 4 else bits_v6
    network = str(ipaddress.ip_network((int(found).to_bytes(found.max_prefixlen // 8, "big"), bits), strict=False))
    scope = scope_of(str(found))
    if scope is Scope.HOST:
        return Prefix("host", "this machine")
    if found in _CARRIERS:
        return Prefix("carrier", network)
    return Prefix("LAN" if scope is Scope.LAN else "internet", network)


def prefix_of_address(address: str) -> Prefix:
    """The prefix of an address as peers write it; of one over a relay, the relay's. What cannot be read stands for
    itself. Never raises."""
    try:
        read = parse_address(address)
    except AddressError:
        return Prefix("name", address)
    return Prefix("relay", read.relay.text) if read.relay is not None else prefix_of(read.host)


def in_turns(things: Iterable[T], network: Callable[[T], Prefix], dice: random.Random) -> list[T]:
    """Shuffles the things, one of each network before a second of any: identities cost nothing, so a thousand of one
    network come like one."""
    networks: dict[Prefix, list[T]] = {}
    for one in things:
        networks.setdefault(network(one), []).append(one)
    lots = [dice.sample(those, len(those)) for those in dice.sample(list(networks.values()), len(networks))]
    return [one for turn in zip_longest(*lots, fillvalue=None) for one in turn if one is not None]
