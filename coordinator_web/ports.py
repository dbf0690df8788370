"""The ports of a dashboard: who can reach them, what they are called, and taking one."""

from __future__ import annotations

import errno
import ipaddress
import socket
from collections.abc import Sequence

from swarmcli.errors import ListenError


def is_exposed(host: str, names: Sequence[str]) -> bool:
    """Whether others than this machine's users may reach a dashboard that listens at this host: then it wants a token.
    One that goes by a name counts, since names are given to what a proxy passes on."""
    if names:
        return True
    try:
        return not ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() != "localhost"


def url_of(host: str, port: int) -> str:
    """Where a browser on this machine finds what listens there."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}.get(host, host)
    return f"http://[{host}]:{port}/" if ":" in host else f"http://{host}:{port}/"


def listen(host: str, port: int) -> socket.socket:
    """Takes the port (0: any free one). Raises ListenError that names host, port and the fix."""
    if not 0 <= port <= 65535:
        raise ListenError(f"the dashboard cannot listen on {host}:{port}: a port is a number from 0 to 65535")
    try:
        (family, _, _, _, address), *_ = socket.getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        return socket.create_server(address[:2], family=family)
    except OSError as error:
        raise ListenError(f"the dashboard cannot listen on {host}:{port}: {_why(error)}") from error


def _why(error: OSError) -> str:
    match error.errno:
        case errno.EADDRINUSE:
            return "another program has this port; choose another one, or 0 for any that is free"
        case errno.EACCES:
            return "this port is reserved for the system; choose one above 1023, or 0 for any that is free"
        case errno.EADDRNOTAVAIL | socket.EAI_NONAME:
            return "this machine has no such address; use 127.0.0.1, or 0.0.0.0 for all of its addresses"
        case _:
            return str(error)
