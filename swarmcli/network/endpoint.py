"""Calls and streams between peers, over any transport.

    Endpoint ── ControlPool ── ControlChannel (one per peer): calls, pings
             └─ StreamPool ─── StreamChannel (several per peer): one stream at a time each

Either end of a connection calls the other, no matter which one dialed it. What goes over the wire is in
docs/protocol.md.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from swarmcli.clock import Clock
from swarmcli.errors import CallTimeout, ConnectError, ConnectionLost
from swarmcli.events import GOODBYE, Events, MembershipEnded, Noticed, OwnAddressesChanged, WokeUp
from swarmcli.network.addresses import Scheme, Scope, is_direct, parse_address, scope_of
from swarmcli.network.context import Handler, Traffic
from swarmcli.network.control_pool import ControlPool
from swarmcli.network.identity import PeerID
from swarmcli.network.membership import Membership
from swarmcli.network.neighbours import Neighbours
from swarmcli.network.probes import ProbeReceiver, Probes
from swarmcli.network.stream_pool import StreamPool
from swarmcli.network.streams.stream import Stream
from swarmcli.network.task_owner import keep
from swarmcli.network.transports.base import Connection, DirectTransport, Purpose, Transport
from swarmcli.network.twins import METHOD, Presence, TwinSeen, was_first
from swarmcli.network.wire.messages import MAX_METHOD, AddressesChanged
from swarmcli.words import format_duration, printable

logger = logging.getLogger(__name__)


Req = TypeVar("Req")
Resp = TypeVar("Resp")


@dataclass(frozen=True, slots=True)
class EndpointStatistics:
    """An endpoint at one moment."""

    control_connections: int
    bulk_connections: int
    idle_bulk_connections: int
    known_peers: int  # in the address book
    calls_waiting: int  # own ones, for an answer
    calls_serving: int
    calls_made: int  # since the start
    streams_open: int  # in both directions
    traffic: Traffic  # since the start
    violations: Mapping[str, int]  # name of the broken rule → connections closed for it


class Endpoint(Neighbours):
    """This peer on the network. Used from one loop only."""

    def __init__(
        self,
        transport: DirectTransport,
        *,
        clock: Clock | None = None,
        client_mode: bool = False,
        announce: Sequence[str] = (),
        events: Events | None = None,
        seed: int | None = None,
        membership: Membership | None = None,
    ) -> None:
        """`client_mode`: never listens. `announce` replaces the addresses that the listener finds for itself. `seed`
        makes `random` repeatable. `membership`: of a closed run; only members get a connection with this peer. Raises
        AddressError."""
        super().__init__(transport, clock, events, seed)
        for address in announce:
            parse_address(address)
        self.stated_addresses = tuple(announce)
        self.listener_addresses: tuple[str, ...] = ()  # that the listener has found for itself, once it listens
        self.membership = membership
        transport.membership = membership
        self.rates = transport.rates
        self.transport = transport
        self._more_transports: list[Transport] = []
        self.never_listens = client_mode  # by its user's wish
        self._started = False
        self._control = ControlPool(self)
        self._streams = StreamPool(self, self._control)
        self._calls_made = 0
        # First word of a stream's method ("": calls) → bytes so far, as of the last keepalive tick. For any thread.
        self.moved: Mapping[str, Traffic] = {}
        self.probes = Probes(self)
        self._closed = False
        self._since = self._looked = self.clock.raw()  # when it began, or woke up last; when it looked whether it slept
        self._met = b""  # the boot id of the last process with this one's key
        self.gave_way = ""  # to another process with this one's key: why this one is cut off from everybody
        self.serve(METHOD, TwinSeen, self._show_presence)

    @property
    def client_mode(self) -> bool:
        """Whether nobody can dial this peer directly, by its user's wish or as it has found out. It may change."""
        return self.never_listens or (self._started and not self.direct)

    @property
    def listen_port(self) -> int:
        """The listener's port; 0 without a listener, or if the transport has no ports."""
        return next((parse_address(address).port for address in self.listener_addresses), 0)

    # Life

    async def start(self) -> None:
        """Listens, unless in client mode, and announces where. Raises ListenError."""
        if not self.never_listens:
            self.listener_addresses = await self.transport.listen(self.adopt)
            self.direct = self.stated_addresses or self.listener_addresses
        self._started = True
        self.tasks.spawn(keep(self._keep_alive, self.events))

    def refresh_listener_addresses(self) -> tuple[str, ...]:
        """Looks again where the listener is: this machine may have moved to another network."""
        if self.listener_addresses:
            self.listener_addresses = self.transport.own_addresses()
        return self.listener_addresses

    def limit_rates(self, upload: float | None, download: float | None) -> None:
        """From now on this peer sends and receives at most so many bytes per second (None: no limit), in all: streams
        and calls, relayed ones, and those that it relays. May change at any time, also while streams run.

        Control messages pass at once, and streams get the rest. What is received is limited by reading slowly, so that
        the senders slow down. Raises ValueError for less than LEAST_RATE.
        """
        self.rates.change(upload, download)

    def add_transport(self, scheme: Scheme, transport: Transport) -> None:
        """From now on addresses of this scheme are dialed by this transport, which is closed with the endpoint.

        The endpoint does not ask it to listen: what it accepts is handed to `adopt`.
        """
        self.dialer.transports[scheme] = transport
        self._more_transports.append(transport)

    def announce(self, *, direct: Sequence[str] | None = None, relayed: Sequence[str] | None = None) -> None:
        """From now on announces that this peer can be dialed there; None: as before. Tells all connected peers.

        Raises AddressError for what cannot be read. Others take at most MAX_ADDRESSES of a peer.
        """
        before = self.addresses
        for address in (*(direct or ()), *(relayed or ())):
            parse_address(address)
        if direct is not None:
            self.direct = tuple(direct) if not self.never_listens else ()
        if relayed is not None:
            self.relayed = tuple(relayed)
        if self.addresses != before and not self._closed:
            for channel in self.peers.controls():
                channel.post(AddressesChanged(self.addresses))
            self.events.emit(OwnAddressesChanged(self.addresses))

    async def close(self) -> None:
        """Says goodbye to all peers and ends everything that is under way. Idempotent; leaves no task."""
        if self._closed:
            return
        self._closed = True
        await self._control.farewell(GOODBYE)
        for channel in self.peers.bulk():
            channel.reset(GOODBYE)
        await self.tasks.close()
        for transport in (*reversed(self._more_transports), self.transport):
            await transport.close()

    # Serving

    def serve(self, method: str, request_type: type[Req], handler: Callable[[PeerID, Req], Awaitable[Any]]) -> None:
        """Answers calls of `method` with what `handler(peer, request)` returns, a struct.

        A handler may raise CallRefused, which the caller sees as it is; any other exception is logged here and
        reaches the caller as RemoteError. It is cancelled when the caller gives up or is gone. Raises ValueError for a
        name that is taken, or too long for the wire.
        """
        self._add_handler(self.call_handlers, method, Handler(request_type, handler))

    def serve_stream(
        self, method: str, request_type: type[Req], handler: Callable[[PeerID, Req, Stream], Awaitable[None]]
    ) -> None:
        """The same for streams. When the handler returns, the stream has ended in both directions."""
        self._add_handler(self.stream_handlers, method, Handler(request_type, handler))

    def withdraw(self, *methods: str) -> None:
        """No longer answers these; handlers that run are not disturbed. Unknown names are ignored."""
        for method in methods:
            self.call_handlers.pop(method, None)
            self.stream_handlers.pop(method, None)

    # Calling

    async def call(self, peer: PeerID, method: str, request: Any, response_type: type[Resp], *, timeout: float) -> Resp:
        """One question and its answer, on the control connection, which is dialed if need be.

        Raises CallTimeout after `timeout` seconds in all, PeerUnreachable, ConnectionLost if the connection ended
        before the answer, UnknownMethod, RemoteError, CallRefused, and ProtocolViolation for an answer of another
        type. ValueError: the peer is this one, or the request is too large.
        Nothing is tried twice. Cancelling it, or its deadline, cancels the handler at the other end.
        """
        self._calls_made += 1
        try:
            async with asyncio.timeout(timeout):
                channel = self.peers.current(peer) or await self._control.control(peer)
                return await channel.call(method, request, response_type)
        except TimeoutError:
            raise CallTimeout(f"{peer.short} did not answer {method} within {timeout:g} s") from None

    @contextlib.asynccontextmanager
    async def stream(self, peer: PeerID, method: str, request: Any, *, timeout: float) -> AsyncIterator[Stream]:
        """A stream of messages both ways, on a connection of its own, opened by whichever end can dial.

        `timeout` bounds the opening only (CallTimeout). What the handler raises, or that there is none, shows at
        the next `receive` or `send`. Leaving the block normally finishes the stream: what was sent still counts,
        what was not received is lost, and a failure of the handler that has arrived by then is raised. To wait for
        the handler's end, `finish()` and `receive` until EndOfStream. Leaving by an exception resets the stream,
        and the handler is cancelled. Entering raises CallTimeout, PeerUnreachable and ConnectionLost.
        """

        try:
            async with asyncio.timeout(timeout):
                channel, stream = await self._streams.open(peer, method, request)
        except TimeoutError:
            raise CallTimeout(f"no stream to {peer.short} for {method} within {timeout:g} s") from None
        try:
            yield stream
        except BaseException:  # a cancellation too must give the stream's slots back, here and at the peer
            channel.reset("cancelled by the caller")
            raise
        failure = stream.unseen_failure()
        await channel.leave()
        if failure is not None:
            raise failure

    # Knowing peers

    async def connect(self, address: str, *, timeout: float) -> PeerID:
        """First contact at an address; with a peer id in it, only with that peer. Returns who answered.

        Raises AddressError, and ConnectError or its kinds, whose `.step` says how far it came.
        """
        try:
            async with asyncio.timeout(timeout):
                return await self._control.connect(address, timeout)
        except TimeoutError:
            raise ConnectError(f"{address} did not answer within {timeout:g} s", address=address) from None

    async def probe(self, address: str, peer: PeerID, message: bytes = b"", *, timeout: float) -> str | None:
        """Dials a peer there, on a new connection that ends at once. Returns where it sees this peer; None: unknown.

        A `message` of at most MAX_PROBE bytes reaches whoever listens to probes at the other end. Raises ConnectError
        and its kinds, AddressError, ConnectionLost.
        """
        try:
            async with asyncio.timeout(timeout):
                connection = await self.dialer.dial(address, peer, Purpose.PROBE, timeout)
                connection.start(ProbeReceiver(None))
                try:
                    if message:
                        await connection.send(message)
                finally:
                    await connection.close("seen")
                return connection.observed_address
        except TimeoutError:
            raise ConnectError(f"{address} did not answer within {timeout:g} s", address=address) from None

    async def dial_directly(self, peer: PeerID, addresses: tuple[str, ...]) -> None:
        """Dials one more control connection at one of these direct addresses. It is then preferred to a relayed one.
        Raises ConnectError, ConnectionLost."""
        connection = await self.dialer.dial_peer(peer, addresses, Purpose.CONTROL)
        await self._control.establish(connection)

    async def dial_plain(self, peer: PeerID, protocol: asyncio.BufferedProtocol, *, timeout: float) -> None:
        """Dials a peer without a handshake, where it has answered. Raises ConnectError, ConnectionLost."""
        if not any(map(is_direct, self.first_hand(peer))):  # none is proven yet: prove one that it names
            await self.dial_directly(peer, tuple(filter(is_direct, self.addresses_of(peer))))
        seen, problem = self.seen(peer), None
        known = list(filter(is_direct, self.first_hand(peer)))
        # First where it answers now. A silent address leaves time for the next, since each has a part of it.
        for address in sorted(known, key=lambda each: seen is None or each != seen.remote_address):
            try:
                return await self.transport.dial_plain(address, protocol, timeout / len(known))
            except ConnectError as error:
                problem = error
        raise problem or ConnectError(f"{peer.short} cannot be dialed")

    def adopt(self, connection: Connection) -> None:
        """Takes up a connection after its handshake, whichever transport has accepted or dialed it."""
        if self._closed:
            connection.abort("this endpoint is closed")
        elif connection.peer_id == self.peer_id:
            connection.abort("dialed oneself")
        elif connection.purpose is Purpose.PROBE:
            self.probes.accepted(connection)
        elif connection.purpose is Purpose.CONTROL:
            self.tasks.spawn(self._welcome(connection))
        elif connection.dialed:
            self._streams.made(connection)
        else:
            self._streams.accepted(connection)

    def disconnect(self, peer: PeerID, reason: str) -> None:
        """Ends every connection with this peer, and what is under way on them. The other end hears the reason."""
        for bulk in self.peers.bulk():
            if bulk.peer_id == peer:
                bulk.reset(reason)
        for control in self.peers.controls():
            if control.peer_id == peer:
                self.tasks.spawn(control.connection.close(reason))
        self.probes.end_those_of(peer, reason)

    def expel(self) -> dict[PeerID, str]:
        """In a closed run, ends the connections with peers that are no longer members. Returns peer → why."""
        if self.membership is None:
            return {}
        everybody = {connection.peer_id for connection in (*self.connections(), *self.probes.held)}
        self.membership.forget_all_but(everybody)
        expelled = {peer: why for peer in everybody if (why := self.membership.objection(peer))}
        for peer, why in expelled.items():
            logger.info("closed the connections to %s: %s", peer.short, why)
            self.disconnect(peer, why)
        return expelled

    def statistics(self) -> EndpointStatistics:
        """For tests, benchmarks and debugging."""
        controls, bulk = self.peers.controls(), self.peers.bulk()
        return EndpointStatistics(
            control_connections=len(controls),
            bulk_connections=len(bulk),
            idle_bulk_connections=sum(len(peer.idle) for peer in self.peers),
            known_peers=len(self.book),
            calls_waiting=sum(channel.calls_waiting for channel in controls),
            calls_serving=sum(channel.calls_serving for channel in controls),
            calls_made=self._calls_made,
            streams_open=sum(channel.stream is not None for channel in bulk),
            traffic=self._traffic(),
            violations=dict(self.violations),
        )

    # Inside

    def _add_handler(self, table: dict[str, Handler], method: str, handler: Handler) -> None:
        if not 0 < len(method) <= MAX_METHOD:
            raise ValueError(f"a method's name has 1 to {MAX_METHOD} characters, got {method[:200]!r}")
        if method in self.call_handlers or method in self.stream_handlers:
            raise ValueError(f"method {method!r} is served already; withdraw it first")
        table[method] = handler

    async def _welcome(self, connection: Connection) -> None:
        try:
            await self._control.establish(connection)
        except ConnectionLost as error:
            logger.debug("%s was gone before it was greeted: %s", connection.peer_id.short, error)

    async def _show_presence(self, peer: PeerID, seen: TwinSeen) -> Presence:
        """`peer` has met another process with this one's key, see `twins`."""
        self._look_whether_it_slept()
        age, word = self.clock.raw() - self._since, seen.presence
        if word is not None and seen.boot_id != self._met and word.is_of(self.peer_id, seen.boot_id, self.boot_id):
            self._met, where = seen.boot_id, printable(f"({peer.short} sees it at {seen.address})", 200)
            if was_first(word.age, seen.boot_id, age, self.boot_id):
                why = (
                    f"another process {where} has this peer's key, and was there first: stop that one, or start this "
                    "one again without its identity file (identity.key in its home), and it gets a key of its own"
                )
                self.events.emit(MembershipEnded(why))  # before the farewell, so that a role leaves in good order
                self.gave_way = why
                self.tasks.spawn(self._control.farewell(why))  # otherwise it would go on under the other's identity
            else:
                told = f"another process {where} has a copy of this peer's key; it began later, and has to leave"
                self.events.emit(Noticed("warning", told))
        return Presence.sign(self.identity, self.boot_id, seen.boot_id, age)

    def _look_whether_it_slept(self) -> None:
        looked, before = self.clock.raw(), self._looked
        self._looked = looked
        if looked - before >= self.limits.asleep_after:
            self._wake_up(looked - before)

    def _wake_up(self, seconds: float) -> None:
        """Ends all connections from before the sleep. Others have given them up, and routers have forgotten them, so
        nothing would come; the keepalive, which counts only seconds in which this machine was awake, would take its
        usual time to notice. The loop's clock may have stood still, so the raw clock of swarm time tells."""
        reason = f"this machine slept for {format_duration(seconds)}"
        self._since = self.clock.raw()
        self.events.emit(WokeUp(seconds))
        for bulk in self.peers.bulk():
            bulk.reset(reason)
        for channel in self.peers.controls():
            channel.connection.abort(reason)

    def leave_network(self, hosts: Collection[str]) -> set[PeerID]:
        """Ends the connections from other addresses than `hosts`, which this machine no longer has: nothing comes on
        them any more, and the keepalive would take seconds to notice. Returns the peers whose control connections
        ended."""

        def is_gone(connection: Connection) -> bool:
            host = connection.local_host
            return host is not None and host not in hosts and scope_of(host) is not Scope.HOST

        reason = "this machine has left that network"
        for channel in self.peers.bulk():
            if is_gone(channel.connection):
                channel.reset(reason)
        left = [control for control in self.peers.controls() if is_gone(control.connection)]
        for control in left:
            control.connection.abort(reason)
        return {control.peer_id for control in left}

    async def _keep_alive(self) -> None:
        """Ticks at random phases, so that a thousand endpoints do not ping at the same moment."""
        interval = self.limits.keepalive_interval
        await asyncio.sleep(interval * self.random.random())
        self._looked = self.clock.raw()
        while True:
            await asyncio.sleep(interval)
            self._look_whether_it_slept()
            for peer in self.peers:
                for channel in list(peer.controls):
                    channel.tick(peer.watched or peer.in_use, peer.bulk_received)
            self._control.close_surplus()
            self._streams.tick()
            self.expel()
            self.moved = self.moved_by_now()
