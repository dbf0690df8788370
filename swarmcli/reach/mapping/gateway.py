"""The default gateway of this computer, and what every way of asking it for a port has in common.

A router of a home is whoever answers, perhaps another guest of the same café. So only the default gateway is asked,
only its answers count, they are bounded, and what it grants is no more than a claim: others have to dial it.
"""

from __future__ import annotations

import ctypes
import ipaddress
import logging
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from swarmcli.errors import NetworkError

logger = logging.getLogger(__name__)

Family = Literal["ipv4", "ipv6"]
MethodName = Literal["PCP", "NAT-PMP", "UPnP"]

# Asked for often and for a short time: a peer that is killed leaves its port open for no longer than this, and a router
# that was restarted is asked again soon after.
LEASE = 1200  # seconds
ROUTE_TIMEOUT = 2.0  # seconds, for the system's own command that prints the route
_ELSEWHERE = {"ipv4": "192.0.2.1", "ipv6": "2001:db8::1"}  # reserved for documentation; nothing is sent there


class GatewayError(NetworkError):
    """The gateway did not answer, or not with what the protocol allows. It never leaves `PortMapping`."""


class GatewayRefused(GatewayError):
    """The gateway answered, and said no; the message has its reason."""


@dataclass(frozen=True, slots=True)
class Gateway:
    """The router that packets for the internet pass first."""

    host: str  # IP literal; of a link-local IPv6 address with its zone
    local: str  # the address from which this computer talks to it


@dataclass(frozen=True, slots=True)
class Mapping:
    """A port that the gateway says it has opened. `host` is its claim: only a dial from outside shows what is true."""

    host: str  # IP literal
    port: int
    method: MethodName
    gateway: str  # IP literal


class Method(Protocol):
    """One protocol at one gateway."""

    name: MethodName

    async def ask(self, port: int, wanted: int) -> Mapping:
        """Asks for LEASE seconds, again and again for the same mapping; at best at the outer port `wanted`.

        Raises GatewayError.
        """
        ...

    async def withdraw(self, port: int) -> None:
        """Gives back what it granted, or may have granted. Raises GatewayError."""
        ...


def outer_host(text: str) -> str:
    """What a gateway claims to be its outer address, as an IP literal. Raises GatewayError."""
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        raise GatewayError(f"the router's outer address is {text[:60]!r}") from None
    if address.is_unspecified or address.is_multicast or address.is_loopback or address.is_link_local:
        raise GatewayError(f"the router has no outer address; it says {address}")
    return str(address)


def default_gateway(family: Family) -> Gateway | None:
    """Who it is at this moment; None: this computer has none, or this system does not say.

    It may wait for a command of the system, up to ROUTE_TIMEOUT: not to be called on the loop.
    """
    try:
        if sys.platform == "linux":
            host = _of_linux(family)
        elif sys.platform == "win32":
            host = _of_windows() if family == "ipv4" else None
        else:
            host = _of_bsd(family)
        return None if host is None else Gateway(host, _local_host(family, host))
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        logger.debug("no default gateway for %s: %s", family, error)
        return None


def _local_host(family: Family, gateway: str) -> str:
    """Connecting a UDP socket sends no packet. With IPv6 the gateway has a link-local address, and we ask it for a port
    at the address that others see."""
    kind = socket.AF_INET if family == "ipv4" else socket.AF_INET6
    with socket.socket(kind, socket.SOCK_DGRAM) as probe:
        probe.connect((gateway if family == "ipv4" else _ELSEWHERE[family], 9))
        return str(probe.getsockname()[0])


_PROC = Path("/proc/net")
_UP_AND_GATEWAY = 0x3  # RTF_UP | RTF_GATEWAY


def _of_linux(family: Family) -> str | None:
    if family == "ipv4":
        return parse_routes((_PROC / "route").read_text("ascii"))
    return parse_ipv6_routes((_PROC / "ipv6_route").read_text("ascii"))


def parse_routes(table: str) -> str | None:
    """The gateway of the default route with the lowest metric in what Linux shows as /proc/net/route."""
    rows = [line.split() for line in table.splitlines()[1:]]
    found = [
        (int(row[6]), row[2])
        for row in rows
        if len(row) >= 8 and row[1] == row[7] == "00000000" and int(row[3], 16) & _UP_AND_GATEWAY == _UP_AND_GATEWAY
    ]
    if not found:
        return None
    # The kernel prints the address as a number in the order of bytes of this machine.
    number = int(min(found)[1], 16).to_bytes(4, sys.byteorder)
    return str(ipaddress.IPv4Address(number))


def parse_ipv6_routes(table: str) -> str | None:
    """The same for /proc/net/ipv6_route."""
    rows = [line.split() for line in table.splitlines()]
    found = [
        (int(row[5], 16), row[4], row[9])
        for row in rows
        if len(row) >= 10
        and row[0] == "0" * 32
        and row[1] == "00"
        and int(row[8], 16) & _UP_AND_GATEWAY == _UP_AND_GATEWAY
    ]
    if not found:
        return None
    _, number, device = min(found)
    address = ipaddress.IPv6Address(int(number, 16))
    return f"{address}%{device}" if address.is_link_local else str(address)


def _of_bsd(family: Family) -> str | None:
    """macOS and the BSDs."""
    command = ["/sbin/route", "-n", "get", *(["-inet6"] if family == "ipv6" else []), "default"]
    printed = subprocess.run(command, capture_output=True, text=True, timeout=ROUTE_TIMEOUT, check=True).stdout
    return parse_route_command(printed)


def parse_route_command(printed: str) -> str | None:
    """The gateway in what `route -n get default` prints."""
    for line in printed.splitlines():
        name, _, value = line.strip().partition(": ")
        if name == "gateway":
            return str(ipaddress.ip_address(value.strip()))
    return None


def _of_windows() -> str | None:
    class Row(ctypes.Structure):  # MIB_IPFORWARDROW: fourteen numbers of 32 bits
        _fields_ = [("before", ctypes.c_uint32 * 3), ("next_hop", ctypes.c_uint8 * 4), ("after", ctypes.c_uint32 * 10)]

    row = Row()
    target = int.from_bytes(socket.inet_aton(_ELSEWHERE["ipv4"]), sys.byteorder)
    failed = ctypes.windll.iphlpapi.GetBestRoute(target, 0, ctypes.byref(row))  # type: ignore[attr-defined,unused-ignore]
    hop = ipaddress.IPv4Address(bytes(row.next_hop))
    return None if failed or hop.is_unspecified else str(hop)
