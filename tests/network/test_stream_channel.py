"""A peer that breaks the rules of a bulk connection loses that one, by name, and nothing else is disturbed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from swarmcli.errors import ConnectionLost, EndOfStream
from swarmcli.network import Endpoint, Identity, NetworkLimits, PeerID, Purpose, Stream, wire
from swarmcli.network.wire.messages import BulkOffer, Finish, HandlerFailed, Open, Piece, Ping
from swarmcli.testing import MemoryNetwork
from tests.simulation import simulated

from .worlds import Attacker, Number, Recorder, endpoints, stay_alive


async def collect(peer: PeerID, request: Number, stream: Stream) -> None:
    try:
        while True:
            await stream.receive(Number)
    except EndOfStream:
        pass


async def ignore(peer: PeerID, request: Number, stream: Stream) -> None:
    await asyncio.get_running_loop().create_future()


class Scene:
    def __init__(self, victim: Endpoint, friend: Endpoint, attacker: Attacker) -> None:
        self.victim, self.friend, self.attacker = victim, friend, attacker

    async def send_on_new(self, *frames: Any) -> Recorder:
        """Dials a bulk connection and sends; a pair is a message and its payload."""
        connection, heard = await self.attacker.dial(self.victim, Purpose.BULK)
        try:
            for frame in frames:
                message, payload = frame if isinstance(frame, tuple) else (frame, b"")
                await connection.send(message if isinstance(message, bytes) else wire.encode(message), [payload])
        except ConnectionLost:
            assert heard.ends or await heard.ended.wait()
        return heard

    async def others_go_on(self) -> None:
        """The attacker's own control connection too."""
        assert await self.friend.call(self.victim.peer_id, "double", Number(2), Number, timeout=5) == Number(4)
        async with self.friend.stream(self.victim.peer_id, "collect", Number(0), timeout=5) as stream:
            await stream.send(Number(1), b"payload")
            await stream.finish()
            with pytest.raises(EndOfStream):
                await stream.receive(Number)
        assert self.victim.is_connected(self.attacker.peer_id)


@asynccontextmanager
async def scene(limits: NetworkLimits | None = None) -> AsyncIterator[Scene]:
    network = MemoryNetwork()
    async with endpoints(network, 2, limits=limits) as [victim, friend]:
        victim.serve_stream("collect", Number, collect)
        victim.serve_stream("ignore", Number, ignore)
        wide = NetworkLimits(max_message=8 << 20, max_payload=64 << 20)
        attacker = Attacker(network.transport(Identity.from_seed(66), limits=wide))
        control, _ = await attacker.dial(victim, Purpose.CONTROL)
        beating = asyncio.create_task(stay_alive(control))
        yield Scene(victim, friend, attacker)
        beating.cancel()
        await asyncio.wait([beating])
        await attacker.transport.close()


OPEN = Open("collect", Number(0))


@pytest.mark.parametrize(
    ("frames", "rule"),
    [
        ([b"garbage"], "unreadable message"),
        ([Ping(0)], "unreadable message"),  # belongs on control connections
        ([Open("collect", "not a number")], "unreadable message"),
        ([Piece(Number(1))], "unexpected message"),
        ([Finish()], "unexpected message"),
        ([OPEN, HandlerFailed("refused")], "unexpected message"),
        ([OPEN, Finish(), (Piece(Number(1)), b"payload")], "unexpected message"),
        ([OPEN, (Finish(), b"payload")], "unexpected message"),
        ([OPEN, (Piece("not a number"), b"payload")], "unreadable message"),
        ([OPEN, (Piece(Number(1)), bytes(17 << 20))], "oversized payload"),
        ([OPEN, Piece(bytes(2 << 20))], "oversized message"),
    ],
)
@simulated
async def test_a_bad_message_ends_its_connection_with_the_rules_name(frames: list[Any], rule: str) -> None:
    async with scene() as play:
        heard = await play.send_on_new(*frames)
        async with asyncio.timeout(1):
            await heard.ended.wait()
        await asyncio.sleep(0.1)
        assert play.victim.statistics().violations == {rule: 1}
        assert play.victim.statistics().streams_open == 0
        await play.others_go_on()


@simulated
async def test_an_offer_of_a_connection_that_nobody_wants_is_turned_down() -> None:
    async with scene() as play:
        heard = await play.send_on_new(BulkOffer(12345))
        await heard.ended.wait()
        assert not play.victim.statistics().violations
        await play.others_go_on()


@simulated
async def test_hundreds_of_streams_are_refused_for_the_one_who_opens_them() -> None:
    async with scene() as play:
        open_ignored = Open("ignore", Number(0))
        ends = await asyncio.gather(*[play.send_on_new(open_ignored) for _ in range(300)])
        await asyncio.sleep(1)
        limit = play.victim.limits.budgets.bulk.identity
        assert play.victim.statistics().bulk_connections == limit
        assert play.victim.statistics().violations == {"too many bulk connections": 300 - limit}
        assert sum(not heard.ends for heard in ends) == limit
        await play.others_go_on()


@simulated
async def test_connections_that_are_opened_and_never_used_are_closed() -> None:
    async with scene() as play:
        idle = await play.send_on_new()
        lingering = await play.send_on_new(Open("no such stream", Number(0)))
        await asyncio.sleep(20)
        assert idle.ends and not lingering.ends
        await asyncio.sleep(200)
        assert lingering.ends and play.victim.statistics().bulk_connections == 0
        await play.others_go_on()
