"""Keeps downloads that a link has named to hosts of the public internet.

The owner of a name can have it lead to the volunteer's own computer, or to its router. So each connection is checked
when it is made, by its address: a name that leads elsewhere a moment later, and a redirect, are checked as well.
"""

from __future__ import annotations

import errno
import ipaddress
import logging
import socket
from contextlib import suppress
from functools import partial
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies

import aiohttp
import fsspec.config

from swarmcli.network.addresses import Scope, scope_of

logger = logging.getLogger(__name__)

TRANSLATED = ipaddress.ip_network("64:ff9b::/96")  # addresses of IPv4, in their last 32 bits (RFC 6052)
Place = tuple[str, int]  # an address and a port


def only_public_hosts() -> None:
    """From now on, whatever this process downloads through fsspec, as the library `datasets` does, comes from hosts of
    the public internet, or through the proxy that the user has set."""

    async def client(**options: Any) -> aiohttp.ClientSession:
        guard = partial(_socket_to, allowed=_proxies())
        return aiohttp.ClientSession(connector=aiohttp.TCPConnector(socket_factory=guard), **options)

    for scheme in ("http", "https"):
        fsspec.config.conf.setdefault(scheme, {})["get_client"] = client


def _socket_to(where: tuple[Any, ...], allowed: set[Place]) -> socket.socket:
    """Makes a socket for a connection to an address as getaddrinfo gives it. Raises OSError if that is in no public
    network and not `allowed`."""
    family, kind, protocol, _, (host, port, *_) = where
    address = host.partition("%")[0]  # without the interface of a link-local one
    if not _is_public(address) and (host, port) not in allowed:
        text = f"{address} is no address of the internet: a recipe that came by a link may not lead there"
        logger.warning("%s", text)  # the library says only that it found no file
        raise OSError(errno.EACCES, text)
    return socket.socket(family, kind, protocol)


def _is_public(address: str) -> bool:
    found = ipaddress.ip_address(address)
    if found in TRANSLATED:  # in a network that has IPv6 alone
        address = str(ipaddress.IPv4Address(int(found) & 0xFFFFFFFF))
    return scope_of(address) is Scope.INTERNET


def _proxies() -> set[Place]:
    """Where the user's own proxies listen; these may well be in the user's own network."""
    found: set[Place] = set()
    for scheme, url in getproxies().items():
        if scheme in ("http", "https"):
            parts = urlsplit(url if "://" in url else f"http://{url}")
            with suppress(OSError, ValueError):
                port = parts.port or (443 if parts.scheme == "https" else 80)
                found |= {(str(info[4][0]), port) for info in socket.getaddrinfo(parts.hostname, port)}
    return found
