"""Connections through a relay: the ordinary TLS and frames of two peers, over bytes that a relay passes on.

To the two ends a circuit is a connection like any other, with the same handshake: the other end proves its identity in
TLS, and what the relay says about it does not count. If a relay swaps peers, changes bytes or leaves some out, the
connection ends.

    dialer                              relay                              client
      relay.join(client) ───────────▶          relay.come(token) ──────────▶      calls, on control connections
             ◀─────────────── token                     ◀───────── it comes
      JOIN token ───────────────────▶                   ◀────────── JOIN token    each on a new socket, in the clear
             ◀────────────── JOINED             JOINED ────────────▶
      TLS ══════════════════════════════ bytes ═════════════════════════════ TLS

A token is good for one socket, for some seconds. The relay gives it to a peer that has proved its identity on its
control connection.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from typing import cast

from swarmcli.backoff import Backoff
from swarmcli.errors import (
    AddressError,
    CallRefused,
    ConnectError,
    ConnectionLost,
    HandshakeError,
    NetworkError,
    OwnAddressError,
    UnknownMethod,
    WrongPeerError,
)
from swarmcli.network.addresses import Address, Scheme, is_direct, parse_address
from swarmcli.network.bounds import DIAL_TIMEOUT
from swarmcli.network.endpoint import Endpoint
from swarmcli.network.identity import PeerID
from swarmcli.network.loop_thread import loop_time
from swarmcli.network.task_owner import TaskOwner
from swarmcli.network.token_bucket import Meter
from swarmcli.network.transports.base import Accept, Connection, Purpose
from swarmcli.network.transports.tcp import handshake
from swarmcli.network.transports.tcp.connection import Shared, TCPConnection
from swarmcli.network.transports.tcp.handshake import GreetingKind, Message, bytes_missing, expect, take_message
from swarmcli.reach.relay_messages import COME, JOIN, Come, Coming, Joining, JoinRequest

logger = logging.getLogger(__name__)

Lookup = Callable[[PeerID], Awaitable[Sequence[str]]]

# How much one relay may bring. There is no common bound for all relays: one that holds handshakes open would use it up
# for the others, and this peer itself chooses how many relays it has.
_HANDSHAKES = 32  # of strangers at the same time; further ones are refused …
# … and per second, in the long run and at once: each takes some milliseconds of the processor. More than an honest
# relay lets through to one client (`RelayBudgets.connects_per_second`).
_RATE = 16.0, 128.0
_LOOKUP_PAUSE = 30.0  # seconds until a relay that was not found is looked up again: any peer may name any relay


class _Joiner(asyncio.BufferedProtocol):
    """Sends its token on a fresh socket and waits for one message. Reads no byte after it: that is the other end's."""

    def __init__(self, token: bytes) -> None:
        self._words = Message(GreetingKind.JOIN, token).encode()
        self.answer: asyncio.Future[Message] = asyncio.get_running_loop().create_future()
        self.socket: asyncio.Transport
        self._received = bytearray()
        self._memory = bytearray(handshake.MAX_BODY)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.socket = cast(asyncio.Transport, transport)
        self.socket.write(self._words)

    def get_buffer(self, sizehint: int) -> memoryview:
        return memoryview(self._memory)[: bytes_missing(self._received)]

    def buffer_updated(self, nbytes: int) -> None:
        self._received += self._memory[:nbytes]
        try:
            message = take_message(self._received)
        except HandshakeError as error:
            self._fail(error)
            return
        if message is not None:
            self.socket.pause_reading()
            if not self.answer.done():
                self.answer.set_result(message)

    def connection_lost(self, exc: Exception | None) -> None:
        self._fail(ConnectionLost("the relay closed the connection"))

    def _fail(self, error: NetworkError) -> None:
        if not self.answer.done():
            self.answer.set_exception(error)
            self.answer.exception()  # the waiter may be gone
        self.socket.abort()


class RelayTransport:
    """Implements `base.Transport` for addresses `relay://<relay>/<peer>`, by streams of an endpoint."""

    scheme: Scheme = "relay"

    def __init__(self, endpoint: Endpoint, lookup: Lookup | None = None) -> None:
        """`lookup(relay)` finds addresses of a relay that this endpoint knows none of."""
        self.identity = endpoint.identity
        self.limits = endpoint.limits
        self.relays: set[PeerID] = set()  # that hold a reservation of this peer: only these may bring connections
        self._endpoint = endpoint
        self._lookup = lookup
        self.membership = endpoint.membership
        self._shared = Shared(endpoint.identity, endpoint.limits, endpoint.rates)
        self.refusals = self._shared.refusals  # connections that ended by a broken rule, by the class of the error
        endpoint.rates.on_change.append(self._shared.follow_rates)
        self._tasks = TaskOwner()
        self._needed: Counter[PeerID] = Counter()  # relays that are being asked
        self._unknown = Backoff[PeerID](_LOOKUP_PAUSE, _LOOKUP_PAUSE)  # relays that were not found
        self._handshakes: Counter[PeerID] = Counter()  # of incoming connections, by the relay that brings them
        self._rates = Meter(relay=_RATE)  # of these

    async def listen(self, accept: Accept) -> tuple[str, ...]:
        """From now on accepts the connections that relays bring. `relays.py` announces the addresses."""

        async def come(relay: PeerID, request: Come) -> Coming:
            return self._come(relay, request, accept)

        self._endpoint.serve(COME, Come, come)
        return self.own_addresses()

    def own_addresses(self) -> tuple[str, ...]:
        return ()

    # ---- dialing

    async def dial(self, address: str, expected: PeerID | None, purpose: Purpose, timeout: float) -> Connection:
        relay, target = self._ends(parse_address(address), expected, address)
        try:
            async with asyncio.timeout(timeout):
                await self._find(relay, address)
                return await self._dial(relay, target, purpose, address)
        except TimeoutError:
            raise ConnectError(f"{address} did not answer within {timeout:g} s", address=address) from None

    def _ends(self, place: Address, expected: PeerID | None, address: str) -> tuple[PeerID, PeerID]:
        relay, target, own = place.relay, place.peer_id, self.identity.peer_id
        if relay is None or target is None:
            raise AddressError(f"{address!r} is no address of this transport: expected relay://relayid/peerid")
        if expected not in (None, target):
            raise WrongPeerError(f"{address} is not an address of peer {expected.short}…", address=address)
        if target == own:
            raise OwnAddressError(f"{address} is this peer itself", address=address)
        if relay in (own, target):
            raise ConnectError(f"{address}: a circuit needs a third peer as its relay", address=address)
        if target in self._needed:
            # Two relays that name each other as their relay would make this peer dial in circles, ever more at a time.
            raise ConnectError(f"{address}: a relay is not reached through another one", address=address)
        return relay, target

    async def _find(self, relay: PeerID, address: str) -> None:
        """Makes sure that the relay is connected, or that an address of it is known. Raises ConnectError."""
        seen = self._endpoint.seen(relay)
        if seen is not None and not seen.relayed:
            return
        now = loop_time()
        if not self._is_known(relay) and self._lookup is not None and not self._unknown.rests(relay, now):
            self._endpoint.learn(relay, tuple(await self._lookup(relay)))
            if not self._is_known(relay):
                self._unknown.add(relay, now)
        if not self._is_known(relay):
            raise ConnectError(f"{address}: no address of the relay is known", address=address)

    def _is_known(self, relay: PeerID) -> bool:
        return any(map(is_direct, self._endpoint.addresses_of(relay)))

    async def _dial(self, relay: PeerID, target: PeerID, purpose: Purpose, address: str) -> TCPConnection:
        connection = self._shared.leading(target, purpose, self.membership, relayed=True)
        try:
            await self._join(relay, await self._ask(relay, target), connection)
        except (HandshakeError, ConnectionLost) as error:
            raise handshake.at(address, error) from error
        except NetworkError as error:  # by the relay, or on the way to it
            raise ConnectError(f"{address}: {error}", address=address) from error
        return _named(connection, relay)

    async def _ask(self, relay: PeerID, target: PeerID) -> bytes:
        """A token for a circuit. Raises NetworkError."""
        self._needed[relay] += 1
        try:
            joining = await self._endpoint.call(relay, JOIN, JoinRequest(target), Joining, timeout=DIAL_TIMEOUT)
            return joining.token
        except UnknownMethod:
            raise ConnectError("this relay is of an older version of swarm, and has to be updated") from None
        finally:
            self._needed[relay] -= 1
            self._needed += Counter()  # keeps those above 0

    async def _join(self, relay: PeerID, token: bytes, connection: TCPConnection) -> None:
        """Dials the relay, which joins that socket to the other end's, and shakes hands. Raises NetworkError."""
        joiner = _Joiner(token)
        await self._endpoint.dial_plain(relay, joiner, timeout=DIAL_TIMEOUT)
        try:
            expect(GreetingKind.JOINED, await joiner.answer, 0)
        except BaseException:  # a cancellation too: nobody else knows this socket
            joiner.socket.abort()
            raise
        joiner.socket.set_protocol(connection)
        connection.connection_made(joiner.socket)
        joiner.socket.resume_reading()
        await connection.made()

    # ---- listening

    def _come(self, relay: PeerID, request: Come, accept: Accept) -> Coming:
        """Raises CallRefused."""
        seen = self._endpoint.seen(relay)
        if relay not in self.relays or seen is None or seen.relayed:
            raise CallRefused("unwanted", "this peer has no reservation there")
        if self._handshakes[relay] >= _HANDSHAKES or not self._rates.take(loop_time(), relay=relay):
            raise CallRefused("busy", "too many handshakes at once")
        connection = self._shared.listening(self.membership, relayed=True)
        self._admit(connection, relay, accept)
        self._tasks.spawn(self._meet(relay, request.token, connection))
        return Coming()

    async def _meet(self, relay: PeerID, token: bytes, connection: TCPConnection) -> None:
        try:
            async with asyncio.timeout(self.limits.handshake_timeout):
                await self._join(relay, token, connection)
        except (NetworkError, TimeoutError) as error:
            logger.debug("a circuit over %s did not come about: %s", relay.short, error)
        finally:
            if not connection.is_open and not connection.ready.done():
                connection.ready.cancel()  # it never had a socket

    def _admit(self, connection: TCPConnection, relay: PeerID, accept: Accept) -> None:
        self._handshakes[relay] += 1

        def handshake_ended(ready: asyncio.Future[None]) -> None:
            self._handshakes[relay] -= 1
            if not self._handshakes[relay]:
                del self._handshakes[relay]
            if not ready.cancelled() and ready.exception() is None:
                accept(_named(connection, relay))

        connection.ready.add_done_callback(handshake_ended)

    async def close(self) -> None:
        self._endpoint.withdraw(COME)
        await self._tasks.close()
        async with asyncio.TaskGroup() as group:
            for connection in tuple(self._shared.live):
                group.create_task(connection.close("shutting down"))


async def open_circuits(endpoint: Endpoint, lookup: Lookup | None = None) -> RelayTransport:
    """Lets an endpoint dial through relays, and be dialed through those at which it will have reservations."""
    transport = RelayTransport(endpoint, lookup)
    endpoint.add_transport(transport.scheme, transport)
    await transport.listen(endpoint.adopt)
    return transport


def _named(connection: TCPConnection, relay: PeerID) -> TCPConnection:
    connection.remote_address = str(Address("relay", "", 0, connection.peer_id, relay))
    return connection
