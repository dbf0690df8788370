"""The calls that one end of a control connection makes: numbered, bounded, each with exactly one reply."""

from __future__ import annotations

import asyncio
from typing import Any

from swarmcli.errors import ConnectionLost, ProtocolViolation


class Call:
    """One call under way."""

    __slots__ = ("future", "method", "response_type", "sent_at", "sent_raw")

    def __init__(
        self, future: asyncio.Future[Any], method: str, response_type: type[Any], sent_raw: float, sent_at: float
    ) -> None:
        self.future = future
        self.method = method
        self.response_type = response_type
        self.sent_raw = sent_raw  # on the raw clock, for NTP
        self.sent_at = sent_at  # on the loop's clock, for the round trip


class OutgoingCalls:
    """At most `limit` unanswered ones; whoever comes then waits in `slot`."""

    def __init__(self, limit: int) -> None:
        self.waiting: dict[int, Call] = {}  # by number
        self.abandoned: dict[int, None] = {}  # given up here, to be acknowledged there
        self._next = 0
        self._slots = asyncio.Semaphore(limit)
        self._loop = asyncio.get_running_loop()

    async def slot(self) -> None:
        """Waits for a place. It is given back by the reply, or by `give_back`."""
        await self._slots.acquire()

    def give_back(self) -> None:
        self._slots.release()

    def begin(self, method: str, response_type: type[Any], sent_raw: float) -> tuple[int, Call]:
        """Numbers a call that has its place."""
        number, self._next = self._next, self._next + 1
        call = Call(self._loop.create_future(), method, response_type, sent_raw, self._loop.time())
        self.waiting[number] = call
        return number, call

    def abandon(self, number: int) -> bool:
        """Whether this call was still waiting; its reply will be taken without a word."""
        if self.waiting.pop(number, None) is None:
            return False
        self.abandoned[number] = None
        return True

    def replied(self, number: int) -> Call | None:
        """The call that a reply belongs to; None if nobody waits for it any more. Raises ProtocolViolation."""
        call = self.waiting.pop(number, None)
        if call is None:
            if number not in self.abandoned:
                raise ProtocolViolation(f"answer to no call: {number}")
            del self.abandoned[number]
        self._slots.release()
        return call

    def fail(self, error: ConnectionLost) -> None:
        """The connection is gone; those who wait for a place find that out one after the other."""
        calls, self.waiting = self.waiting, {}
        for call in calls.values():
            if not call.future.done():
                call.future.set_exception(fresh(error))
        self._slots.release()


def fresh(error: ConnectionLost) -> ConnectionLost:
    """Each waiter raises an instance of its own, or their tracebacks would grow into each other."""
    return type(error)(error.reason)
