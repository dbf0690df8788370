"""The calls that are answered at this end of a control connection: numbered, bounded, each with exactly one reply."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

from swarmcli.errors import ConnectionLost, ProtocolViolation
from swarmcli.network.context import EndpointContext, Handler
from swarmcli.network.ledger import Account
from swarmcli.network.prefix import Prefix
from swarmcli.network.transports.base import Connection
from swarmcli.network.wire.codec import decode_body, encode, encode_body
from swarmcli.network.wire.messages import BulkDenied, CallAnswer, CallFailure, Cancel, HandlerFailed, Request, failed

_A_CALL = 4 << 10  # bytes that a call takes until it is answered, beside its request
_UNANSWERED = "too many calls that wait for their answer, or too many bytes of them"
_UNREAD = "too many bytes of answers that were not read"


class IncomingCalls:
    """Answers the calls of the other end of one connection."""

    def __init__(self, connection: Connection, context: EndpointContext, prefix: Prefix) -> None:
        self._connection = connection
        self._peer = connection.peer_id
        self._context = context
        self._limits = context.limits
        self._tasks: dict[int, tuple[asyncio.Task[None], int]] = {}  # call number → handler, bytes that it takes
        free = context.limits.budgets.free_bytes
        self._requests = Account(context.ledgers.requests, self._peer, prefix, free)  # bytes of all these calls …
        self._replies = Account(context.ledgers.replies, self._peer, prefix, free)  # … and of unsent replies
        self._next = 0  # the number of the next call
        self._replying = 0  # replies that the connection has not taken yet

    @property
    def count(self) -> int:
        return len(self._tasks)

    @property
    def reading_wanted(self) -> bool:
        """Whether to read on: a peer that does not read the answers is not read either."""
        return self._replying <= self._limits.max_calls_per_peer

    @property
    def unfinished(self) -> bool:
        return bool(self._tasks or self._replying)

    def request_received(self, request: Request) -> None:
        """Starts the handler. Raises ProtocolViolation."""
        limits = self._limits
        if request.id != self._next:
            raise ProtocolViolation(f"call id out of turn: {request.id}, not {self._next}")
        if len(self._tasks) >= limits.max_calls_per_peer:
            raise ProtocolViolation(f"too many unanswered calls: more than {limits.max_calls_per_peer}")
        self._next += 1
        handler = self._context.call_handlers.get(request.method)
        size = _A_CALL + memoryview(request.body).nbytes
        if handler is None:
            self.reply(CallFailure(request.id, HandlerFailed("unknown method", "", request.method)))
        elif not self._requests.charge(size):
            self.reply(CallFailure(request.id, HandlerFailed("refused", "busy", _UNANSWERED)))
        else:
            body = decode_body(handler.request_type, request.body, request.method)  # if it fails, the connection ends
            work = self._serve(request.id, request.method, handler, body, self._context.clock.raw())
            self._tasks[request.id] = self._context.tasks.spawn(work), size

    def cancel_received(self, cancel: Cancel) -> None:
        task = self._take(cancel.id)
        if task is not None:  # otherwise the answer was sent before the cancellation came
            task.cancel()
            self.reply(CallFailure(cancel.id, HandlerFailed("cancelled")))

    def reply(self, message: CallFailure | BulkDenied) -> None:
        """Posts a reply that no handler waits to send."""
        self._context.tasks.spawn(self._send(self._begin_reply(message)))

    def cancel_all(self) -> None:
        """The connection is gone, and with it the peer that asked."""
        tasks, self._tasks = self._tasks, {}
        for task, _ in tasks.values():
            task.cancel()
        self._requests.close()
        self._replies.close()

    async def _serve(self, number: int, method: str, handler: Handler, request: Any, received: float) -> None:
        reply: CallAnswer | CallFailure
        try:
            body = encode_body(await handler.answer(self._peer, request), self._limits.max_message)
            reply = CallAnswer(number, received, self._context.clock.raw(), body)
        except asyncio.CancelledError:
            # If the caller had cancelled, the number would be taken out already. As it has not, it must get a reply.
            if self._take(number) is not None:
                self.reply(CallFailure(number, HandlerFailed("cancelled")))
            raise
        except Exception as error:
            reply = CallFailure(number, failed(error, method, self._peer))
        self._take(number)
        await self._send(self._begin_reply(reply))

    def _take(self, number: int) -> asyncio.Task[None] | None:
        task, size = self._tasks.pop(number, (None, 0))
        if task is not None:
            self._requests.give_back(size)
        return task

    def _begin_reply(self, reply: CallAnswer | CallFailure | BulkDenied) -> bytes:
        """Encodes a reply, and charges it. If the peer does not read its answers, its account fills up, and further
        answers become refusals."""
        data = encode(reply)
        if not self._replies.charge(len(data)):
            if isinstance(reply, CallAnswer):
                data = encode(CallFailure(reply.id, HandlerFailed("refused", "busy", _UNREAD)))
            self._replies.charge_anyway(len(data))
        self._replying += 1
        return data

    async def _send(self, data: bytes) -> None:
        try:
            with contextlib.suppress(ConnectionLost):  # then the channel learns it too, and ends everything
                await self._connection.send(data)
        finally:
            self._replying -= 1
            self._replies.give_back(len(data))
            # Exactly at the bound, and not below it: reading goes on once, when the last reply too many has gone.
            if self._replying == self._limits.max_calls_per_peer:
                self._connection.read_on()
