"""Under which addresses a listener on "any" interface can be reached."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Iterable

import psutil

from swarmcli.network.addresses import Address

MAX_ANNOUNCED = 4  # addresses; each that does not answer costs a dialer a moment
# Bridges of container engines and hypervisors have the same addresses on every machine: a peer that dials one reaches
# its own.
_LOCAL_ONLY = ("docker", "br-", "veth", "virbr", "vmnet", "vboxnet", "cni", "flannel", "cali", "podman", "lo")


def announced_addresses(host: str, port: int) -> tuple[str, ...]:
    """Addresses to announce for a listener on `host:port`, the likeliest first.

    For a certain host just that. For 0.0.0.0 the IPv4 addresses of this machine's interfaces, the one that leads to the
    internet first; for :: and no host those of IPv6 too. Loopback only if there is no other: peers on one machine still
    find each other then.
    """
    if host not in ("", "0.0.0.0", "::"):
        return (str(Address("tcp", host, port)),)
    with_ipv6 = host != "0.0.0.0"
    found = rank_hosts(_interface_hosts(), _outgoing_host(), with_ipv6=with_ipv6)
    return tuple(str(Address("tcp", each, port)) for each in found)


def rank_hosts(hosts: Iterable[str], outgoing: str | None, *, with_ipv6: bool) -> list[str]:
    """At most MAX_ANNOUNCED of the hosts that others can dial: `outgoing` first, loopback in absence of others."""
    usable = [host for host in dict.fromkeys(hosts) if _is_dialable(host, with_ipv6)]
    usable.sort(key=lambda host: (host != outgoing, ":" in host))
    return usable[:MAX_ANNOUNCED] or ["127.0.0.1"]


def _is_dialable(host: str, with_ipv6: bool) -> bool:
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    if address.version == 6 and not with_ipv6:
        return False
    return not (address.is_loopback or address.is_link_local or address.is_unspecified or address.is_multicast)


def _interface_hosts() -> list[str]:
    states = psutil.net_if_stats()
    return [
        entry.address
        for name, entries in psutil.net_if_addrs().items()
        if not name.startswith(_LOCAL_ONLY) and name in states and states[name].isup
        for entry in entries
        if entry.family in (socket.AF_INET, socket.AF_INET6)
    ]


def _outgoing_host() -> str | None:
    """The address from which this machine would reach the internet. Connecting a UDP socket sends no packet."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # an address reserved for documentation
        except OSError:
            return None
        return str(probe.getsockname()[0])
