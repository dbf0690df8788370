"""One control connection: calls in both directions, pings, and what the endpoints have to settle between them.

Every request gets exactly one reply, a cancelled one as well. So both ends count unanswered calls alike, and a
reply that answers nothing is a violation.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine
from typing import Any, ClassVar, Protocol, TypeVar

import msgspec

from swarmcli.clock import Clock
from swarmcli.errors import ConnectionLost, ProtocolViolation
from swarmcli.network import wire
from swarmcli.network.control.calls import OutgoingCalls, fresh
from swarmcli.network.control.liveness import Liveness
from swarmcli.network.control.serving import IncomingCalls
from swarmcli.network.identity import PeerID
from swarmcli.network.limits import Limits
from swarmcli.network.transports.base import Connection
from swarmcli.network.wire.handlers import FailureWords, Methods, decode_body, encode_body
from swarmcli.network.wire.messages import (
    BulkDenied,
    BulkWanted,
    Cancel,
    ControlMessage,
    Failure,
    Goodbye,
    Hello,
    IncomingAnswer,
    IncomingRequest,
    Ping,
    Pong,
    Request,
    Retire,
)

R = TypeVar("R")

_CONTROL: Any = ControlMessage  # to mypy a union is no type[T]


class ControlHost(Protocol):
    """What a channel needs of its endpoint. Callbacks run on the loop and may raise ProtocolViolation."""

    clock: Clock
    limits: Limits
    methods: Methods

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]: ...
    def greeted(self, channel: ControlChannel, hello: Hello) -> None: ...
    def retired(self, channel: ControlChannel) -> None: ...
    def idle(self, channel: ControlChannel) -> None: ...
    def bulk_wanted(self, channel: ControlChannel, wanted: BulkWanted) -> None: ...
    def bulk_denied(self, channel: ControlChannel, denied: BulkDenied) -> None: ...
    def round_trip_measured(self, peer: PeerID, seconds: float) -> None: ...
    def channel_lost(self, channel: ControlChannel, error: ConnectionLost) -> None: ...


class ChannelRetired(Exception):
    """A call came too late for this channel: another one is used by now."""


class ControlChannel:
    """The Receiver of a control connection, and the way to send on it."""

    def __init__(self, connection: Connection, host: ControlHost) -> None:
        self.connection = connection
        self.peer_id = connection.peer_id
        self.life: bytes | None = None  # of the other end, once it has greeted
        self.error: ConnectionLost | None = None
        self.retiring = False  # nothing more is begun on it from here
        self.retire_sent = False
        self.retire_received = False
        self._host = host
        self._loop = asyncio.get_running_loop()
        self.used_at = self._loop.time()  # of the last call in either direction
        self._calls = OutgoingCalls(host.limits.max_calls_per_peer)
        self._serving = IncomingCalls(connection, host, self._replied)
        self._pings: dict[int, tuple[float, float]] = {}  # under way: raw and loop time of their sending
        self._pong_due = False
        self._liveness = Liveness(connection, host.limits)
        self._goodbye: str | None = None

    @property
    def busy(self) -> bool:
        """Whether somebody here waits for the other end."""
        return bool(self._calls.waiting)

    @property
    def calls_waiting(self) -> int:
        return len(self._calls.waiting)

    @property
    def calls_serving(self) -> int:
        return self._serving.count

    @property
    def unfinished(self) -> bool:
        """Whether a call in either direction is still under way."""
        return bool(self._calls.waiting or self._calls.abandoned or self._serving.unfinished)

    async def call(self, method: str, request: Any, response_type: type[R]) -> R:
        """One unary call without a deadline. Cancelling it cancels the handler at the other end.

        Raises ChannelRetired if the call has not begun when the channel is given up for another one.
        """
        body = encode_body(request, self._host.limits)
        await self._calls.slot()
        if self.error is not None or self.retiring:
            self._calls.give_back()  # for the next in line, who will find the same
            raise ChannelRetired if self.retiring or self.error is None else fresh(self.error)
        number, call = self._calls.begin(method, response_type, self._host.clock.raw())
        self.used_at = call.sent_at
        try:
            await self.connection.send(wire.encode(Request(number, method, body)))
            return await call.future
        finally:
            if self._calls.abandon(number):
                self.post(Cancel(number))

    def post(self, message: Any) -> None:
        """Sends a message without waiting; one that can no longer be sent is dropped."""
        if self.error is None:
            self._host.spawn(self._send_quietly(wire.encode(message)))

    def reply(self, message: BulkDenied) -> None:
        """Posts what the other end has asked for, which it has to read before it may ask on without end."""
        if self.error is None:
            self._serving.reply(message)

    async def say(self, message: Any) -> None:
        """Sends a message. Raises ConnectionLost."""
        await self.connection.send(wire.encode(message))

    def tick(self, watched: bool, elsewhere: int = 0) -> None:
        """Called at each keepalive interval. `watched`: someone wants to know soon when the other end is gone;
        `elsewhere`: bytes that have come from there on bulk connections."""
        if self._liveness.dead(elsewhere):
            self.connection.abort(f"no sign of life for {self._host.limits.keepalive_timeout:g} s")
        elif (number := self._liveness.ping_due(watched)) is not None:
            self._ping(number)

    def _ping(self, number: int) -> None:
        self._pings.setdefault(number, (self._host.clock.raw(), self._loop.time()))
        self.post(Ping(number))

    # Receiver

    def payload_buffer(self, header: bytes, size: int) -> memoryview:
        raise ProtocolViolation("payload on a control connection")

    def frame_received(self, header: bytes, payload: memoryview) -> None:
        if len(header) > self._host.limits.max_message:
            raise ProtocolViolation(f"oversized message: {len(header)} bytes, at most {self._host.limits.max_message}")
        try:
            message: Any = wire.decode(_CONTROL, header)
        except msgspec.DecodeError as error:
            raise ProtocolViolation(f"unreadable message: {error}") from None
        kind = type(message)
        if self.life is None and kind is not Hello:
            raise ProtocolViolation("unexpected message: no greeting before it")
        self._reactions[kind](self, message)
        if self.retire_sent:
            self._host.idle(self)

    def connection_lost(self, error: Exception) -> None:
        lost = error if isinstance(error, ConnectionLost) else ConnectionLost(str(error) or type(error).__name__)
        if self._goodbye is not None and not isinstance(lost, ProtocolViolation):
            lost = ConnectionLost(f"closed by peer: {self._goodbye}")
        self.error = lost
        self._calls.fail(lost)
        self._serving.cancel_all()
        self._host.channel_lost(self, lost)

    # Calls

    def _request_received(self, request: IncomingRequest) -> None:
        self.used_at = self._loop.time()
        self._serving.request_received(request)

    def _cancel_received(self, cancel: Cancel) -> None:
        self._serving.cancel_received(cancel)

    def _replied(self) -> None:
        if self.retire_sent and self.error is None:
            self._host.idle(self)

    def _answer_received(self, answer: IncomingAnswer) -> None:
        call = self._calls.replied(answer.id)
        if call is None:
            return
        self._measured(call.sent_raw, call.sent_at, answer.received, answer.replied)
        if call.future.done():
            return
        try:
            call.future.set_result(decode_body(call.response_type, answer.body, call.method))
        except ProtocolViolation as error:
            call.future.set_exception(fresh(error))
            raise

    def _failure_received(self, failure: Failure) -> None:
        call = self._calls.replied(failure.id)
        if call is not None and not call.future.done():
            words = FailureWords(failure.kind, failure.code, failure.text)
            call.future.set_exception(words.error(self.peer_id))

    # The rest

    def _hello_received(self, hello: Hello) -> None:
        if self.life is not None:
            raise ProtocolViolation("unexpected message: a second greeting")
        self.life = hello.life
        self._host.greeted(self, hello)
        self._ping(self._liveness.ping())

    def _ping_received(self, ping: Ping) -> None:
        if not self._pong_due:  # else the last answer is not even sent: one is enough for both
            self._pong_due = True
            self._host.spawn(self._send_pong(ping.number, self._host.clock.raw()))

    async def _send_pong(self, number: int, received: float) -> None:
        try:
            await self._send_quietly(wire.encode(Pong(number, received, self._host.clock.raw())))
        finally:
            self._pong_due = False

    def _pong_received(self, pong: Pong) -> None:
        if not self._liveness.answered(pong.number):
            raise ProtocolViolation(f"unexpected message: a pong without a ping: {pong.number}")
        if pong.number in self._pings:
            raw, at = self._pings[pong.number]
            self._pings = {number: times for number, times in self._pings.items() if number > pong.number}
            self._measured(raw, at, pong.received, pong.replied)

    def _measured(self, sent_raw: float, sent_at: float, received: float, replied: float) -> None:
        clock = self._host.clock
        clock.observe(self.peer_id, sent_raw, received, replied, clock.raw())
        elapsed = self._loop.time() - sent_at
        if 0 <= replied - received <= elapsed:  # what the handler took; a lie can only make us look slow
            self._host.round_trip_measured(self.peer_id, elapsed - (replied - received))

    def _bulk_wanted_received(self, wanted: BulkWanted) -> None:
        self._host.bulk_wanted(self, wanted)

    def _bulk_denied_received(self, denied: BulkDenied) -> None:
        self._host.bulk_denied(self, denied)

    def _retire_received(self, retire: Retire) -> None:
        self.retire_received = True
        self._host.retired(self)

    def _goodbye_received(self, goodbye: Goodbye) -> None:
        self._goodbye = goodbye.reason

    _reactions: ClassVar[dict[type[Any], Callable[[ControlChannel, Any], None]]] = {
        IncomingRequest: _request_received,
        IncomingAnswer: _answer_received,
        Failure: _failure_received,
        Cancel: _cancel_received,
        Hello: _hello_received,
        Ping: _ping_received,
        Pong: _pong_received,
        BulkWanted: _bulk_wanted_received,
        BulkDenied: _bulk_denied_received,
        Retire: _retire_received,
        Goodbye: _goodbye_received,
    }

    async def _send_quietly(self, data: bytes) -> None:
        with contextlib.suppress(ConnectionLost):  # `connection_lost` says it to everyone who should know
            await self.connection.send(data)
