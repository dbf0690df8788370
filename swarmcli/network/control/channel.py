"""One control connection: calls in both directions, pings, and messages between the two endpoints.

Calls made here are numbered and bounded; `serving.py` answers those of the other end. Every request gets exactly one
reply, even a cancelled one. So both ends count unanswered calls alike, and a reply that answers nothing is a violation.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

from swarmcli.clock import SAMPLE_LIFE
from swarmcli.errors import ConnectionLost, ProtocolViolation
from swarmcli.network.bounds import LONGEST_ROUND_TRIP, NetworkLimits
from swarmcli.network.context import EndpointContext
from swarmcli.network.control.serving import IncomingCalls
from swarmcli.network.prefix import Prefix
from swarmcli.network.transports.base import Connection
from swarmcli.network.wire.codec import decode_body, decode_header, encode, encode_body
from swarmcli.network.wire.messages import (
    BulkDenied,
    CallAnswer,
    CallFailure,
    Cancel,
    ControlHello,
    ControlMessage,
    Ping,
    Pong,
    Request,
    raised,
)

R = TypeVar("R")

Reaction: TypeAlias = Callable[["ControlChannel", Any], None]

_PING_BITS = 62  # of a ping's number, drawn for each: a peer that guesses it could answer before the ping arrives


class Liveness:
    """Says when the other end is pinged, and when it is taken for dead.

    Its clock is the keepalive's ticks: time in which this machine slept or was too busy does not count. After a while
    without a byte, this end pings; if no byte comes for the timeout after the ping, the other end is dead. Any bytes
    count, not only whole messages. An end that receives a long message pings now and then: the sender's own pings wait
    until that message is sent, and without a byte from here the sender would take this end for dead. Besides, each end
    pings at the start and once a minute, to measure the other's clock and the round trip.
    """

    def __init__(self, connection: Connection, limits: NetworkLimits) -> None:
        self.now = 0.0  # seconds of ticks
        self.last_heard = self.last_said = 0.0  # when bytes were last received, and last sent
        self.ping_sent_at = 0.0  # when the last ping was sent …
        self.answer_due_since: float | None = None  # … and the first one that has no answer yet
        self._connection, self._limits = connection, limits
        self._received, self._sent = connection.bytes_received, connection.bytes_sent

    def dead(self, elsewhere: int = 0) -> bool:
        """To be called once per tick, before the other methods. `elsewhere`: bytes received from this peer on other
        connections; when streams fill a slow line, pings wait until these have passed."""
        self.now += self._limits.keepalive_interval
        received, sent = self._connection.bytes_received + elsewhere, self._connection.bytes_sent
        if received != self._received:
            self._received, self.last_heard = received, self.now
        if sent != self._sent:
            self._sent, self.last_said = sent, self.now
        if self.answer_due_since is None:
            return False
        return self.now - max(self.last_heard, self.answer_due_since) >= self._limits.keepalive_timeout

    def ping_due(self, watched: bool) -> bool:
        patience = self._limits.keepalive_interval if watched else self._limits.keepalive_idle_interval
        if not self._connection.dialed:
            patience *= 1.5  # so that mostly the dialer pings first: one ping of the two ends is enough
        listening = self.last_heard - self.last_said >= self._limits.keepalive_timeout / 3
        measuring = self.now - self.ping_sent_at >= SAMPLE_LIFE
        return listening or measuring or self.now - max(self.last_heard, self.ping_sent_at) >= patience

    def pinged(self) -> None:
        self.ping_sent_at = self.now
        if self.answer_due_since is None:
            self.answer_due_since = self.now

    def answered(self) -> None:
        self.answer_due_since = None


@dataclass(slots=True)
class _Call:
    """One call of this end that waits for its reply."""

    future: asyncio.Future[Any]
    method: str
    response_type: type[Any]
    sent_raw: float  # on the raw clock, for NTP
    sent_at: float  # on the loop's clock, for the round trip


class ControlChannel:
    """The Receiver of a control connection, and the way to send on it."""

    def __init__(
        self,
        connection: Connection,
        context: EndpointContext,
        prefix: Prefix,
        reactions: Mapping[type, Reaction],
        lost: Callable[[ControlChannel, ConnectionLost], None],
    ) -> None:
        """`reactions` are to messages that concern more than this channel; `lost` is called once, at the end."""
        self.connection = connection
        self.peer_id = connection.peer_id
        self.prefix = prefix
        self.ending = False  # it has been given up, and will be lost in a moment
        self.boot_id: bytes | None = None  # of the other end, once it has greeted
        self.addresses: tuple[str, ...] = ()  # where the other end says that it can be dialed
        self.error: ConnectionLost | None = None
        self.round_trip: float | None = None  # smoothed, in seconds, less the time that the other end says it took
        self.ping_time: float | None = None  # smoothed, in seconds, with the time that the other end took
        self._context = context
        self._lost = lost
        self._loop = asyncio.get_running_loop()
        self.opened_at = self._loop.time()
        self.used_at = self.opened_at  # of the last call or reply in either direction
        self._slots = asyncio.Semaphore(context.limits.max_calls_per_peer)  # one for each call; its reply releases it
        self._calls: dict[int, _Call] = {}  # by number
        self._abandoned: set[int] = set()  # given up here; the other end has not acknowledged that yet
        self._next = 0  # number of a call
        self._serving = IncomingCalls(connection, context, prefix)
        # The ping that is repeated until it is answered: its number, and raw and loop time of its first sending.
        self._ping_sent: tuple[int, float, float] | None = None
        self._ping_answered = -1  # number of the last one; an answer to its repetition may still come
        self._pong_due = False
        self._liveness = Liveness(connection, context.limits)
        self._shared_reactions = reactions

    @property
    def calls_waiting(self) -> int:
        return len(self._calls)

    @property
    def calls_serving(self) -> int:
        return self._serving.count

    @property
    def unfinished(self) -> bool:
        """Whether a call in either direction is still under way."""
        return bool(self._calls or self._abandoned or self._serving.unfinished)

    async def call(self, method: str, request: Any, response_type: type[R]) -> R:
        """One unary call without a deadline. Cancelling it cancels the handler at the other end."""
        body = encode_body(request, self._context.limits.max_message)
        await self._slots.acquire()
        if self.error is not None:
            self._slots.release()  # wakes the next waiter, which finds the same error
            raise self.error.fresh()
        number, self._next = self._next, self._next + 1
        self.used_at = now = self._loop.time()
        call = _Call(self._loop.create_future(), method, response_type, self._context.clock.raw(), now)
        self._calls[number] = call
        self.post(Request(number, method, body))  # sent even if the call is given up before: no number may be left out
        try:
            return await call.future
        finally:
            if self._calls.pop(number, None) is not None:
                # Given up. The slot stays taken until the other end acknowledges it: that end counts the call too, and
                # one more would be a violation.
                self._abandoned.add(number)
                self.post(Cancel(number))

    def post(self, message: Any) -> None:
        """Sends a message without waiting, after those posted before. Drops it if the connection has ended."""
        if self.error is None:
            self._context.tasks.spawn(self._send_quietly(encode(message)))

    def reply(self, message: BulkDenied) -> None:
        """Posts an answer to the other end. A peer that does not read its answers is not read either."""
        if self.error is None:
            self._serving.reply(message)

    def tick(self, watched: bool, elsewhere: int = 0) -> None:
        """Called at each keepalive interval. `watched`: someone wants to know soon when the other end is gone;
        `elsewhere`: bytes received from this peer on bulk connections."""
        if self._liveness.dead(elsewhere):
            self.connection.abort(f"no sign of life for {self._context.limits.keepalive_timeout:g} s")
        elif self._liveness.ping_due(watched or self.calls_waiting > 0):
            self._ping()

    # Receiver

    def reading_wanted(self) -> bool:
        return self._serving.reading_wanted

    def payload_buffer(self, header: bytes, size: int) -> memoryview:
        raise ProtocolViolation("payload on a control connection")

    def frame_received(self, header: bytes, payload: memoryview) -> None:
        message = decode_header(ControlMessage, header)
        if isinstance(message, ControlHello) != (self.boot_id is None):
            raise ProtocolViolation("unexpected message: no greeting before it, or a second one")
        match message:
            case Request():
                self.used_at = self._loop.time()
                self._serving.request_received(message)
            case CallAnswer():
                self._answer_received(message)
            case CallFailure():
                call = self._replied(message.id)
                if call is not None and not call.future.done():
                    call.future.set_exception(raised(message.why, self.peer_id))
            case Cancel():
                self._serving.cancel_received(message)
            case Ping():
                if not self._pong_due:  # otherwise the last pong is not even sent yet, and will do for both pings
                    self._pong_due = True
                    self._context.tasks.spawn(self._send_pong(message.number, self._context.clock.raw()))
            case Pong():
                self._pong_received(message)
            case ControlHello():
                self.boot_id = message.boot_id
                self._shared_reactions[ControlHello](self, message)
                self._ping()
            case _:
                self._shared_reactions[type(message)](self, message)

    def connection_lost(self, error: Exception) -> None:
        lost = error if isinstance(error, ConnectionLost) else ConnectionLost(str(error) or type(error).__name__)
        self.error = lost
        calls, self._calls = self._calls, {}
        for call in calls.values():
            if not call.future.done():
                call.future.set_exception(lost.fresh())
        self._slots.release()  # those who wait for a slot find out one after the other
        self._serving.cancel_all()
        self._lost(self, lost)

    # Inside

    def _answer_received(self, answer: CallAnswer) -> None:
        call = self._replied(answer.id)
        if call is None:
            return
        self._measured(call.sent_raw, call.sent_at, answer.received, answer.replied)
        if call.future.done():
            return
        try:
            call.future.set_result(decode_body(call.response_type, answer.body, call.method))
        except ProtocolViolation as error:
            call.future.set_exception(error.fresh())
            raise

    def _replied(self, number: int) -> _Call | None:
        """The call that a reply belongs to; None if nobody waits for it any more. Raises ProtocolViolation."""
        call = self._calls.pop(number, None)
        if call is None:
            if number not in self._abandoned:
                raise ProtocolViolation(f"answer to no call: {number}")
            self._abandoned.remove(number)
        self.used_at = self._loop.time()
        self._slots.release()
        return call

    def _ping(self) -> None:
        if self._ping_sent is None:
            # The highest bit is always set, so that the message has the same length whatever is drawn.
            number = 1 << (_PING_BITS - 1) | secrets.randbits(_PING_BITS - 1)
            self._ping_sent = number, self._context.clock.raw(), self._loop.time()
        self._liveness.pinged()
        self.post(Ping(self._ping_sent[0]))

    async def _send_pong(self, number: int, received: float) -> None:
        try:
            await self._send_quietly(encode(Pong(number, received, self._context.clock.raw())))
        finally:
            self._pong_due = False

    def _pong_received(self, pong: Pong) -> None:
        if self._ping_sent is None or pong.number != self._ping_sent[0]:
            if pong.number != self._ping_answered:
                raise ProtocolViolation(f"unexpected message: a pong without a ping: {pong.number}")
            return
        (self._ping_answered, raw, at), self._ping_sent = self._ping_sent, None
        self._liveness.answered()
        self.ping_time = _smoothed(self.ping_time, self._loop.time() - at)
        self._measured(raw, at, pong.received, pong.replied)

    def _measured(self, sent_raw: float, sent_at: float, received: float, replied: float) -> None:
        clock = self._context.clock
        dialed = self.connection.dialed or bool(self._context.book.first_hand(self.peer_id))
        # Peers that come through one relay count as one voice: an attacker may have as many relays as keys.
        near = self.prefix.kind in ("host", "LAN")
        now, network = clock.raw(), self.prefix
        clock.observe(self.peer_id, sent_raw, received, replied, now, network=network, shared=near, dialed=dialed)
        elapsed = self._loop.time() - sent_at
        if 0 <= replied - received <= elapsed:  # what the handler took, as the other end says
            seconds = min(elapsed - (replied - received), LONGEST_ROUND_TRIP)
            self.round_trip = _smoothed(self.round_trip, seconds)

    async def _send_quietly(self, data: bytes) -> None:
        with contextlib.suppress(ConnectionLost):  # `connection_lost` tells everyone who should know
            await self.connection.send(data)


def _smoothed(known: float | None, seconds: float) -> float:
    """As TCP does it (RFC 6298)."""
    return seconds if known is None else known + (seconds - known) / 8
