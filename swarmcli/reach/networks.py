"""Networks: what addresses have in common that belong to one owner, as far as can be told."""

from __future__ import annotations

import ipaddress

from swarmcli.errors import AddressError
from swarmcli.network.addresses import parse_address


def network_of(address: str, bits_v4: int = 24, bits_v6: int = 48) -> str:
    """The network of an address, to count by: `bits_v4` or `bits_v6` of its IP. What has no IP stands for itself."""
    try:
        host = parse_address(address).host
    except AddressError:
        return address
    try:
        ip = ipaddress.ip_address(host)
    except ValueError:
        return host
    if isinstance(ip, ipaddress.IPv6Address) and ip.ipv4_mapped is not None:
        ip = ip.ipv4_mapped
    return str(ipaddress.ip_network((ip, bits_v4 if ip.version == 4 else bits_v6), strict=False))
