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
import os
import random
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from swarmcli.clock import Clock
from swarmcli.errors import CallTimeout, ConnectError, ConnectionLost, ProtocolViolation
from swarmcli.events import GOODBYE, Events, MembershipEnded, Noticed, OwnAddressesChanged, WokeUp
from swarmcli.network.addresses import Scheme, Scope, is_direct, parse_address, scope_of
from swarmcli.network.context import EndpointContext, Handler, PunchBulk, Traffic
from swarmcli.network.control_pool import ControlPool
from swarmcli.network.identity import PeerID
from swarmcli.network.loop_thread import set_within
from swarmcli.network.membership import Membership
from swarmcli.network.peers import Peers
from swarmcli.network.prefix import Prefix, prefix_of_address
from swarmcli.network.rates import LinkRates
from swarmcli.network.stream_pool import StreamPool
from swarmcli.network.streams.stream import Stream
from swarmcli.network.task_owner import keep
from swarmcli.network.transports.base import Connection, DirectTransport, Family, Join, LocalPort, Purpose, Transport
from swarmcli.network.twins import METHOD, Presence, TwinSeen, was_first
from swarmcli.network.wire.messages import MAX_METHOD, AddressesChanged
from swarmcli.words import format_duration, printable

logger = logging.getLogger(__name__)

MAX_PROBE = 4096  # bytes of the message on a probe
_PROBES = 256  # connections for probing that others may hold at one time …
_PROBE_LIFE = 30.0  # … and for so many seconds

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


class Endpoint:
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
        makes `random` repeatable. `membership`: of a closed run; who is no member gets no connection with this peer.
        Raises AddressError."""
        for address in announce:
            parse_address(address)
        dice = random.Random(seed if seed is not None else os.urandom(16))
        context = EndpointContext(transport, clock or Clock(), events or Events(), dice)
        self.identity = transport.identity
        self.peer_id = context.peer_id
        self.clock = context.clock
        self.stated_addresses = tuple(announce)
        self.listener_addresses: tuple[str, ...] = ()  # that the listener has found for itself, once it listens
        self.limits = context.limits
        self.events = context.events
        self.random = context.random
        self.membership = membership
        transport.membership = membership
        self._context = context
        self._transport = transport
        self._more_transports: list[Transport] = []
        self.never_listens = client_mode  # by its user's wish
        self._started = False
        self._peers = Peers(context.limits)
        self._control = ControlPool(context, self._peers)
        self._streams = StreamPool(context, self._peers, self._control)
        self._calls_made = 0
        # Bytes so far by the first word of a stream's method, of calls below "": as of the last beat, from any thread.
        self.moved: Mapping[str, Traffic] = {}
        self._probes: dict[Connection, Prefix] = {}  # that others hold to be seen → their network; the oldest first
        # Told of each message that came on a probe at the listener: who sent it, from where, and what it says.
        self.on_probe: Callable[[PeerID, str, bytes], None] | None = None
        self._closed = False
        self._since = self._looked = self.clock.raw()  # when it began, or woke up last; when it looked whether it slept
        self._met = b""  # the boot id of the last process with this one's key
        self.gave_way = ""  # to another process with this one's key: why this one is cut off from everybody
        self.serve(METHOD, TwinSeen, self._show_presence)

    @property
    def addresses(self) -> tuple[str, ...]:
        """All that this peer announces, once it has started: where it can be dialed itself, then through relays."""
        return self._context.addresses

    @property
    def direct_addresses(self) -> tuple[str, ...]:
        """Where this peer can be dialed itself, as far as it knows."""
        return tuple(filter(is_direct, self._context.addresses))

    @property
    def client_mode(self) -> bool:
        """Whether nobody can dial this peer directly, by its user's wish or as was found out. It may change."""
        return self.never_listens or (self._started and not self._context.direct)

    @property
    def reachable(self) -> bool:
        """Whether others can dial this peer at all, be it through a relay."""
        return bool(self._context.addresses)

    @property
    def listen_port(self) -> int:
        """Where the listener is; 0 without one, and where ports mean nothing."""
        return next((parse_address(address).port for address in self.listener_addresses), 0)

    # Life

    async def start(self) -> None:
        """Listens, unless in client mode, and announces where. Raises ListenError."""
        if not self.never_listens:
            self.listener_addresses = await self._transport.listen(self.adopt)
            self._context.direct = self.stated_addresses or self.listener_addresses
        self._started = True
        self._context.tasks.spawn(keep(self._keep_alive, self.events))

    def refresh_listener_addresses(self) -> tuple[str, ...]:
        """Looks again where the listener is: this machine may have moved to another network."""
        if self.listener_addresses:
            self.listener_addresses = self._transport.own_addresses()
        return self.listener_addresses

    def limit_rates(self, upload: float | None, download: float | None) -> None:
        """From now on this peer sends and receives at most so many bytes per second (None: no limit), in all: streams
        and calls, relayed ones, and those that it relays. May change at any time, also while streams run.

        Control messages pass at once and streams do with the rest. What is received is limited by reading slowly, so
        that the senders slow down. Raises ValueError for less than LEAST_RATE.
        """
        self._transport.rates.change(upload, download)

    @property
    def rates(self) -> LinkRates:
        """The limits as they are."""
        return self._transport.rates

    def add_transport(self, scheme: Scheme, transport: Transport) -> None:
        """From now on addresses of this scheme are dialed by this transport, which is closed with the endpoint.

        The endpoint does not ask it to listen: what it accepts is handed to `adopt`.
        """
        self._context.dialer.transports[scheme] = transport
        self._more_transports.append(transport)

    def announce(self, *, direct: Sequence[str] | None = None, relayed: Sequence[str] | None = None) -> None:
        """Says from now on that this peer can be dialed there; None: as before. Tells all connected peers.

        Raises AddressError for what cannot be read. Others take at most MAX_ADDRESSES of a peer.
        """
        before = self._context.addresses
        for address in (*(direct or ()), *(relayed or ())):
            parse_address(address)
        if direct is not None:
            self._context.direct = tuple(direct) if not self.never_listens else ()
        if relayed is not None:
            self._context.relayed = tuple(relayed)
        if self._context.addresses != before and not self._closed:
            for channel in self._peers.controls():
                channel.post(AddressesChanged(self._context.addresses))
            self.events.emit(OwnAddressesChanged(self._context.addresses))

    async def close(self) -> None:
        """Says goodbye to all peers and ends everything that is under way. Idempotent; leaves no task."""
        if self._closed:
            return
        self._closed = True
        await self._control.farewell(GOODBYE)
        for channel in self._peers.bulk():
            channel.reset(GOODBYE)
        await self._context.tasks.close()
        for transport in (*reversed(self._more_transports), self._transport):
            await transport.close()

    # Serving

    def serve(self, method: str, request_type: type[Req], handler: Callable[[PeerID, Req], Awaitable[Any]]) -> None:
        """Answers calls of `method` with what `handler(peer, request)` returns, a struct.

        A handler may raise CallRefused, which the caller sees as it is; any other exception is logged here and
        reaches the caller as RemoteError. It is cancelled when the caller gives up or is gone. Raises ValueError for a
        name that is taken, or too long for the wire.
        """
        self._add_handler(self._context.call_handlers, method, Handler(request_type, handler))

    def serve_stream(
        self, method: str, request_type: type[Req], handler: Callable[[PeerID, Req, Stream], Awaitable[None]]
    ) -> None:
        """The same for streams. When the handler returns, the stream has ended in both directions."""
        self._add_handler(self._context.stream_handlers, method, Handler(request_type, handler))

    def withdraw(self, *methods: str) -> None:
        """No longer answers these; handlers that run are not disturbed. Unknown names are ignored."""
        for method in methods:
            self._context.call_handlers.pop(method, None)
            self._context.stream_handlers.pop(method, None)

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
                channel = self._peers.current(peer) or await self._control.control(peer)
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

    def learn(self, peer: PeerID, addresses: Iterable[str], *, horizon: Scope | None = None) -> None:
        """Takes up where a peer can be dialed, by hearsay: what cannot be read is left out, and what lies below the
        horizon; None: that of talk which comes from nobody in particular. The book is bounded; see
        MAX_KNOWN_PEERS."""
        if peer != self.peer_id:
            self._context.book.learn(peer, addresses, self.horizon(None) if horizon is None else horizon)

    def horizon(self, source: PeerID | None) -> Scope:
        """The narrowest scope in which addresses are believed that this connected peer names.

        Whom we see on the internet names no hosts of our LAN, and whom we see in our LAN none of this machine: there
        the same address means another host to it than to us, at best. What comes from nobody in particular (None: a
        record in the hash table) counts as if the farthest of all peers had said it that were ever connected.
        """
        return self._control.horizon(source)

    def addresses_of(self, peer: PeerID) -> tuple[str, ...]:
        """Where this peer would be tried now, the best address first."""
        return self.addresses if peer == self.peer_id else self._context.dialer.addresses_of(peer)

    def first_hand(self, peer: PeerID) -> tuple[str, ...]:
        """Where we have dialed this peer and it has answered."""
        return self._context.book.first_hand(peer)

    def own_word(self, peer: PeerID) -> tuple[str, ...]:
        """Where this peer has answered us, or says that it can be dialed: what may be told to others, for whom it is
        hearsay. It holds no hearsay and no host names."""
        return self.addresses if peer == self.peer_id else self._context.book.own_word(peer)

    def seen(self, peer: PeerID) -> Connection | None:
        """The current control connection, which tells where the two ends see each other; None: there is none."""
        channel = self._peers.current(peer)
        return channel.connection if channel is not None else None

    def prefix(self, peer: PeerID) -> Prefix | None:
        """The network that this peer is counted in, by its current control connection; None: there is none.

        Whoever comes through a relay counts in a bucket of the relay's network, however many identities relay there.
        """
        channel = self._peers.current(peer)
        return channel.prefix if channel is not None else None

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
        """Dials a peer there, on a new connection that ends at once: where the peer sees this one.

        A `message` of at most MAX_PROBE bytes reaches whoever listens to probes at the other end. Raises ConnectError
        and its kinds, AddressError, ConnectionLost.
        """
        try:
            async with asyncio.timeout(timeout):
                connection = await self._context.dialer.dial(address, peer, Purpose.PROBE, timeout)
                connection.start(_Probe(None))
                try:
                    if message:
                        await connection.send(message)
                finally:
                    await connection.close("seen")
                return connection.observed_address
        except TimeoutError:
            raise ConnectError(f"{address} did not answer within {timeout:g} s", address=address) from None

    async def dial_directly(self, peer: PeerID, addresses: tuple[str, ...]) -> None:
        """Dials one more control connection, at one of these direct addresses: where it comes about it is preferred to
        the relayed one that stands. Raises ConnectError, ConnectionLost."""
        connection = await self._context.dialer.dial_peer(peer, addresses, Purpose.CONTROL)
        await self._control.establish(connection)

    def local_port(self, family: Family) -> LocalPort:
        """A port from which several connections can be dialed. Raises OSError."""
        return self._transport.local_port(family)

    def on_bulk_wanted(self, punch: PunchBulk | None) -> None:
        """From now on `punch(peer)` makes each bulk connection with a peer whose control connection both ends dialed,
        or raises NetworkError; then, and with None, a relay carries it."""
        self._context.punch_bulk = punch

    def on_join(self, join: Join | None) -> None:
        """From now on `join(token)` takes over whoever dials this peer with a token, without a handshake; see
        `DirectTransport.on_join`."""
        self._transport.on_join(join)

    async def dial_plain(self, peer: PeerID, protocol: asyncio.BufferedProtocol, *, timeout: float) -> None:
        """Dials a peer without a handshake, where it has answered. Raises ConnectError, ConnectionLost."""
        if not any(map(is_direct, self.first_hand(peer))):  # it has dialed this peer: its word is tried first
            await self.dial_directly(peer, tuple(filter(is_direct, self.addresses_of(peer))))
        seen, problem = self.seen(peer), None
        known = list(filter(is_direct, self.first_hand(peer)))
        # Where it answers now first; of the others a silent one leaves time for the next.
        for address in sorted(known, key=lambda each: seen is None or each != seen.remote_address):
            try:
                return await self._transport.dial_plain(address, protocol, timeout / len(known))
            except ConnectError as error:
                problem = error
        raise problem or ConnectError(f"{peer.short} cannot be dialed")

    def passed_on(self, nbytes: int) -> None:
        """Counts bytes that came and went for others, in the traffic of the service `relay`."""
        moved = Traffic(nbytes, nbytes)
        self._context.ended_traffic += moved
        self._context.stream_ended("relay", moved)

    def adopt(self, connection: Connection) -> None:
        """Takes up a connection after its handshake, whichever transport has accepted or made it."""
        if self._closed:
            connection.abort("this endpoint is closed")
        elif connection.peer_id == self.peer_id:
            connection.abort("dialed oneself")
        elif connection.purpose is Purpose.PROBE:
            self._probed(connection)
        elif connection.purpose is Purpose.CONTROL:
            self._context.tasks.spawn(self._welcome(connection))
        elif connection.dialed:
            self._streams.made(connection)
        else:
            self._streams.accepted(connection)

    def connected(self) -> tuple[PeerID, ...]:
        """The peers to which there is a control connection."""
        return tuple(peer.id for peer in self._peers if peer.controls)

    def is_connected(self, peer: PeerID) -> bool:
        return self._peers.current(peer) is not None

    def is_on_this_computer(self, peer: PeerID) -> bool:
        """Whether the control connection with this peer stays within this computer, or the last one did."""
        return self._control.is_on_this_computer(peer)

    def lost(self, peer: PeerID) -> asyncio.Future[str]:
        """A future that is done, with the reason, as soon as there is no control connection to this peer any more.

        Already done if there is none. While someone waits for it, the peer is watched closely: a dead cable is
        noticed after `keepalive_interval + keepalive_timeout`. Cancel it when it no longer matters.
        """
        return self._control.lost(peer)

    def disconnect(self, peer: PeerID, reason: str) -> None:
        """Ends every connection with this peer, and what is under way on them. The other end hears the reason."""
        for bulk in self._peers.bulk():
            if bulk.peer_id == peer:
                bulk.reset(reason)
        for control in self._peers.controls():
            if control.peer_id == peer:
                self._context.tasks.spawn(control.connection.close(reason))
        for connection in [probe for probe in self._probes if probe.peer_id == peer]:
            connection.abort(reason)

    def expel(self) -> dict[PeerID, str]:
        """In a closed run: ends the connections with those that are no members any more. Returns whom, and why."""
        if self.membership is None:
            return {}
        everybody = {connection.peer_id for connection in (*self._connections(), *self._probes)}
        self.membership.forget_all_but(everybody)
        expelled = {peer: why for peer in everybody if (why := self.membership.objection(peer))}
        for peer, why in expelled.items():
            logger.info("closed the connections to %s: %s", peer.short, why)
            self.disconnect(peer, why)
        return expelled

    def received(self, peer: PeerID) -> int | None:
        """Bytes that have come from this peer on the connections that stand now; None: there is no control connection.

        They grow as long as the peer lives: while someone waits for `lost`, each second of silence is asked about.
        """
        known = self._peers.get(peer)
        if known is None or known.current is None:
            return None
        return known.current.connection.bytes_received + known.bulk_received

    def round_trip(self, peer: PeerID) -> float | None:
        """Smoothed seconds from a question to its answer, without the time that the peer says it took. None: not known.

        A peer can claim to be nearer than it is; see `ping_time`. One that answers late is believed up to
        `LONGEST_ROUND_TRIP`.
        """
        channel = self._peers.current(peer)
        return channel.round_trip if channel is not None else None

    def ping_time(self, peer: PeerID) -> float | None:
        """Smoothed seconds from a ping to its pong, whatever the peer took. None: not known.

        For where a peer would gain by a lie: it can look farther away than it is, and never nearer.
        """
        return self._control.ping_time(peer)

    def passed(self) -> Traffic:
        """Bytes that have gone through this peer's links so far, as far as that is known: without what still waits."""
        waiting = sum(connection.bytes_waiting for connection in self._connections())
        traffic = self._traffic()
        return Traffic(traffic.sent - waiting, traffic.received)

    def _moved(self) -> dict[str, Traffic]:
        moved = dict(self._context.streamed)
        for channel in self._peers.bulk():
            if channel.service:
                moved[channel.service] = moved.get(channel.service, Traffic()) + channel.moved
        return moved | {"": self._traffic() - sum(moved.values(), Traffic())}

    def statistics(self) -> EndpointStatistics:
        """For tests, benchmarks and debugging."""
        controls, bulk = self._peers.controls(), self._peers.bulk()
        return EndpointStatistics(
            control_connections=len(controls),
            bulk_connections=len(bulk),
            idle_bulk_connections=sum(len(peer.idle) for peer in self._peers),
            known_peers=len(self._context.book),
            calls_waiting=sum(channel.calls_waiting for channel in controls),
            calls_serving=sum(channel.calls_serving for channel in controls),
            calls_made=self._calls_made,
            streams_open=sum(channel.stream is not None for channel in bulk),
            traffic=self._traffic(),
            violations=dict(self._context.violations),
        )

    # Inside

    def _add_handler(self, table: dict[str, Handler], method: str, handler: Handler) -> None:
        if not 0 < len(method) <= MAX_METHOD:
            raise ValueError(f"a method's name has 1 to {MAX_METHOD} characters, got {method[:200]!r}")
        if method in self._context.call_handlers or method in self._context.stream_handlers:
            raise ValueError(f"method {method!r} is served already; withdraw it first")
        table[method] = handler

    def _connections(self) -> list[Connection]:
        controls = [channel.connection for channel in self._peers.controls()]
        return controls + [channel.connection for channel in self._peers.bulk()]

    def _traffic(self) -> Traffic:
        """Since the start, on connections that have ended and those that stand, and what was passed on for others."""
        ended, standing = self._context.ended_traffic, self._connections()
        sent = sum(each.bytes_sent for each in standing)
        return Traffic(ended.sent + sent, ended.received + sum(each.bytes_received for each in standing))

    def _probed(self, connection: Connection) -> None:
        """The dialer knows by now where it is seen. It holds the connection a while, since that keeps its router's
        ports as they are."""
        if len(self._probes) >= _PROBES:
            self._end_a_probe()
        self._probes[connection] = prefix_of_address(connection.remote_address)
        self._context.tasks.spawn(self._hold(connection))

    def _end_a_probe(self) -> None:
        """The oldest one of the network that holds the most: refusing new ones instead, whoever holds all would keep
        every proof from being heard. A word comes at the beginning, so the old ones have been heard."""
        held = Counter(self._probes.values())
        oldest = max(self._probes, key=lambda connection: held[self._probes[connection]])
        del self._probes[oldest]
        oldest.abort("too many probes")

    async def _hold(self, connection: Connection) -> None:
        def heard(message: bytes) -> None:
            # As dials of strangers do: a connection that both ends or a relay have made says nothing about these.
            came_in = not (connection.dialed or connection.relayed or connection.punched)
            if self.on_probe is not None and came_in:
                self.on_probe(connection.peer_id, connection.remote_address, message)

        probe = _Probe(heard)
        connection.start(probe)
        try:
            if not await set_within(probe.ended, _PROBE_LIFE):
                await connection.close("held long enough")
        finally:
            self._probes.pop(connection, None)
            connection.abort("held long enough")

    async def _welcome(self, connection: Connection) -> None:
        try:
            await self._control.establish(connection)
        except ConnectionLost as error:
            logger.debug("%s was gone before it was greeted: %s", connection.peer_id.short, error)

    async def _show_presence(self, peer: PeerID, seen: TwinSeen) -> Presence:
        """`peer` has met another process with this one's key, see `twins`."""
        self._look_whether_it_slept()
        context, age, word = self._context, self.clock.raw() - self._since, seen.presence
        if word is not None and seen.boot_id != self._met and word.is_of(self.peer_id, seen.boot_id, context.boot_id):
            self._met, where = seen.boot_id, printable(f"({peer.short} sees it at {seen.address})", 200)
            if was_first(word.age, seen.boot_id, age, context.boot_id):
                why = (
                    f"another process {where} has this peer's key, and was there first: stop that one, or start this "
                    "one again without its identity file (identity.key in its home), and it gets a key of its own"
                )
                self.events.emit(MembershipEnded(why))  # first: a role that hears of it leaves in good order
                self.gave_way = why
                context.tasks.spawn(self._control.farewell(why))  # it would go on in the other one's name
            else:
                told = f"another process {where} has a copy of this peer's key; it began later, and has to leave"
                self.events.emit(Noticed("warning", told))
        return Presence.sign(self.identity, context.boot_id, seen.boot_id, age)

    def _look_whether_it_slept(self) -> None:
        looked, before = self.clock.raw(), self._looked
        self._looked = looked
        if looked - before >= self.limits.asleep_after:
            self._wake_up(looked - before)

    def _wake_up(self, seconds: float) -> None:
        """Others have given up the connections from before, and routers have forgotten them: nothing would come, and
        the keepalive, which counts only the seconds in which this machine was awake, would take as long as ever to
        notice. The loop's clock may have stood still, so the swarm's raw clock has to tell."""
        reason = f"this machine slept for {format_duration(seconds)}"
        self._since = self.clock.raw()
        self.events.emit(WokeUp(seconds))
        for bulk in self._peers.bulk():
            bulk.reset(reason)
        for channel in self._peers.controls():
            channel.connection.abort(reason)

    def leave_network(self, hosts: Collection[str]) -> set[PeerID]:
        """Ends the connections that go from other addresses than these, which this machine no longer has: nothing comes
        on them any more, and the keepalive would take its time to notice. Returns to whom there was one."""

        def is_gone(connection: Connection) -> bool:
            host = connection.local_host
            return host is not None and host not in hosts and scope_of(host) is not Scope.HOST

        reason = "this machine has left that network"
        for channel in self._peers.bulk():
            if is_gone(channel.connection):
                channel.reset(reason)
        left = [control for control in self._peers.controls() if is_gone(control.connection)]
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
            for peer in self._peers:
                for channel in list(peer.controls):
                    channel.tick(peer.watched or peer.in_use, peer.bulk_received)
            self._control.close_surplus()
            self._streams.tick()
            self.expel()
            self.moved = self._moved()


class _Probe:
    """The Receiver of a connection on which one short message may come, or nothing."""

    def __init__(self, heard: Callable[[bytes], None] | None) -> None:
        self.ended = asyncio.Event()
        self._heard = heard

    def reading_wanted(self) -> bool:
        return True

    def payload_buffer(self, header: bytes, size: int) -> memoryview:
        raise ProtocolViolation("unexpected message: on a connection for probing")

    def frame_received(self, header: bytes, payload: memoryview) -> None:
        if self._heard is None or len(header) > MAX_PROBE:
            raise ProtocolViolation("unexpected message: on a connection for probing")
        heard, self._heard = self._heard, None
        heard(header)

    def connection_lost(self, error: Exception) -> None:
        self.ended.set()
