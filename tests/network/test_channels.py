"""A peer that breaks the rules of a control or bulk connection loses that one, by name, and nobody else notices."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from swarmcli.errors import ConnectionLost, EndOfStream
from swarmcli.events import Event, PeerRefused
from swarmcli.network import Endpoint, Identity, NetworkLimits, PeerID, Purpose, Stream, wire
from swarmcli.network.budgets import BUDGETS, Budget, Budgets
from swarmcli.network.transports.base import Connection
from swarmcli.network.wire.messages import (
    AddressesChanged,
    BulkDenied,
    BulkOffer,
    BulkWanted,
    CallAnswer,
    CallFailure,
    Cancel,
    ControlHello,
    Finish,
    HandlerFailed,
    Open,
    Piece,
    Ping,
    Pong,
    Request,
)
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
    """A victim with an honest friend, and an attacker that is connected to it."""

    def __init__(self, network: MemoryNetwork, victim: Endpoint, friend: Endpoint, attacker: Attacker) -> None:
        self.network = network
        self.victim, self.friend, self.attacker = victim, friend, attacker
        self.refusals: list[PeerRefused] = []
        victim.events.subscribe(self._note)
        self.connection: Connection
        self.heard: Recorder

    def _note(self, event: Event) -> None:
        if isinstance(event, PeerRefused):
            self.refusals.append(event)

    async def dial(self, *, greet: bool = True) -> None:
        self.connection, self.heard = await self.attacker.dial(self.victim, Purpose.CONTROL, greet=greet)
        await asyncio.sleep(0.05)  # until the victim has taken it up

    async def send(self, *messages: Any) -> None:
        for message in messages:
            await self.connection.send(message if isinstance(message, bytes) else wire.encode(message))

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

    async def refused_for(self, rule: str) -> None:
        """The connection ends for this reason, the attacker is told, and the friend is served as ever."""
        async with asyncio.timeout(30):
            await self.heard.ended.wait()
        assert self.victim.statistics().violations == {rule: 1}
        assert [event.peer for event in self.refusals] == [self.attacker.peer_id.text]
        assert rule in str(self.heard.ends[0])
        await self.friend_is_served()
        assert not self.victim.is_connected(self.attacker.peer_id)

    async def friend_is_served(self) -> None:
        assert await self.friend.call(self.victim.peer_id, "double", Number(2), Number, timeout=5) == Number(4)

    async def others_go_on(self) -> None:
        """The attacker's own control connection too."""
        await self.friend_is_served()
        async with self.friend.stream(self.victim.peer_id, "collect", Number(0), timeout=5) as stream:
            await stream.send(Number(1), b"payload")
            await stream.finish()
            with pytest.raises(EndOfStream):
                await stream.receive(Number)
        assert self.victim.is_connected(self.attacker.peer_id)

    def answers(self) -> list[Any]:
        """What the victim said besides its greeting and its pings."""
        kinds: Any = CallAnswer | CallFailure | ControlHello | Ping | Pong | BulkDenied | Cancel | BulkWanted
        heard = [wire.decode(kinds, header) for header, _ in self.heard.frames]
        return [message for message in heard if not isinstance(message, ControlHello | Ping)]


@asynccontextmanager
async def scene(limits: NetworkLimits | None = None, *, greet: bool = True) -> AsyncIterator[Scene]:
    network = MemoryNetwork()
    async with endpoints(network, 2, limits=limits) as [victim, friend]:
        wide = NetworkLimits(max_message=8 << 20, max_payload=64 << 20)
        made = Scene(network, victim, friend, Attacker(network.transport(Identity.from_seed(66), limits=wide)))
        await made.friend_is_served()
        await made.dial(greet=greet)
        yield made
        await made.attacker.transport.close()


@pytest.mark.parametrize(
    ("message", "rule"),
    [
        (b"\x00\x01\x02 garbage", "unreadable message"),
        (b"\x91" * 50_000, "unreadable message"),
        (wire.encode({"type": "no such message"}), "unreadable message"),
        (wire.encode({"type": "call", "id": -1, "method": "double", "body": None}), "unreadable message"),
        (wire.encode({"type": "call", "id": 0, "method": "m" * 129, "body": None}), "unreadable message"),
        (Finish(), "unreadable message"),  # belongs on bulk connections
        (Request(0, "double", {"n": "not a number"}), "unreadable message"),
        (CallAnswer(0, 0.0, 0.0, Number(1)), "answer to no call"),
        (Pong(99, 0.0, 0.0), "unexpected message"),
        (ControlHello(b"x" * 16), "unexpected message"),
    ],
)
@simulated
async def test_a_bad_message_ends_the_connection_with_the_rules_name(message: Any, rule: str) -> None:
    async with scene() as play:
        await play.send(message)
        await play.refused_for(rule)


@simulated
async def test_the_first_message_is_a_greeting() -> None:
    async with scene(greet=False) as play:
        await play.send(Ping(0))
        await play.refused_for("unexpected message")


@simulated
async def test_messages_and_payloads_that_are_too_large() -> None:
    async with scene(NetworkLimits(max_message=10_000)) as play:
        await play.send(Request(0, "double", bytes(10_001)))
        await play.refused_for("oversized message")
    async with scene() as play:
        await play.connection.send(wire.encode(Ping(0)), [b"payload"])
        await play.refused_for("payload on a control connection")


@pytest.mark.parametrize("second", [0, 2])
@simulated
async def test_calls_are_numbered_without_gaps(second: int) -> None:
    async with scene() as play:
        await play.send(Request(0, "double", Number(1)), Request(second, "double", Number(1)))
        await play.refused_for("call id out of turn")


@simulated
async def test_a_flood_of_calls_that_take_long_is_a_violation() -> None:
    async with scene(NetworkLimits(max_calls_per_peer=100)) as play:
        cancelled = 0

        async def forever(peer: PeerID, request: Number) -> Number:
            nonlocal cancelled
            try:
                return await asyncio.get_running_loop().create_future()
            finally:
                cancelled += 1

        play.victim.serve("forever", Number, forever)
        await play.send(*[Request(number, "forever", Number(0)) for number in range(100)])
        await asyncio.sleep(1)
        assert play.victim.statistics().calls_serving == 100 and not play.heard.ends
        await play.send(Request(100, "forever", Number(0)))
        await play.refused_for("too many unanswered calls")
        await asyncio.sleep(0.1)
        assert cancelled == 100 and play.victim.statistics().calls_serving == 0


@pytest.mark.parametrize(
    "flood",
    [
        lambda n: Request(n, "double", Number(0)),
        lambda n: Ping(n),
        lambda n: BulkWanted(n, ()),
    ],
)
@simulated
async def test_who_asks_and_never_reads_is_not_read_either(flood: Callable[[int], Any]) -> None:
    """The memory that a flood takes at the victim stays bounded, and in the end the attacker is taken for dead."""

    async with scene(NetworkLimits(max_calls_per_peer=50)) as play:
        play.heard.reading = False
        most = sent = 0

        async def pour() -> None:
            nonlocal sent
            while not play.heard.ends and sent < 5_000:
                await play.send(flood(sent))
                sent += 1

        pouring = asyncio.create_task(pour())
        for _ in range(100):
            await asyncio.sleep(0.01)
            most = max(most, len(play.victim.tasks))
        assert most < 300
        pouring.cancel()
        await asyncio.wait([pouring])
        await play.friend_is_served()


@simulated
async def test_who_asks_for_much_and_does_not_read_it_gets_refusals_instead() -> None:
    async def give(peer: PeerID, request: Number) -> bytes:
        return bytes(100_000)

    async with scene(NetworkLimits(budgets=Budgets(replies=Budget(*[1_000_000] * 4)))) as play:
        play.victim.serve("give", Number, give)
        play.heard.reading = False
        await play.send(*[Request(number, "give", Number(0)) for number in range(200)])
        await asyncio.sleep(0.5)
        play.heard.reading = True
        play.connection.read_on()
        await asyncio.sleep(0.5)
        given = [message for message in play.answers() if isinstance(message, CallAnswer)]
        refused = [message for message in play.answers() if isinstance(message, CallFailure)]
        assert len(given) + len(refused) == 200 and {message.why.code for message in refused} == {"busy"}
        assert 9 <= len(given) <= 14, "what the bound allows, and what was on the way"
        await play.send(Request(200, "give", Number(0)))
        await asyncio.sleep(0.5)
        assert isinstance(play.answers()[-1], CallAnswer)


@simulated
async def test_asking_to_be_dialed_too_often_is_denied() -> None:
    async with scene(NetworkLimits(max_streams_per_peer=5)) as play:
        await play.send(BulkWanted(20))
        await play.send(AddressesChanged((f"memory://{play.attacker.peer_id.short}",)))  # where it does not listen
        await play.send(*[BulkWanted(token) for token in range(20)])
        await asyncio.sleep(1)
        denied = [answer for answer in play.answers() if isinstance(answer, BulkDenied)]
        assert sorted(each.token for each in denied) == list(range(21))
        dialed = [peer for peer, _ in play.network.dials].count(play.victim.peer_id)
        assert dialed == 5, "as many at a time as a peer may ask for; the failed address then has a pause"
        await play.friend_is_served()


@simulated
async def test_who_dials_again_and_again_keeps_a_few_connections_and_the_newest_serves() -> None:
    async with scene() as play:
        for _ in range(50):
            await play.dial()
            assert play.victim.statistics().control_connections <= 9, "with the friend's"
        await play.send(Request(0, "double", Number(4)))
        await asyncio.sleep(0.1)
        assert any(isinstance(answer, CallAnswer) for answer in play.answers())
        await play.friend_is_served()


@simulated
async def test_who_ends_every_dial_that_it_asks_for_has_as_many_as_a_network_may_begin() -> None:
    rate, burst = BUDGETS.handshake_rate
    async with scene() as play:
        came = 0

        def end(connection: Connection) -> None:
            nonlocal came
            came += 1
            connection.abort("another one, please")

        await play.send(AddressesChanged(await play.attacker.transport.listen(end)))
        for token in range(2000):
            await play.send(BulkWanted(token))
            await asyncio.sleep(0.001)
        assert burst < came <= burst + 3 * rate, "in two seconds"
        await play.friend_is_served()


@simulated
async def test_lies_about_the_clock_only_look_bad() -> None:
    async with scene() as play:
        for sent, (received, replied) in enumerate([(float("nan"), 0.0), (0.0, float("inf")), (5.0, -5.0)]):
            call = asyncio.create_task(play.victim.call(play.attacker.peer_id, "ask", Number(0), Number, timeout=5))
            await asyncio.sleep(0.1)
            await play.send(CallAnswer(sent, received, replied, Number(1)))
            assert await call == Number(1)
        assert play.victim.clock.offset == pytest.approx(0, abs=1e-6)
        assert play.victim.round_trip(play.attacker.peer_id) is None


# Bulk connections


@asynccontextmanager
async def scene_of_streams() -> AsyncIterator[Scene]:
    """The attacker's control connection stays alive."""
    async with scene() as play:
        play.victim.serve_stream("collect", Number, collect)
        play.victim.serve_stream("ignore", Number, ignore)
        beating = asyncio.create_task(stay_alive(play.connection))
        yield play
        beating.cancel()
        await asyncio.wait([beating])


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
async def test_a_bad_message_ends_its_bulk_connection_with_the_rules_name(frames: list[Any], rule: str) -> None:
    async with scene_of_streams() as play:
        heard = await play.send_on_new(*frames)
        async with asyncio.timeout(1):
            await heard.ended.wait()
        await asyncio.sleep(0.1)
        assert play.victim.statistics().violations == {rule: 1}
        assert play.victim.statistics().streams_open == 0
        await play.others_go_on()


@simulated
async def test_an_offer_of_a_connection_that_nobody_wants_is_turned_down() -> None:
    async with scene_of_streams() as play:
        heard = await play.send_on_new(BulkOffer(12345))
        await heard.ended.wait()
        assert not play.victim.statistics().violations
        await play.others_go_on()


@simulated
async def test_hundreds_of_streams_are_refused_for_the_one_who_opens_them() -> None:
    async with scene_of_streams() as play:
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
    async with scene_of_streams() as play:
        idle = await play.send_on_new()
        lingering = await play.send_on_new(Open("no such stream", Number(0)))
        await asyncio.sleep(20)
        assert idle.ends and not lingering.ends
        await asyncio.sleep(200)
        assert lingering.ends and play.victim.statistics().bulk_connections == 0
        await play.others_go_on()
