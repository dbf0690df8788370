"""A local TCP port from which several connections are dialed, so that a router gives all of them one outer port.

So two peers behind routers meet: each learns from a listener how its port is seen from outside, and then both dial each
other from these ports at the same moment. To each router the other end's SYN looks like an answer to its own, and the
two systems make one connection of both SYNs (simultaneous open; RFC 9293, section 3.5, figure 7).
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import TypeAlias

from swarmcli.errors import ConnectError, ConnectionLost, HandshakeError
from swarmcli.network.addresses import Address, Family, parse_address
from swarmcli.network.identity import PeerID
from swarmcli.network.transports.base import Connection, Purpose

# The transport's handshake on a connected socket; the last argument says whether this end leads it.
Greet: TypeAlias = Callable[[socket.socket, PeerID | None, Purpose, bool], Awaitable[Connection]]

_FAMILIES = {"IPv4": socket.AF_INET, "IPv6": socket.AF_INET6}


class TCPLocalPort:
    """Implements `base.LocalPort`."""

    def __init__(self, family: Family, greet: Greet) -> None:
        """Takes any free port. Raises OSError, also where this machine does not have the family."""
        self._family = _FAMILIES[family]
        self._greet = greet
        self._closed = False
        self._probes: list[Connection] = []  # held: a router may forget a port when its only connection ends
        self._holder = self._bound(0)  # so that the system gives the port to nobody else
        self._port: int = self._holder.getsockname()[1]

    async def probe(self, address: str, timeout: float) -> str | None:
        place = parse_address(address)
        async with _as_connect_errors(address, timeout):
            connection = await self._greet(await self._connected(place), place.peer_id, Purpose.PROBE, True)
        self._probes.append(connection)
        if self._closed:
            self.close()
        return connection.observed_address

    def guess(self, host: str) -> str:
        return str(Address("tcp", host, self._port))

    async def meet(
        self, address: str, peer: PeerID, purpose: Purpose, *, leads: bool, crossing: float, timeout: float
    ) -> Connection:
        place = parse_address(address)
        async with _as_connect_errors(address, timeout):
            async with asyncio.timeout(crossing):
                connected = await self._connected(place)
            return await self._greet(connected, peer, purpose, leads)

    def close(self) -> None:
        self._closed = True
        self._holder.close()
        for connection in self._probes:
            connection.abort("it has shown where this peer is seen")
        self._probes.clear()

    def _bound(self, port: int) -> socket.socket:
        bound = socket.socket(self._family, socket.SOCK_STREAM)
        try:
            bound.setblocking(False)
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if hasattr(socket, "SO_REUSEPORT"):  # on Windows the former alone means both
                bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            if self._family == socket.AF_INET6:
                bound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            bound.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            bound.bind(("", port))
        except OSError:
            bound.close()
            raise
        return bound

    async def _connected(self, place: Address) -> socket.socket:
        bound = self._bound(self._port)
        try:
            await asyncio.get_running_loop().sock_connect(bound, (place.host, place.port))
        except BaseException:  # a cancellation too: nobody else knows this socket
            bound.close()
            raise
        return bound


@asynccontextmanager
async def _as_connect_errors(address: str, timeout: float) -> AsyncIterator[None]:
    try:
        async with asyncio.timeout(timeout):
            yield
    except (HandshakeError, ConnectionLost) as error:
        raise HandshakeError(f"{address}: {error}", address=address) from error
    except OSError as error:  # a timeout is one as well
        why = "no answer in time" if isinstance(error, TimeoutError) else error.strerror or str(error)
        raise ConnectError(f"{address}: {why}", address=address) from error
