"""The calls that one end of a control connection answers: bounded, cancellable, each with exactly one reply."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine
from typing import Any, Protocol

from swarmcli.clock import Clock
from swarmcli.errors import ConnectionLost, ProtocolViolation
from swarmcli.network import wire
from swarmcli.network.limits import Limits
from swarmcli.network.transports.base import Connection
from swarmcli.network.wire.handlers import FailureWords, Methods, UnaryMethod, decode_body, encode_body
from swarmcli.network.wire.messages import Answer, BulkDenied, Cancel, Failure, IncomingRequest


class ServingHost(Protocol):
    """What answering calls needs of the endpoint."""

    clock: Clock
    limits: Limits
    methods: Methods

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]: ...


class IncomingCalls:
    """`replied` is called whenever a reply has been handed over."""

    def __init__(self, connection: Connection, host: ServingHost, replied: Callable[[], None]) -> None:
        self._connection = connection
        self._peer = connection.peer_id
        self._host = host
        self._replied = replied
        self._tasks: dict[int, tuple[asyncio.Task[None], int]] = {}  # call number → handler, bytes of its request
        self._held = 0  # bytes of all these requests
        self._next = 0  # all numbers below have been used
        self._replying = 0  # replies that the connection has not taken yet …
        self._unsent = 0  # … and their bytes

    @property
    def count(self) -> int:
        return len(self._tasks)

    @property
    def unfinished(self) -> bool:
        return bool(self._tasks or self._replying)

    def request_received(self, request: IncomingRequest) -> None:
        """Starts the handler. Raises ProtocolViolation."""
        limits = self._host.limits
        if request.id < self._next:
            raise ProtocolViolation(f"call id used twice: {request.id}")
        if len(self._tasks) >= limits.max_calls_per_peer:
            raise ProtocolViolation(f"too many unanswered calls: more than {limits.max_calls_per_peer}")
        self._next = request.id + 1
        method = self._host.methods.unary.get(request.method)
        size = memoryview(request.body).nbytes
        if method is None:
            self.reply(_failure(request.id, FailureWords.unknown(request.method)))
        elif self._held and self._held + size > limits.max_requests_per_peer:
            self.reply(Failure(request.id, "refused", "busy", "too many bytes of unanswered requests"))
        else:
            body = decode_body(method.request_type, request.body, request.method)
            work = self._serve(request.id, request.method, method, body, self._host.clock.raw())
            self._tasks[request.id] = self._host.spawn(work), size
            self._held += size

    def cancel_received(self, cancel: Cancel) -> None:
        task = self._take(cancel.id)
        if task is not None:
            task.cancel()
        elif cancel.id >= self._next:
            self._next = cancel.id + 1  # the request itself was never sent
        else:
            return  # the answer has crossed the wish to cancel
        self.reply(Failure(cancel.id, "cancelled"))

    def reply(self, message: Failure | BulkDenied) -> None:
        """Posts a reply that no handler waits to send."""
        self._host.spawn(self._send(self._begin_reply(message)))

    def cancel_all(self) -> None:
        """The connection is gone, and with it whoever asked."""
        tasks, self._tasks = self._tasks, {}
        for task, _ in tasks.values():
            task.cancel()

    async def _serve(self, number: int, name: str, method: UnaryMethod, request: Any, received: float) -> None:
        reply: Answer | Failure
        try:
            body = encode_body(await method.handler(self._peer, request), self._host.limits)
            reply = Answer(number, received, self._host.clock.raw(), body)
        except asyncio.CancelledError:
            # Not by the caller's wish, which would have taken the number out: he must not wait for an answer.
            if self._take(number) is not None:
                self.reply(Failure(number, "cancelled"))
            raise
        except Exception as error:
            reply = _failure(number, FailureWords.of(error, name, self._peer))
        self._take(number)
        await self._send(self._begin_reply(reply))

    def _take(self, number: int) -> asyncio.Task[None] | None:
        task, size = self._tasks.pop(number, (None, 0))
        self._held -= size
        return task

    def _begin_reply(self, reply: Answer | Failure | BulkDenied) -> bytes:
        """What to send. Who asks and does not read the answers is not read either; large ones he does not even get."""
        limits, data = self._host.limits, wire.encode(reply)
        if isinstance(reply, Answer) and self._unsent and self._unsent + len(data) > limits.max_replies_per_peer:
            data = wire.encode(Failure(reply.id, "refused", "busy", "too many bytes of answers that were not read"))
        self._replying += 1
        self._unsent += len(data)
        if self._replying > limits.max_calls_per_peer:
            self._connection.pause_reading()
        return data

    async def _send(self, data: bytes) -> None:
        try:
            with contextlib.suppress(ConnectionLost):  # then the channel learns it too, and ends everything
                await self._connection.send(data)
        finally:
            self._replying -= 1
            self._unsent -= len(data)
            if self._replying == self._host.limits.max_calls_per_peer:
                self._connection.resume_reading()
            self._replied()


def _failure(number: int, words: FailureWords) -> Failure:
    return Failure(number, words.kind, words.code, words.text)
