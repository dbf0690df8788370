"""One contract, held by every transport."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from functools import wraps
from typing import Any

import pytest

from swarmcli.errors import AddressError, ConnectError, ConnectionLost, EndOfStream, WrongPeerError
from swarmcli.network import Endpoint, Identity, NetworkLimits, PeerID, Purpose, Stream
from swarmcli.network.transports.base import Connection

from .worlds import MemoryWorld, Number, Recorder, TCPWorld, World, double

ASecond = 1.0


def on_each_transport(test: Callable[[World], Coroutine[Any, Any, None]]) -> Callable[[type[World]], None]:
    @pytest.mark.parametrize("kind", [MemoryWorld, TCPWorld], ids=lambda kind: kind.name)
    @wraps(test)
    def runner(kind: type[World]) -> None:
        world = kind()
        world.run(test(world))

    del runner.__wrapped__  # type: ignore[attr-defined]  # or pytest would look for a fixture named `world`
    return runner


class Pair:
    """A connection and both its ends."""

    def __init__(self, dialer: Connection, listener: Connection) -> None:
        self.dialer, self.listener = dialer, listener
        self.at_dialer, self.at_listener = Recorder(), Recorder()

    def start(self) -> None:
        self.dialer.start(self.at_dialer)
        self.listener.start(self.at_listener)


@asynccontextmanager
async def pair(
    world: World, purpose: Purpose = Purpose.BULK, limits: NetworkLimits | None = None
) -> AsyncIterator[Pair]:
    """`limits` are the listener's; the dialer has wide ones."""
    a, b = world.transport(1, NetworkLimits(max_message=1 << 22, max_payload=64 << 20)), world.transport(2, limits)
    accepted: asyncio.Queue[Connection] = asyncio.Queue()
    try:
        (address,) = (await b.listen(accepted.put_nowait))[:1]
        dialed = await a.dial(address, b.identity.peer_id, purpose, 10.0)
        yield Pair(dialed, await accepted.get())
    finally:
        await a.close()
        await b.close()


@on_each_transport
async def test_both_ends_know_each_other(world: World) -> None:
    async with pair(world, Purpose.CONTROL) as both:
        assert both.dialer.peer_id == Identity.from_seed(2).peer_id
        assert both.listener.peer_id == Identity.from_seed(1).peer_id
        assert both.dialer.dialed and not both.listener.dialed
        assert both.dialer.purpose is both.listener.purpose is Purpose.CONTROL
        assert both.dialer.remote_address and both.dialer.observed_address == both.listener.remote_address
        assert both.listener.observed_address is None and not both.dialer.relayed and not both.listener.relayed


@on_each_transport
async def test_frames_arrive_whole_and_in_order_both_ways(world: World) -> None:
    async with pair(world) as both:
        both.start()
        sizes = [0, 1, 1000, 16_384, 16_385, 65_536, 300_000, (1 << 20) + 1, 5_000_001]
        frames = [(b"h%d" % number, bytes([number]) * size) for number, size in enumerate(sizes)]
        for header, payload in frames:
            memory = bytearray(payload[7:])
            await both.dialer.send(header, [payload[:7], b"", memory])
            memory[:] = bytes(len(memory))  # it is free after `send`
            await both.listener.send(header, [payload[:100]])
        await both.at_listener.until(len(frames))
        await both.at_dialer.until(len(frames))
        assert both.at_listener.frames == frames
        assert both.at_dialer.frames == [(header, payload[:100]) for header, payload in frames]
        assert min(both.dialer.bytes_sent, both.listener.bytes_received) >= sum(sizes)


@on_each_transport
async def test_frames_of_concurrent_senders_do_not_interleave(world: World) -> None:
    async with pair(world) as both:
        both.start()
        async with asyncio.TaskGroup() as group:
            for number in range(8):
                group.create_task(both.dialer.send(b"%d" % number, [b"%d" % number * 400_000] * 5))
        await both.at_listener.until(8)
        assert sorted(both.at_listener.frames) == [(b"%d" % n, b"%d" % n * 2_000_000) for n in range(8)]


@on_each_transport
async def test_nothing_is_delivered_before_start_nor_while_paused(world: World) -> None:
    async with pair(world) as both:
        both.dialer.start(both.at_dialer)
        await both.dialer.send(b"early")
        await asyncio.sleep(0.1)
        assert both.at_listener.frames == []
        both.listener.start(both.at_listener)
        await both.at_listener.until(1)
        both.at_listener.reading = False
        await both.dialer.send(b"paused")
        await asyncio.sleep(0.1)
        assert len(both.at_listener.frames) == 1
        both.at_listener.reading = True
        both.listener.read_on()
        await both.at_listener.until(2)
        assert [header for header, _ in both.at_listener.frames] == [b"early", b"paused"]


@on_each_transport
async def test_a_receiver_may_pause_from_within_a_frame(world: World) -> None:
    async with pair(world) as both:

        class OneAtATime(Recorder):
            def frame_received(self, header: bytes, payload: memoryview) -> None:
                super().frame_received(header, payload)
                self.reading = False

        both.at_listener = OneAtATime()
        both.start()
        for number in range(5):
            await both.dialer.send(b"%d" % number, [b"x" * 1000])
        for count in range(1, 6):
            await both.at_listener.until(count)
            await asyncio.sleep(0.02)
            assert len(both.at_listener.frames) == count
            both.at_listener.reading = True
            both.listener.read_on()


@on_each_transport
async def test_who_does_not_read_stops_the_sender(world: World) -> None:
    async with pair(world) as both:
        both.dialer.start(both.at_dialer)  # the listener never starts

        async def flood() -> None:
            while True:
                await both.dialer.send(b"flood", [bytes(1 << 20)])

        with pytest.raises(TimeoutError):
            async with asyncio.timeout(ASecond):
                await flood()
        # What the two systems hold between them: the rest waits in the sender.
        assert both.dialer.bytes_sent < 24 << 20


@on_each_transport
async def test_a_sender_that_is_cancelled_before_its_turn_has_written_nothing(world: World) -> None:
    async with pair(world) as both:
        both.dialer.start(both.at_dialer)
        await _fill(both.dialer)
        sent = both.dialer.bytes_sent
        waiting = [asyncio.create_task(both.dialer.send(b"%d" % number)) for number in range(3)]
        await asyncio.sleep(0.1)
        waiting[1].cancel()
        await asyncio.wait(waiting[1:2])
        assert both.dialer.bytes_sent == sent
        both.listener.start(both.at_listener)
        await asyncio.wait(waiting)
        await both.at_listener.until(sent // (1 << 19) + 2)
        assert [header for header, _ in both.at_listener.frames if header != b"flood"] == [b"0", b"2"]


@on_each_transport
async def test_what_waits_to_be_read_is_known_at_the_sender(world: World) -> None:
    async with pair(world) as both:
        both.dialer.start(both.at_dialer)
        assert both.dialer.bytes_waiting == 0
        await _fill(both.dialer)
        assert both.dialer.bytes_waiting > 200_000
        assert both.dialer.bytes_waiting <= both.dialer.bytes_sent * 1.01  # with what encryption adds
        both.dialer.abort("enough")
        await asyncio.sleep(0.1)
        assert both.dialer.bytes_waiting >= 0  # a figure also when there is no socket any more


async def _fill(connection: Connection) -> None:
    """Sends until nothing more goes out, however long a busy machine takes."""

    async def flood() -> None:
        for _ in range(100):
            await connection.send(b"flood", [bytes(1 << 19)])

    flooding, sent = asyncio.create_task(flood()), -1
    while connection.bytes_sent > sent:
        sent = connection.bytes_sent
        await asyncio.sleep(ASecond / 2)
    flooding.cancel()
    await asyncio.wait([flooding])
    assert flooding.cancelled()


@on_each_transport
async def test_close_lets_what_was_sent_arrive_and_tells_the_reason(world: World) -> None:
    async with pair(world) as both:
        both.dialer.start(both.at_dialer)
        for _ in range(3):
            await both.dialer.send(b"last words", [bytes(30_000)])
        closing = asyncio.create_task(both.dialer.close("work is done"))
        await asyncio.sleep(0.1)
        both.listener.start(both.at_listener)  # what came before is not lost
        await closing
        await both.at_listener.ended.wait()
        await both.at_dialer.ended.wait()
        assert len(both.at_listener.frames) == 3
        assert [str(error) for error in both.at_listener.ends] == ["closed by peer: work is done"]
        assert [str(error) for error in both.at_dialer.ends] == ["closed by us: work is done"]
        await both.dialer.close("again")
        with pytest.raises(ConnectionLost):
            await both.dialer.send(b"too late")


@on_each_transport
async def test_abort_ends_both_ends_at_once(world: World) -> None:
    async with pair(world) as both:
        both.start()
        both.listener.abort("enough")
        both.listener.abort("enough again")
        await both.at_listener.ended.wait()
        await both.at_dialer.ended.wait()
        assert [str(error) for error in both.at_listener.ends] == ["closed by us: enough"]
        assert len(both.at_dialer.ends) == 1 and isinstance(both.at_dialer.ends[0], ConnectionLost)


@on_each_transport
async def test_abort_frees_a_waiting_sender(world: World) -> None:
    async with pair(world) as both:
        both.dialer.start(both.at_dialer)
        async with asyncio.TaskGroup() as group:
            sender = group.create_task(_until_lost(both.dialer))
            await asyncio.sleep(0.2)
            assert not sender.done()
            both.dialer.abort("enough")


async def _until_lost(connection: Connection) -> None:
    with pytest.raises(ConnectionLost):
        while True:
            await connection.send(b"more", [bytes(1 << 20)])


@on_each_transport
async def test_dialing_says_how_far_it_came(world: World) -> None:
    a, b = world.transport(1), world.transport(2)
    try:
        (address,) = (await b.listen(lambda connection: None))[:1]
        with pytest.raises(ConnectError) as refused:
            await a.dial(world.nowhere(), None, Purpose.CONTROL, 5.0)
        assert refused.value.step == "connect" and refused.value.address == world.nowhere()
        with pytest.raises(WrongPeerError) as wrong:
            await a.dial(address, Identity.from_seed(3).peer_id, Purpose.CONTROL, 5.0)
        assert wrong.value.step == "handshake"
        with pytest.raises(AddressError):
            await a.dial("gopher://somewhere", None, Purpose.CONTROL, 5.0)
        stranger = await a.dial(address, None, Purpose.CONTROL, 5.0)
        assert stranger.peer_id == b.identity.peer_id
    finally:
        await a.close()
        await b.close()


@on_each_transport
async def test_closing_a_transport_ends_its_connections_and_its_listener(world: World) -> None:
    a, b = world.transport(1), world.transport(2)
    accepted: asyncio.Queue[Connection] = asyncio.Queue()
    (address,) = (await b.listen(accepted.put_nowait))[:1]
    connection = await a.dial(address, None, Purpose.CONTROL, 5.0)
    recorder = Recorder()
    connection.start(recorder)
    await b.close()
    await b.close()
    await recorder.ended.wait()
    with pytest.raises(ConnectError):
        await a.dial(address, None, Purpose.CONTROL, 5.0)
    await a.close()


# What every transport has to carry


async def _echo(peer: PeerID, request: Number, stream: Stream) -> None:
    try:
        while True:
            message, payload = await stream.receive(Number)
            await stream.send(message, payload)
    except EndOfStream:
        await stream.finish()


async def _stream_there_and_back(peer: Endpoint, other: PeerID) -> None:
    memory = bytearray(3 << 20)
    async with peer.stream(other, "echo", Number(0), timeout=10) as stream:
        await stream.send(Number(1), [b"x" * (1 << 20)] * 3)
        message, payload = await stream.receive(Number, lambda message, size: memoryview(memory)[:size])
        assert message == Number(1) and payload.obj is memory and memory == b"x" * (3 << 20)
        assert stream.bytes_sent == stream.bytes_received == 3 << 20
        await stream.finish()
        with pytest.raises(EndOfStream):
            await stream.receive(Number)


@on_each_transport
async def test_endpoints_call_and_stream_both_ways_even_where_one_cannot_be_dialed(world: World) -> None:
    listener, client = Endpoint(world.transport(1)), Endpoint(world.transport(2), client_mode=True)
    try:
        for peer in (listener, client):
            peer.serve("double", Number, double)
            peer.serve_stream("echo", Number, _echo)
            await peer.start()
        assert await client.connect(listener.addresses[0], timeout=10) == listener.peer_id
        for peer, other in ((client, listener), (listener, client), (client, listener)):
            assert await peer.call(other.peer_id, "double", Number(21), Number, timeout=10) == Number(42)
            await _stream_there_and_back(peer, other.peer_id)
    finally:
        await client.close()
        await listener.close()
