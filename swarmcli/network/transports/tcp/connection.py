"""One TLS connection over TCP, from its handshake to its end.

    TLS ── handshake complete ──▶ GREETING ── both ends known ──▶ OPEN ── close/violation ──▶ ENDING ──▶ ENDED

Everything happens in the callbacks of asyncio's protocol, without a task per connection: encrypted bytes go from the
socket through the TLS engine straight into the memory that the receiver named.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from functools import cached_property
from typing import cast

from swarmcli.errors import ConnectionLost, HandshakeError, NetworkError, ProtocolViolation
from swarmcli.network.addresses import Scope, scope_of
from swarmcli.network.bounds import NetworkLimits
from swarmcli.network.identity import Identity, PeerID
from swarmcli.network.ledger import Ledger
from swarmcli.network.membership import Membership
from swarmcli.network.prefix import prefix_of
from swarmcli.network.rates import LinkRates, LinkWay
from swarmcli.network.transports.base import Buffer, Join, Purpose, Receiver
from swarmcli.network.transports.frames import goodbye_frame
from swarmcli.network.transports.tcp import handshake
from swarmcli.network.transports.tcp.handshake import (
    ALPN,
    MAGIC,
    TOKEN_BYTES,
    Greeted,
    Greeting,
    GreetingKind,
    Refused,
    expect,
    take_message,
    tls_failure,
)
from swarmcli.network.transports.tcp.system import bound_window, forget_unsent
from swarmcli.network.transports.tcp.tls import TLSEngine, TLSReader, TLSWriter

logger = logging.getLogger(__name__)

_LINGER = 2.0  # seconds for which an ending connection waits until the other end has read everything
_WINDOW = 0.1  # seconds of the download limit that may be under way on one connection


class Phase(Enum):
    TLS = auto()  # the TLS handshake is under way
    GREETING = auto()  # the channel is encrypted; the greeting is under way
    OPEN = auto()  # frames go both ways
    ENDING = auto()  # the goodbye is written; what still comes in is thrown away
    ENDED = auto()  # the socket is closed or about to be


@dataclass
class Shared:
    """Makes the connections of one transport, and holds what they have in common.

    The read buffers can be shared because each is filled and emptied within one callback on one loop.
    """

    identity: Identity
    limits: NetworkLimits
    rates: LinkRates = field(default_factory=LinkRates)
    live: set[TCPConnection] = field(default_factory=set)  # with an open socket
    join: Join | None = None  # takes over connections that begin with a token instead of TLS
    plain: weakref.WeakSet[asyncio.BaseTransport] = field(default_factory=weakref.WeakSet)  # sockets without TLS
    refusals: Counter[str] = field(default_factory=Counter)  # connections that broke a rule, by the error's class
    encrypted: memoryview = field(default_factory=lambda: memoryview(bytearray(256 << 10)))
    decrypted: memoryview = field(default_factory=lambda: memoryview(bytearray(16 << 10)))  # one TLS record
    heads: dict[TCPConnection, int] = field(default_factory=dict)  # bytes of large messages under way, oldest first

    def __post_init__(self) -> None:
        self._heads = Ledger(self.limits.budgets.heads)

    # The contexts are made when they are needed: some peers dial nobody, others are dialed by nobody.
    @cached_property
    def _dialer_context(self) -> ssl.SSLContext:
        return handshake.dialer_context()

    @cached_property
    def _listener_context(self) -> ssl.SSLContext:
        return handshake.listener_context(self.identity)

    def leading(
        self, expected: PeerID | None, purpose: Purpose, membership: Membership | None, **way: bool
    ) -> TCPConnection:
        """A connection of which this end leads the handshake. `way`: relayed or punched."""

        def greet(engine: TLSEngine) -> handshake.Greeting:
            listener = handshake.certified_peer(engine.peer_certificate)
            handshake.check_listener(listener, expected, self.identity.peer_id)
            return handshake.greet_listener(self.identity, listener, purpose, membership)

        engine = TLSEngine(self._dialer_context, server_side=False)
        return TCPConnection(engine, greet, self, dialed=True, **way)

    def listening(self, membership: Membership | None, **way: bool) -> TCPConnection:
        """A connection of which the other end leads the handshake."""

        def greet(engine: TLSEngine) -> handshake.Greeting:
            seen = "" if connection.relayed else connection.remote_address  # a relay hides the dialer's address
            return handshake.greet_dialer(self.identity, seen, membership)

        engine = TLSEngine(self._listener_context, server_side=True)
        connection = TCPConnection(engine, greet, self, dialed=False, **way)
        return connection

    def follow_rates(self) -> None:
        for connection in self.live:
            connection.follow_rates()

    def head_begins(self, connection: TCPConnection, size: int) -> None:
        """Charges a large message before its bytes are there. If the peer or a network has too many under way, the
        connection with its oldest one ends: an honest message is whole within seconds."""
        if connection in self.heads:
            return
        self._heads.charge_anyway(connection.peer_id, connection.prefix, size)
        self.heads[connection] = size
        crowded = self._heads.crowded(connection.prefix, 0)
        if self._heads.of_identity(connection.peer_id) > self._heads.budget.identity:
            oldest = next(each for each in self.heads if each.peer_id == connection.peer_id)
        elif crowded is not None:
            oldest = next(each for each in self.heads if each.prefix == crowded)
        else:
            return
        self.refusals["too many large messages at once"] += 1
        oldest.abort("too many large messages at once")

    def head_ends(self, connection: TCPConnection) -> None:
        size = self.heads.pop(connection, 0)
        if size:
            self._heads.give_back(connection.peer_id, connection.prefix, size)


class TCPConnection(asyncio.BufferedProtocol):
    """Implements `base.Connection`; `ready` is done when the handshake has succeeded or failed."""

    peer_id: PeerID
    purpose: Purpose

    def __init__(
        self,
        engine: TLSEngine,
        greeting: Callable[[TLSEngine], Greeting],
        shared: Shared,
        *,
        dialed: bool,
        relayed: bool = False,
        punched: bool = False,
    ) -> None:
        """`greeting` begins when the TLS handshake is complete. `relayed`: the socket leads to a relay."""
        loop = asyncio.get_running_loop()
        self.dialed, self.relayed, self.punched = dialed, relayed, punched
        self.observed_address: str | None = None
        self.remote_address = "tcp://unknown"
        self.prefix = prefix_of("unknown")
        self.local_host: str | None = None
        self.on_this_computer = False
        self.ready: asyncio.Future[None] = loop.create_future()
        self._loop = loop
        self._engine = engine
        self._make_greeting = greeting
        self._greeting: Greeting
        self._greetings = bytearray()  # decrypted before the connection was open, or a token
        self._fresh = not dialed and not relayed  # the first byte will show whether TLS begins, or a token comes
        self._in_the_clear = False
        self._shared = shared
        self._reader = TLSReader(engine, shared.limits, shared.decrypted)
        self._receiver: Receiver | None = None
        self.on_made: Callable[[TCPConnection], None] | None = None  # called when the socket is there
        self._phase = Phase.TLS
        self._error: Exception | None = None
        self._socket: asyncio.Transport
        self._linger: asyncio.TimerHandle | None = None
        self._ended: asyncio.Future[None] = loop.create_future()
        self._way_in = shared.rates.download
        self._held_back = False  # nothing is read until it is this connection's turn
        self._writer = TLSWriter(
            engine,
            shared.limits,
            lambda: self.abort("a send was cancelled in the middle of a frame"),
            shared.rates.upload,
        )

    @property
    def bytes_received(self) -> int:
        return self._reader.bytes_received

    @property
    def bytes_sent(self) -> int:
        return self._writer.bytes_sent

    @property
    def bytes_waiting(self) -> int:
        return self._writer.bytes_waiting

    @property
    def is_open(self) -> bool:
        return self._phase is Phase.OPEN

    # ---- what Connection promises

    def start(self, receiver: Receiver) -> None:
        self._receiver = receiver
        if self._error is not None:
            self._loop.call_soon(receiver.connection_lost, self._error)
        else:
            self.read_on()

    async def send(self, header: bytes, payload: Sequence[Buffer] = ()) -> None:
        """See `Connection.send`. A send that is cancelled in the middle of its frame ends the connection."""
        await self._writer.send(header, payload)

    def read_on(self) -> None:
        if self._phase is Phase.OPEN:
            self._steer()
            self._loop.call_soon(self._read_decrypted)  # frames that are here already

    async def close(self, reason: str = "") -> None:
        if self._phase is Phase.OPEN:
            try:
                async with asyncio.timeout(_LINGER), self._writer.turn:
                    self._end_in_order(ConnectionLost(f"closed by us: {reason}"), reason)
            except TimeoutError:
                self.abort(reason)
        elif not self.ready.done():
            self.abort(reason)
        await asyncio.shield(self._ended)

    def abort(self, reason: str) -> None:
        self._end_now(ConnectionLost(f"closed by us: {reason}"))

    async def made(self) -> None:
        """Waits for the handshake, at the end that dials. Raises HandshakeError, ConnectionLost."""
        try:
            await self.ready
        finally:
            if not self.is_open and self._error is None:  # cancelled; one that failed ends after its last words
                self.abort("dialing was given up")

    def refuse(self, rule: str, message: str) -> None:
        """Ends a handshake that is still under way."""
        if not self.ready.done():
            self._end_handshake(Refused(rule, message))

    # ---- what asyncio calls

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._socket = cast(asyncio.Transport, transport)  # other loops have classes of their own
        self._shared.live.add(self)
        host, port, *_ = transport.get_extra_info("peername") or ("unknown", 0)
        host = host.removeprefix("::ffff:")  # of IPv4 on a socket that listens for both
        self.remote_address = f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"
        self.prefix = prefix_of(host)
        own = transport.get_extra_info("sockname")
        self.local_host = own[0].partition("%")[0].removeprefix("::ffff:") if own else None
        self.on_this_computer = not self.relayed and (host == self.local_host or scope_of(host) is Scope.HOST)
        if self.on_this_computer:  # the user's limits are for the line, which these bytes do not pass
            self._way_in = self._writer.way = LinkWay()
        self._writer.attach(self._socket)
        self._reader.attach(self._socket)
        if self.on_made is not None:
            self.on_made(self)
        self._advance_handshake()

    def get_buffer(self, sizehint: int) -> memoryview:
        if self._way_in.limit is not None and self._writer.bulk:
            return self._shared.encrypted[: self._way_in.piece]
        return self._shared.encrypted

    def buffer_updated(self, nbytes: int) -> None:
        if self._way_in.limit is not None:
            self._way_in.charge(nbytes)
            self._hold_back()
        if self._phase in (Phase.ENDING, Phase.ENDED):
            return
        if self._fresh:
            self._fresh = False
            self._in_the_clear = self._shared.join is not None and self._shared.encrypted[0] == MAGIC[0]
        if self._in_the_clear:
            self._token_received(self._shared.encrypted[:nbytes])
            return
        self._engine.feed(self._shared.encrypted[:nbytes])
        if self._phase is Phase.OPEN:
            self._reader.fed += nbytes
            self._read_decrypted()
        else:
            self._advance_handshake()

    def eof_received(self) -> bool:
        if self._phase is not Phase.ENDING:
            self._end_now(self._unexpected_end("ended without a goodbye"))
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        self._end_now(self._unexpected_end(f"broke: {exc}" if exc else "broke"))
        if self._linger is not None:
            self._linger.cancel()
        self._shared.live.discard(self)
        self._ended.set_result(None)

    def pause_writing(self) -> None:
        self._writer.pause()

    def resume_writing(self) -> None:
        self._writer.resume()

    # ---- the handshake

    def _token_received(self, data: memoryview) -> None:
        """Hands the socket over to the relay's protocol, which joins it with another one."""
        self._greetings += data
        try:
            message = take_message(self._greetings)
            if message is None or self._shared.join is None:
                return
            protocol = self._shared.join(expect(GreetingKind.JOIN, message, TOKEN_BYTES))
        except HandshakeError as error:
            if isinstance(error, Refused):
                self._socket.write(error.last_words)
            self._end_handshake(error)
            return
        self._phase = Phase.ENDED
        self._way_in.forget(self)
        self._shared.live.discard(self)
        self._shared.plain.add(self._socket)
        self._ended.set_result(None)
        self.ready.cancel()
        self._socket.set_protocol(protocol)
        protocol.connection_made(self._socket)

    def _advance_handshake(self) -> None:
        """Goes on with the bytes that are there. An error ends this connection and nothing else."""
        try:
            if self._phase is Phase.TLS:
                self._advance_tls()
            if self._phase is Phase.GREETING:
                self._advance_greeting()
        except HandshakeError as error:
            logger.debug("handshake with %s failed: %s", self.remote_address, error)
            self._end_handshake(error)

    def _advance_tls(self) -> None:
        try:
            complete = self._engine.handshake()
        except ssl.SSLError as error:
            raise tls_failure(error) from error
        finally:
            self._writer.flush()  # the alert as well, if it failed
        if not complete:
            return
        if self._engine.protocol != ALPN:
            raise Refused("no swarm TLS", "the other end is another program: it speaks TLS, but is no swarm peer")
        self._phase = Phase.GREETING
        self._greeting = self._make_greeting(self._engine)
        self._writer.write(next(self._greeting))

    def _advance_greeting(self) -> None:
        try:
            while self._phase is Phase.GREETING and (count := self._engine.read(self._shared.decrypted)):
                self._greetings += self._shared.decrypted[:count]
                while self._phase is Phase.GREETING and (message := take_message(self._greetings)) is not None:
                    self._writer.write(self._greeting.send(message))
        except StopIteration as stop:
            self._open(stop.value)
        except (EOFError, ssl.SSLError) as error:
            raise HandshakeError("the other end closed the connection during the handshake") from error

    def _open(self, greeted: Greeted) -> None:
        self.peer_id, self.purpose = greeted.peer_id, greeted.purpose
        self.observed_address = greeted.observed_address
        self._writer.write(greeted.last_words)
        self._reader.feed(self._greetings)  # frames may follow at once
        self._phase = Phase.OPEN
        self._writer.bulk = self.purpose is Purpose.BULK
        if self._way_in.limit is not None:
            self.follow_rates()
        self._steer()
        if not self.ready.done():
            self.ready.set_result(None)

    def _end_handshake(self, error: HandshakeError) -> None:
        if isinstance(error, Refused):
            self._shared.refusals[error.rule] += 1
            if self._phase is Phase.GREETING:
                self._writer.write(error.last_words)
        self._end_in_order(error, "")

    # ---- reading

    def _read_decrypted(self) -> None:
        """Delivers frames until the receiver pauses, the input ends, or the connection ends."""
        receiver = self._receiver
        if receiver is None or self._phase is not Phase.OPEN:
            return
        try:
            while self._phase is Phase.OPEN and self._steer():
                if self._reader.deliver_next(receiver):
                    self._shared.head_ends(self)
                elif not self._reader.read_record():
                    self._reader.await_enough()
                    break
            if self._phase is Phase.OPEN and (size := self._reader.large_header):
                self._shared.head_begins(self, size)
        except ProtocolViolation as error:
            self._shared.refusals[type(error).__name__] += 1
            self._end_in_order(error, error.reason)
        except ssl.SSLError as error:
            self._shared.refusals[ProtocolViolation.__name__] += 1
            self._writer.flush()  # the alert, which is all that can still be said
            self._end_now(ProtocolViolation(f"broken TLS record ({error.reason})"))
        except ConnectionLost as error:
            self._end_now(error)
        except EOFError:
            self._end_now(self._unexpected_end("ended without a goodbye"))
        except Exception as error:
            logger.exception("a receiver failed; its connection with %s is closed", self.peer_id.short)
            self._end_in_order(ConnectionLost(f"closed by us: {error!r}"), "internal error")

    def _steer(self) -> bool:
        """Resumes or pauses reading, and returns whether the receiver wants the next frame; one whose payload has begun
        is read to its end. While nothing is read, the system's buffer fills up, and the other end has to wait. Once the
        connection ends, everything is read, and thrown away."""
        receiver = self._receiver
        wanted = receiver is not None and (self._reader.in_payload or receiver.reading_wanted())
        if self._phase is not Phase.OPEN or (wanted and not self._held_back):
            self._socket.resume_reading()
        else:
            self._socket.pause_reading()
        return wanted

    def _hold_back(self) -> None:
        """If more has come on a bulk connection than the limit allows, nothing is read until its turn."""
        if self._writer.bulk and self._phase is Phase.OPEN and not self._way_in.is_open:
            self._held_back = True
            self._steer()
            self._way_in.when_open(self, self._its_turn)

    def _its_turn(self) -> None:
        self._held_back = False
        self._steer()

    def follow_rates(self) -> None:
        """The limits may have changed."""
        limit = self._way_in.limit
        if self._writer.bulk and self._phase is Phase.OPEN:
            self._reader.may_sleep = limit is None
            bound_window(self._socket.get_extra_info("socket"), None if limit is None else int(limit * _WINDOW))

    # ---- the end

    def _unexpected_end(self, how: str) -> NetworkError:
        if self._phase in (Phase.TLS, Phase.GREETING):
            return HandshakeError("the other end closed the connection during the handshake")
        where = ", in the middle of a frame" if self._reader.in_frame else ""
        return ConnectionLost(f"the connection {how}{where}")

    def _settle(self, error: Exception) -> None:
        """From now on the connection has failed, with this error, for everyone who uses it."""
        self._error = error
        self._way_in.forget(self)
        self._shared.head_ends(self)
        self._writer.fail(error)
        if not self.ready.done():
            self.ready.set_exception(error)
            self.ready.exception()  # read, so that asyncio does not report it when nobody waits for it
        elif self._receiver is not None:
            self._loop.call_soon(self._receiver.connection_lost, error)

    def _end_in_order(self, error: Exception, reason: str) -> None:
        """Writes the goodbye and leaves the socket a moment, so that the other end can read all of it."""
        if self._error is not None:
            return
        if self._writer.mid_frame:
            self._end_now(error)  # a goodbye would be taken for payload
            return
        if self._phase is Phase.OPEN:
            self._writer.write(goodbye_frame(reason))
        self._phase = Phase.ENDING
        self._steer()
        self._settle(error)
        self._engine.close_notify()
        self._writer.flush()
        try:
            self._socket.write_eof()
        except OSError:  # the other end was faster; there is nobody left to wait for
            self._socket.abort()
        self._linger = self._loop.call_later(_LINGER, self._socket.abort)

    def _end_now(self, error: Exception) -> None:
        if self._phase is Phase.ENDED:
            return
        self._phase = Phase.ENDED
        if self._error is None:
            self._settle(error)
        if self._writer.bulk:
            forget_unsent(self._socket.get_extra_info("socket"))
        self._socket.abort()

    def __repr__(self) -> str:
        return f"<TCPConnection {self.remote_address} {self._phase.name.lower()}>"
