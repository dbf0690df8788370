"""How fast bytes go between two peers: they are sent for a few seconds one way, then the other.

The receiver counts from its first piece on, so that neither the latency nor what waits in the sender's buffers counts.
Every peer answers, within a budget: its owner lends the bandwidth, and identities cost nothing, so the bound is on the
sum over all askers. An asker that finds it used up asks another peer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Annotated

import msgspec

from swarmcli.errors import CallRefused, EndOfStream
from swarmcli.network.endpoint import Endpoint
from swarmcli.network.identity import PeerID
from swarmcli.network.loop_thread import loop_time
from swarmcli.network.streams.stream import Stream
from swarmcli.network.token_bucket import TokenBucket

METHOD = "reach.rate"
PIECE_BYTES = 64 << 10
MEASURED_BYTES = 8 << 20  # at most, in one direction
WINDOW_BYTES = 4 << 20  # under way and not counted yet: enough for 320 Mbit/s at a round trip of 100 ms


# How long a rate is measured, and what a peer lends for it. Times in seconds.
_LONGEST = 3.0  # in one direction: 8 MiB take so long at 22 Mbit/s
_PATIENCE = 10.0  # after which either end gives up on one direction
HOURLY_BYTES = 256 << 20  # that a peer lends to all who ask, in both directions together
AT_ONCE_BYTES = 64 << 20  # … of which so much at once, after a quiet time


class RateRequest(msgspec.Struct, frozen=True):
    """`towards_asker`: the asked peer sends; otherwise it receives, and tells the rate."""

    towards_asker: bool


class RatePiece(msgspec.Struct, frozen=True):
    """Its payload means nothing."""


class RateResult(msgspec.Struct, frozen=True):
    rate: Annotated[float, msgspec.Meta(ge=0, le=1e15)]  # bytes per second; 0: too little came to tell


@dataclass(frozen=True, slots=True)
class Rates:
    """Bytes per second; None: too little came to tell."""

    down: float | None
    up: float | None


class RateService:
    """Serves measurements at this peer, one asker at a time: two would disturb each other."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        self._budget = TokenBucket(HOURLY_BYTES / 3600, AT_ONCE_BYTES)
        self._busy = False

    def start(self) -> None:
        self._endpoint.serve_stream(METHOD, RateRequest, self._serve)

    def close(self) -> None:
        self._endpoint.withdraw(METHOD)

    async def _serve(self, peer: PeerID, request: RateRequest, stream: Stream) -> None:
        if self._busy:
            raise CallRefused("busy", "another peer measures its link here at this moment")
        if not self._budget.take_now(MEASURED_BYTES, loop_time()):
            raise CallRefused("budget", "this peer has lent its link for measuring often enough this hour")
        self._busy = True
        unused = MEASURED_BYTES - PIECE_BYTES  # an empty request costs one piece

        def passed(count: int) -> None:
            nonlocal unused
            unused -= count

        try:
            async with asyncio.timeout(_PATIENCE):
                if request.towards_asker:
                    await _send(stream, _LONGEST, passed)
                else:
                    await stream.send(RateResult(await _count(stream, passed) or 0.0))
        except TimeoutError:
            raise CallRefused("slow", f"it took more than {_PATIENCE:g} s") from None
        finally:
            self._busy = False
            self._budget.give_back(max(0, unused))


async def measure(endpoint: Endpoint, peer: PeerID) -> Rates:
    """The rates between this peer and another one, which lends at most MEASURED_BYTES for each direction.

    Raises NetworkError; its kind CallRefused if the other end is busy or its budget is used up.
    """
    rates = dict[bool, float | None]()
    for towards_asker in (True, False):
        with suppress(TimeoutError):
            async with endpoint.stream(peer, METHOD, RateRequest(towards_asker), timeout=_PATIENCE) as stream:
                passed = partial(getattr, stream, "arriving" if towards_asker else "leaving")
                before, began = passed(), loop_time()
                try:
                    async with asyncio.timeout(_LONGEST + 1.0):
                        if towards_asker:
                            rates[True] = await _count(stream)
                        else:
                            await _send(stream, _LONGEST)
                            rates[False] = (await stream.receive(RateResult))[0].rate
                except TimeoutError:  # what this end has seen pass still counts
                    rates[towards_asker] = (passed() - before) / (loop_time() - began)
                    raise  # leaving by an exception resets the stream, so its waiting bytes do not delay the next one
    return Rates(rates[True] or None, rates[False] or None)


async def _send(stream: Stream, longest: float, passed: Callable[[int], None] = lambda count: None) -> None:
    loop = asyncio.get_running_loop()
    end = loop.time() + longest
    payload, before = bytes(PIECE_BYTES), stream.leaving
    for number in range(MEASURED_BYTES // PIECE_BYTES):
        # No more may wait than has got through: the system would take megabytes, for which a slow line needs minutes.
        while number * PIECE_BYTES > 2 * (stream.leaving - before) + PIECE_BYTES and loop.time() < end:  # noqa: ASYNC110
            await asyncio.sleep(0.002)
        passed(PIECE_BYTES)
        await stream.send(RatePiece(), payload)
        if loop.time() >= end:
            break
    await stream.finish()


async def _count(stream: Stream, passed: Callable[[int], None] = lambda count: None) -> float | None:
    """Counts until the other end has finished, or has sent all that it may. Returns bytes per second; None: too little
    came to tell."""
    stream.narrow(PIECE_BYTES, WINDOW_BYTES)
    loop = asyncio.get_running_loop()
    first = last = 0.0
    received = 0
    try:
        for number in range(MEASURED_BYTES // PIECE_BYTES + 1):  # one more, to hear of the end
            _, payload = await stream.receive(RatePiece)
            passed(len(payload))
            last = loop.time()
            if number == 0:
                first = last
            else:
                received += len(payload)
    except EndOfStream:
        pass
    return received / (last - first) if received and last > first else None
