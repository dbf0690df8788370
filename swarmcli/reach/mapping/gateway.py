"""The default gateway of this computer, and what every way of asking it for a port has in common.

Anybody may answer as a home's router, perhaps another guest of the same café. So only the default gateway is asked,
only its answers count, they are bounded, and what it grants is only a claim: others have to dial it. Only ports of IPv4
are asked for, which routers translate; firewalls of IPv6 are asked for nothing.
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

MethodName = Literal["NAT-PMP", "UPnP"]


@dataclass(frozen=True, slots=True)
class MappingTimes:
    """How long a port is asked for and how often, and how long a gateway has for its answers. In seconds.

    The lease is ten times as long as the pause between two requests. Asking again repairs what has changed: a gateway
    that was restarted has forgotten its ports, one whose outer address has changed tells the new one, and after a
    computer's sleep the lease is over. A peer that is killed leaves its port open for the rest of the lease.
    """

    lease: int = 1200
    renew: float = 120.0  # between two requests …
    retry: float = 20.0  # … after one that was not answered …
    search: float = 600.0  # … while no gateway grants anything …
    spacing: float = 5.0  # … and at least, however often `refresh` is called
    failures: int = 3  # requests in a row without a grant, after which the port is taken for lost
    withdraw: float = 1.0  # to give the port back: the peer is about to end, and waits no longer for a router
    nat_pmp_waits: tuple[float, ...] = (0.25, 0.5, 1.0)  # after each the request is sent again (RFC 6886, section 3.1)
    upnp_search: float = 2.0  # for an answer to the search; gateways wait up to MX seconds with it
    upnp_ask: float = 10.0  # for all HTTP requests together that asking for a port takes
    upnp_request: float = 4.0  # for one of them


class GatewayError(NetworkError):
    """The gateway did not answer, or not as the protocol allows. Never raised out of `PortMapping`."""


class GatewayRefused(GatewayError):
    """The gateway answered, and said no; the message has its reason."""


@dataclass(frozen=True, slots=True)
class Gateway:
    """The router that packets for the internet pass first."""

    host: str  # IP literal
    local: str  # the address from which this computer talks to it


@dataclass(frozen=True, slots=True)
class Mapping:
    """A port that the gateway says it has opened. `host` is its claim: only a dial from outside shows whether it is
    true."""

    host: str  # IP literal
    port: int
    method: MethodName
    gateway: str  # IP literal


class Method(Protocol):
    """One protocol at one gateway."""

    name: MethodName

    async def ask(self, port: int, wanted: int) -> Mapping:
        """Asks for a lease of a mapping, or renews it; if possible at the outer port `wanted`.

        Raises GatewayError.
        """
        ...

    async def withdraw(self, port: int) -> None:
        """Gives back what it granted, or may have granted. Raises GatewayError."""
        ...


def outer_host(text: str) -> str:
    """The outer address that a gateway claims, as an IP literal. Raises GatewayError."""
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        raise GatewayError(f"the router's outer address is {text[:60]!r}") from None
    if address.is_unspecified or address.is_multicast or address.is_loopback or address.is_link_local:
        raise GatewayError(f"the router has no outer address; it says {address}")
    return str(address)


def default_gateway() -> Gateway | None:
    """The default gateway at this moment; None: this computer has none, or this system does not say.

    It may wait for a command of the system, up to two seconds: not to be called on the loop.
    """
    try:
        if sys.platform == "linux":
            host = parse_routes(Path("/proc/net/route").read_text("ascii"))
        elif sys.platform == "win32":
            host = _of_windows()
        else:  # macOS and the BSDs
            command = ["/sbin/route", "-n", "get", "default"]
            found = subprocess.run(command, capture_output=True, text=True, timeout=2.0, check=True)
            host = parse_route_command(found.stdout)
        if host is None:
            return None
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((host, 9))  # connecting a UDP socket sends no packet
            return Gateway(host, str(probe.getsockname()[0]))
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        logger.debug("no default gateway: %s", error)
        return None


_UP_AND_GATEWAY = 0x3  # RTF_UP | RTF_GATEWAY


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


def parse_route_command(printed: str) -> str | None:
    """The gateway in what `route -n get default` prints."""
    for line in printed.splitlines():
        name, _, value = line.strip().partition(": ")
        if name == "gateway":
            return str(ipaddress.ip_address(value.strip()))
    return None


def _of_windows() -> str | None:
    class GatewayRow(ctypes.Structure):  # MIB_IPFORWARDROW: fourteen numbers of 32 bits
        _fields_ = [("before", ctypes.c_uint32 * 3), ("next_hop", ctypes.c_uint8 * 4), ("after", ctypes.c_uint32 * 10)]

    row = GatewayRow()
    target = int.from_bytes(socket.inet_aton("192.0.2.1"), sys.byteorder)  # reserved for documentation
    failed = ctypes.windll.iphlpapi.GetBestRoute(target, 0, ctypes.byref(row))  # type: ignore[attr-defined,unused-ignore]
    hop = ipaddress.IPv4Address(bytes(row.next_hop))
    return None if failed or hop.is_unspecified else str(hop)
