"""Lies below all protocols: of connections, of memory, of time, and of words."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Any

from swarmcli.errors import CallRefused, SwarmError
from swarmcli.events import Event, PeerConnected
from swarmcli.network import Endpoint, PeerID, Purpose, wire
from swarmcli.network.transports.base import Connection
from swarmcli.network.wire.messages import AddressesChanged, ControlHello, Open, Piece, Ping
from tests.adversary.lies.base import Liar, lie

STEERING = "\x1b[2J\x1b]0;owned\x07\u202elive si llA\u2066"  # clears a terminal, names its window, turns its reading
_AT_ONCE = 64  # connections that one liar dials to one victim


class _Deaf:
    """A receiver that takes everything and says nothing."""

    def reading_wanted(self) -> bool:
        return True

    def payload_buffer(self, header: bytes, size: int) -> memoryview:
        return memoryview(bytearray(size))

    def frame_received(self, header: bytes, payload: memoryview) -> None:
        pass

    def connection_lost(self, error: Exception) -> None:
        pass


def _to_each(liar: Liar, attack: Callable[[Endpoint, PeerID], Awaitable[None]]) -> None:
    """Attacks every peer that is connected, once each; the endpoint owns the tasks and ends them."""
    endpoint, done = liar.endpoint, set[PeerID]()

    async def carry_out(peer: PeerID) -> None:
        with contextlib.suppress(SwarmError):
            await attack(endpoint, peer)

    def begin(peer: PeerID) -> None:
        if peer not in done:
            done.add(peer)
            liar.told.append(peer.text)
            endpoint._context.tasks.spawn(carry_out(peer))

    def heard(event: Event) -> None:
        if isinstance(event, PeerConnected):
            begin(PeerID.parse(event.peer))

    endpoint.events.subscribe(heard)
    for peer in endpoint.connected():
        begin(peer)


async def _dial(endpoint: Endpoint, peer: PeerID, purpose: Purpose) -> Connection:
    connection = await endpoint._context.dialer.dial_peer(peer, endpoint.addresses_of(peer), purpose)
    connection.start(_Deaf())
    return connection


@lie("payloads that lie unread", "network", at_most="the budget of payloads of one prefix, until somebody needs it")
def unread_payloads(liar: Liar) -> None:
    """Opens streams of a method that is there, and sends what nobody asks for."""

    async def attack(endpoint: Endpoint, peer: PeerID) -> None:
        payload = bytes(endpoint.limits.max_payload)
        method = next(iter(endpoint._context.stream_handlers), "rounds")
        for _ in range(_AT_ONCE):
            connection = await _dial(endpoint, peer, Purpose.BULK)
            await connection.send(wire.encode(Open(method, None)))
            endpoint._context.tasks.spawn(_quietly(connection.send(wire.encode(Piece(None)), [payload])))

    _to_each(liar, attack)


async def _quietly(sending: Any) -> None:
    with contextlib.suppress(SwarmError):
        await sending


@lie("control connections without end", "network", at_most="eight connections for an identity")
def many_control_connections(liar: Liar) -> None:
    async def attack(endpoint: Endpoint, peer: PeerID) -> None:
        for _ in range(_AT_ONCE):
            connection = await _dial(endpoint, peer, Purpose.CONTROL)
            await connection.send(wire.encode(ControlHello(liar.random.randbytes(16), endpoint.addresses)))

    _to_each(liar, attack)


@lie("connections that never greet", "network", at_most="eight connections for ten seconds")
def mute_connections(liar: Liar) -> None:
    async def attack(endpoint: Endpoint, peer: PeerID) -> None:
        for _ in range(_AT_ONCE):
            await _dial(endpoint, peer, Purpose.CONTROL)

    _to_each(liar, attack)


@lie("bulk connections that nobody uses", "network", at_most="160 connections for an identity, for six seconds")
def idle_bulk_connections(liar: Liar) -> None:
    async def attack(endpoint: Endpoint, peer: PeerID) -> None:
        for _ in range(4 * _AT_ONCE):
            await _dial(endpoint, peer, Purpose.BULK)

    _to_each(liar, attack)


@lie("a clock that is wrong by most of an hour", "network", at_most="one vote of its network about the time")
def wrong_clock(liar: Liar) -> None:
    clock = liar.endpoint.clock
    honest, wrong = clock.raw, liar.random.choice((-3000.0, 3000.0))
    clock.raw = lambda: honest() + wrong  # type: ignore[method-assign]
    liar.told.append(f"{wrong:+.0f} s")


@lie("a clock that is wrong by a day", "network", at_most="nothing: it is ignored")
def broken_clock(liar: Liar) -> None:
    clock = liar.endpoint.clock
    honest = clock.raw
    clock.raw = lambda: honest() + 80_000.0  # type: ignore[method-assign]
    liar.told.append("+80000 s")


@lie("words that steer terminals", "network", at_most="its words in one harmless line")
def steering_words(liar: Liar) -> None:
    """Refuses every call with them, and says them as its goodbye."""

    async def refuse(*_: Any) -> None:
        liar.told.append("refused")
        raise CallRefused(STEERING, STEERING)

    for handler in liar.endpoint._context.call_handlers.values():
        object.__setattr__(handler, "answer", refuse)
    control = liar.endpoint._control
    farewell = control.farewell
    control.farewell = lambda reason: farewell(STEERING)  # type: ignore[method-assign]


@lie("pings without end", "network", at_most="one answer at a time: a pong that is not sent yet answers all")
def ping_flood(liar: Liar) -> None:
    async def attack(endpoint: Endpoint, peer: PeerID) -> None:
        while (channel := endpoint._peers.current(peer)) is not None:
            for _ in range(100):  # not its own numbers: what comes back must not look like an answer to none
                await channel.connection.send(wire.encode(Ping(1 << 61)))
            await asyncio.sleep(0.01)

    _to_each(liar, attack)


@lie("addresses of other people's hosts", "network", at_most="the budget of dials that fail; no host name is dialed")
def invented_addresses(liar: Liar) -> None:
    async def attack(endpoint: Endpoint, peer: PeerID) -> None:
        channel = endpoint._peers.current(peer)
        for number in range(100):
            hosts = [f"tcp://203.0.113.{liar.random.randrange(1, 255)}:{1024 + number}" for _ in range(60)]
            if channel is not None:
                channel.post(AddressesChanged((*hosts, "tcp://localhost:22", "tcp://router.lan:80")))
            await asyncio.sleep(0.1)

    _to_each(liar, attack)
