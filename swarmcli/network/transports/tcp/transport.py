"""The TCP transport: TLS 1.3 connections between peers that prove their keys to each other."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import socket
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import cast

from swarmcli.errors import (
    AddressError,
    ConnectError,
    ConnectionLost,
    ConnectStep,
    HandshakeError,
    ListenError,
    WrongPeerError,
)
from swarmcli.network.addresses import Address, Family, Scheme, parse_address
from swarmcli.network.bounds import DIAL_STAGGER, NetworkLimits
from swarmcli.network.budgets import allow_descriptors
from swarmcli.network.identity import Identity, PeerID
from swarmcli.network.ledger import HandshakeRates, Ledger
from swarmcli.network.loop_thread import loop_time, set_within
from swarmcli.network.membership import Membership
from swarmcli.network.prefix import prefix_of
from swarmcli.network.task_owner import tell_fault
from swarmcli.network.transports.base import Accept, Connection, Join, Purpose
from swarmcli.network.transports.tcp import handshake
from swarmcli.network.transports.tcp.connection import Shared, TCPConnection
from swarmcli.network.transports.tcp.interfaces import announced_addresses
from swarmcli.network.transports.tcp.local_port import TCPLocalPort

logger = logging.getLogger(__name__)

_BACKLOG = 1024  # connections that the system holds until this process accepts them
_ACCEPT_RETRY = 0.1  # seconds, after a failure such as missing file descriptors or memory
_TOO_MANY = "too many handshakes at once here; try again later"
_OUT_OF_RESOURCES = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class TCPTransport:
    """Implements `base.Transport`. `refusals` counts connections that ended by a broken rule, by the
    class of the error."""

    scheme: Scheme = "tcp"

    def __init__(
        self,
        identity: Identity,
        *,
        host: str = "",
        port: int = 0,
        preferred_port: int = 0,
        limits: NetworkLimits = NetworkLimits(),
    ) -> None:
        """`host` and `port` are where to listen (port 0: at `preferred_port` if that is free, or else at any free one).
        Raises ValueError."""
        for name, number in (("port", port), ("preferred_port", preferred_port)):
            if not 0 <= number < 65536:
                raise ValueError(f"{name} must be from 0 to 65535, got {number}")
        self.identity = identity
        self._host, self._port, self._preferred_port = host, port, preferred_port
        self.limits = limits = _affordable(limits)
        self.membership: Membership | None = None
        self._shared = Shared(identity, limits)
        self.rates, self.refusals = self._shared.rates, self._shared.refusals
        self.rates.on_change.append(self._shared.follow_rates)
        self._pending: dict[TCPConnection, float] = {}  # incoming, handshake under way → when it came; oldest first
        self._handshakes = Ledger(limits.budgets.handshakes)  # of these
        self._rates = HandshakeRates(limits.budgets)
        self._room = asyncio.Event()
        self._accepting: asyncio.Task[None] | None = None
        self._closed = False

    @property
    def port(self) -> int:
        """Where this peer listens; 0 before `listen` if any free port was asked for."""
        return self._port

    # ---- listening

    async def listen(self, accept: Accept) -> tuple[str, ...]:
        listener = await self._open_listener()
        self._port = listener.getsockname()[1]
        self._accepting = asyncio.create_task(self._accept_forever(listener, accept), name="tcp accept")
        self._accepting.add_done_callback(partial(_end_listening, listener))
        return self.own_addresses()

    def own_addresses(self) -> tuple[str, ...]:
        return announced_addresses(self._host, self._port)

    async def _open_listener(self) -> socket.socket:
        host = self._host or ("::" if socket.has_dualstack_ipv6() else "0.0.0.0")
        if self._preferred_port and not self._port:
            with suppress(OSError):
                return _prepared(await self._bind(host, self._preferred_port))
        try:
            return _prepared(await self._bind(host, self._port))
        except OSError as error:
            advice = _listen_advice(error, self._host)
            raise ListenError(f"cannot listen on {self._host or '*'}:{self._port}: {advice}") from error

    async def _bind(self, host: str, port: int) -> socket.socket:
        found = await asyncio.get_running_loop().getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        family, _, _, _, place = found[0]
        dualstack = host == "::" and socket.has_dualstack_ipv6()
        try:
            return socket.create_server(place[:2], family=family, backlog=_BACKLOG, dualstack_ipv6=dualstack)
        except OSError as error:
            # A system that knows IPv6 may have it switched off.
            if self._host or host == "0.0.0.0" or error.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
                raise
        return await self._bind("0.0.0.0", port)

    async def _accept_forever(self, listener: socket.socket, accept: Accept) -> None:
        loop = asyncio.get_running_loop()

        def taken_in() -> TCPConnection:
            connection = self._shared.listening(self.membership)
            connection.on_made = partial(self._admit, accept)
            return connection

        while True:
            incoming: socket.socket | None = None
            try:
                await self._wait_for_room()
                incoming = await _accept_one(listener)
                if not self._admits(incoming):
                    incoming.close()
                    continue
                await loop.connect_accepted_socket(taken_in, incoming)
            except OSError as error:
                logger.warning("a connection could not be accepted: %s", error)
                if error.errno in _OUT_OF_RESOURCES:
                    await asyncio.sleep(_ACCEPT_RETRY)
            except Exception as error:  # of one connection: the next ones are accepted
                tell_fault("accepting connections", error)
                if incoming is not None:
                    incoming.close()
                await asyncio.sleep(_ACCEPT_RETRY)

    def _admits(self, incoming: socket.socket) -> bool:
        """Whether the network that this comes from may begin one more handshake. If it has too many under way, the
        oldest of them is dropped, unless it is younger than `handshake_grace`."""
        prefix, now = prefix_of(_host_of(incoming)), loop_time()
        if not self._rates.take(prefix, now):
            self._shared.refusals["too many handshakes per second"] += 1
            return False
        if self._handshakes.crowded(prefix) is None:
            return True
        oldest = next((each for each in self._pending if each.prefix == prefix), None)
        if oldest is None or self._pending[oldest] + self.limits.handshake_grace > now:
            self._shared.refusals["too many handshakes"] += 1
            return False
        oldest.refuse("too many handshakes", _TOO_MANY)
        return True

    async def _wait_for_room(self) -> None:
        """Returns once another handshake may begin. To that end drops the oldest one of the network that has the most
        under way, when it is older than `handshake_grace`."""
        while len(self._pending) >= self._handshakes.budget.everyone:
            self._room.clear()
            fullest = self._handshakes.fullest()
            oldest, since = next(each for each in self._pending.items() if each[0].prefix == fullest)
            patience = since + self.limits.handshake_grace - loop_time()
            if patience <= 0:
                oldest.refuse("too many handshakes", _TOO_MANY)
            await set_within(self._room, patience if patience > 0 else None)

    def _admit(self, accept: Accept, connection: TCPConnection) -> None:
        loop = asyncio.get_running_loop()
        self._pending[connection] = loop.time()
        prefix = connection.prefix
        self._handshakes.charge_anyway(connection, prefix, 1)
        deadline = loop.call_later(
            self.limits.handshake_timeout, connection.refuse, "handshake timeout", "the handshake took too long"
        )

        def handshake_ended(ready: asyncio.Future[None]) -> None:
            deadline.cancel()
            del self._pending[connection]
            self._handshakes.give_back(connection, prefix, 1)
            self._room.set()
            if ready.cancelled() or ready.exception() is not None:
                return
            try:
                accept(connection)
            except Exception:
                logger.exception("a connection from %s could not be taken over", connection.remote_address)
                connection.abort("internal error")

        connection.ready.add_done_callback(handshake_ended)

    # ---- dialing

    async def dial(self, address: str, expected: PeerID | None, purpose: Purpose, timeout: float) -> Connection:
        place = parse_address(address)
        if place.scheme != "tcp":
            raise AddressError(f"{address!r} is no address of this transport: expected tcp://host:port")
        if expected is not None and place.peer_id not in (None, expected):
            raise WrongPeerError(f"{address} is not an address of peer {expected.short}…", address=address)
        steps: list[ConnectStep] = ["name resolution"]  # how far it has come
        try:
            async with asyncio.timeout(timeout):
                return await self._dial(place, expected or place.peer_id, purpose, steps)
        except (HandshakeError, ConnectionLost) as error:
            raise handshake.at(address, error) from error
        except OSError as error:
            message = f"{address}: {steps[-1]} failed: {_why(error, steps[-1], timeout)}"
            if steps[-1] == "handshake":
                raise HandshakeError(message, address=address) from error
            raise ConnectError(message, step=steps[-1], address=address) from error

    async def _dial(
        self, place: Address, expected: PeerID | None, purpose: Purpose, steps: list[ConnectStep]
    ) -> TCPConnection:
        loop = asyncio.get_running_loop()
        if prefix_of(place.host).kind == "name":  # resolved by itself, so that a failure of this step can be named
            await loop.getaddrinfo(place.host, place.port, type=socket.SOCK_STREAM)
        steps.append("connect")
        connection = self._shared.leading(expected, purpose, self.membership)
        await loop.create_connection(lambda: connection, place.host, place.port, happy_eyeballs_delay=DIAL_STAGGER)
        steps.append("handshake")
        return await self._ready(connection)

    async def _ready(self, connection: TCPConnection) -> TCPConnection:
        """Waits for the connection's handshake."""
        if self._closed:
            connection.abort("shutting down")
        await connection.made()
        return connection

    # ---- without TLS

    def on_join(self, join: Join | None) -> None:
        self._shared.join = join

    async def dial_plain(self, address: str, protocol: asyncio.BufferedProtocol, timeout: float) -> None:
        place, loop = parse_address(address), asyncio.get_running_loop()
        try:
            async with asyncio.timeout(timeout):
                transport, _ = await loop.create_connection(lambda: protocol, place.host, place.port)
        except OSError as error:
            why = _why(error, "connect", timeout)
            raise ConnectError(f"{address}: connect failed: {why}", address=address) from error
        self._shared.plain.add(transport)
        if self._closed:
            transport.abort()

    # ---- from one port

    def local_port(self, family: Family) -> TCPLocalPort:
        """See `base.DirectTransport`."""
        return TCPLocalPort(family, self._greet_on)

    async def _greet_on(
        self, connected: socket.socket, peer: PeerID | None, purpose: Purpose, leads: bool
    ) -> TCPConnection:
        """The handshake on a socket that is connected, with this peer and for this purpose alone."""
        punched = purpose is not Purpose.PROBE
        if leads:
            connection = self._shared.leading(peer, purpose, self.membership, punched=punched)
        else:
            connection = self._shared.listening(self.membership, punched=punched)
        await asyncio.get_running_loop().create_connection(lambda: connection, sock=connected)
        await self._ready(connection)
        if (connection.peer_id, connection.purpose) != (peer or connection.peer_id, purpose):
            connection.abort("another connection was expected here")
            raise HandshakeError(f"{connection.peer_id.short}… came instead of {peer}, or for another purpose")
        return connection

    async def close(self) -> None:
        self._closed = True
        if self._accepting is not None:
            self._accepting.cancel()
            await asyncio.wait([self._accepting])
        for plain in tuple(self._shared.plain):
            cast(asyncio.Transport, plain).abort()
        while self._shared.live:
            async with asyncio.TaskGroup() as group:
                for connection in tuple(self._shared.live):
                    group.create_task(connection.close("shutting down"))

    def __repr__(self) -> str:
        return f"<TCPTransport {self.identity.peer_id.short} {self._host}:{self._port}>"


def _affordable(limits: NetworkLimits) -> NetworkLimits:
    """Lowers the limits to what the descriptors allow that the system gives this process: most systems give 1024 unless
    they are asked for more, and strangers in two networks would take all of them."""
    allowed = allow_descriptors(limits.budgets.descriptors)
    budgets = limits.budgets.within(allowed)
    if budgets is limits.budgets:
        return limits
    logger.info("this peer takes fewer connections: the system allows %d open files", allowed)
    return replace(limits, budgets=budgets)


def _host_of(connected: socket.socket) -> str:
    try:
        host: str = connected.getpeername()[0]
    except OSError:  # it is gone already
        return ""
    return host


def _why(error: OSError, step: ConnectStep, timeout: float) -> str:
    if isinstance(error, TimeoutError):
        more = "; another program may be listening there" if step == "handshake" else ""
        return f"no answer within {timeout:g} s{more}"
    if isinstance(error, ConnectionRefusedError):
        return "nothing listens there (connection refused)"
    if error.errno and str(error.strerror).startswith("Connect call failed"):  # asyncio's words, with the address again
        return os.strerror(error.errno)
    return error.strerror or str(error)


def _end_listening(listener: socket.socket, accepting: asyncio.Task[None]) -> None:
    # Here and not in the task: one that is cancelled before its first step never gets to close anything.
    listener.close()
    if not accepting.cancelled() and (error := accepting.exception()) is not None:
        logger.critical("this peer no longer accepts connections", exc_info=error)


def _prepared(listener: socket.socket) -> socket.socket:
    listener.setblocking(False)
    # Accepted sockets inherit it. asyncio sets it only for sockets that know their protocol, which these do not;
    # without it small answers wait 40 ms.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener


def _listen_advice(error: OSError, host: str) -> str:
    if isinstance(error, socket.gaierror):
        return f"the host name cannot be resolved ({error.strerror}); use 0.0.0.0 for all interfaces"
    match error.errno:
        case errno.EADDRINUSE:
            return "another program uses this port; choose another port, or 0 for any free one"
        case errno.EACCES:
            return "ports below 1024 are for the superuser; choose a higher one"
        case errno.EADDRNOTAVAIL:
            return f"this machine has no address {host}; use 0.0.0.0 for all interfaces"
    return error.strerror or str(error)


async def _accept_one(listener: socket.socket) -> socket.socket:
    """The next connection. Not by loop.sock_accept, except on Windows, whose loop cannot watch a socket: when Python
    3.11's is cancelled while a connection waits, it loses the connection and reports an invalid state."""
    loop, number = asyncio.get_running_loop(), listener.fileno()
    while True:
        try:
            incoming, _ = listener.accept()
            incoming.setblocking(False)
            return incoming
        except (BlockingIOError, InterruptedError):
            readable = asyncio.Event()
            try:
                loop.add_reader(number, readable.set)
            except NotImplementedError:
                return (await loop.sock_accept(listener))[0]
            try:
                await readable.wait()
            finally:
                loop.remove_reader(number)
