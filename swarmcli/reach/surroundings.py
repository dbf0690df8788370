"""What this machine's interfaces say about where it stands."""

from __future__ import annotations

import ipaddress
import socket
from contextlib import suppress

import psutil

from swarmcli.reach.verdict import Network, Surroundings, host_of


def look_around(addresses: tuple[str, ...]) -> Surroundings:
    """The surroundings of a listener with these addresses. Takes a fraction of a millisecond."""
    hosts = {host for address in addresses if (host := host_of(address))}
    if addresses and addresses[0].startswith("memory://"):
        return Surroundings(addresses, frozenset(hosts))
    networks: list[Network] = []
    for entries in psutil.net_if_addrs().values():
        for entry in entries:
            if entry.family in (socket.AF_INET, socket.AF_INET6):
                host = entry.address.partition("%")[0]  # a link-local address names its interface
                hosts.add(host)
                with suppress(ValueError):  # what a system says about its own interfaces is not always complete
                    networks.append(_network(host, entry.netmask))
    return Surroundings(addresses, frozenset(hosts), tuple(dict.fromkeys(networks)))


def _network(host: str, netmask: str | None) -> Network:
    """The network of an interface. Raises ValueError."""
    address = ipaddress.ip_address(host)
    if netmask is None:
        return ipaddress.ip_network(address)
    if address.version == 4:
        return ipaddress.ip_network(f"{host}/{netmask}", strict=False)
    bits = int(ipaddress.IPv6Address(netmask.partition("/")[0])).bit_count()  # psutil writes ffff:ffff::
    return ipaddress.ip_network((address, bits), strict=False)
