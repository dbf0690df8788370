"""Streams: on connections of their own, dialed by whoever can, with back-pressure, ends, and resets."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import msgspec
import pytest

from swarmcli.errors import (
    CallRefused,
    ConnectionLost,
    EndOfStream,
    PeerUnreachable,
    ProtocolViolation,
    RemoteError,
    UnknownMethod,
)
from swarmcli.network import NetworkLimits, PeerID, Stream
from swarmcli.testing import MemoryNetwork
from tests.simulation import now, simulated

from .worlds import Number, endpoints, reaches, town

MiB = 1 << 20


async def echo(peer: PeerID, request: Number, stream: Stream) -> None:
    """Sends everything back until the other end has finished."""
    try:
        while True:
            await stream.send(*await stream.receive(Number))
    except EndOfStream:
        await stream.finish()


class Sink:
    """A handler that reads nothing until it is told to."""

    def __init__(self) -> None:
        self.go = asyncio.Event()
        self.stream: Stream | None = None
        self.outcome = "running"
        self.seen: list[int] = []

    async def __call__(self, peer: PeerID, request: Number, stream: Stream) -> None:
        self.stream = stream
        try:
            await self.go.wait()
            while True:
                self.seen.append((await stream.receive(Number))[0].n)
        except EndOfStream:
            self.outcome = "finished"
        except asyncio.CancelledError:
            self.outcome = "cancelled"
            raise


async def _expect_end(stream: Stream) -> None:
    with pytest.raises(EndOfStream):
        await stream.receive(Number)


@simulated
async def test_a_peer_that_cannot_dial_us_after_all_says_so() -> None:
    """Its router no longer forwards the port. What the dial met is not told."""

    async with town() as place:
        router = place.network.router("5.2.0.1")
        one = await place.peer(1, "192.168.1.2", behind=router, limits=NetworkLimits(max_streams_per_peer=1))
        client = await place.peer(2, "5.3.0.1", client_mode=True)
        outer = router.forward(4000, one.peer_id)
        await client.connect(outer, timeout=5)
        await asyncio.sleep(1)
        assert client.seen(one.peer_id).remote_address == outer and one.seen(client.peer_id).remote_address
        router.forget(4000)
        for _ in range(2):  # and the one that fails leaves its place to the next one
            with pytest.raises(PeerUnreachable, match=r"did not dial this peer$"):
                async with one.stream(client.peer_id, "echo", Number(0), timeout=30):
                    pass


@simulated
async def test_idle_connections_are_used_again_and_given_up_in_time() -> None:
    limits = NetworkLimits(max_idle_bulk_per_peer=2)
    async with endpoints(MemoryNetwork(), 2, limits=limits) as [a, b]:
        b.serve_stream("echo", Number, echo)

        async def once() -> None:
            async with a.stream(b.peer_id, "echo", Number(0), timeout=5) as stream:
                await stream.send(Number(1))
                await stream.receive(Number)

        for _ in range(5):
            await once()
            await asyncio.sleep(1)
            assert a.statistics().bulk_connections == 1 == a.statistics().idle_bulk_connections
        await asyncio.gather(*[once() for _ in range(6)])
        await asyncio.sleep(1)
        assert a.statistics().idle_bulk_connections == 2 == b.statistics().bulk_connections
        await asyncio.sleep(70)
        assert a.statistics().bulk_connections == b.statistics().bulk_connections == 0


@simulated
async def test_what_streams_move_is_known_by_what_they_are_for() -> None:
    """Even while one is open, and after its connection was used again. The rest is calls and keepalives."""
    async with endpoints(MemoryNetwork(), 2) as [a, b]:
        for method in ("first.echo", "second.echo"):
            b.serve_stream(method, Number, echo)

        async def move(method: str, nbytes: int, seconds: float) -> None:
            async with a.stream(b.peer_id, method, Number(0), timeout=5) as stream:
                await stream.send(Number(1), bytes(nbytes))
                await stream.receive(Number)
                await asyncio.sleep(seconds)

        await move("first.echo", 40_000, 0)
        await move("second.echo", 300_000, 0)
        await move("first.echo", 60_000, 20)
        for end in (a, b):
            moved, whole = end.moved, end.passed()
            for service, expected in (("first", 100_000), ("second", 300_000)):
                assert expected < moved[service].sent < expected + 1000, moved
                assert expected < moved[service].received < expected + 1000, moved
            assert sum(each.sent for each in moved.values()) <= whole.sent
            assert 0 < moved[""].sent < 2000 and 0 < moved[""].received < 2000


@simulated
async def test_a_payload_is_read_straight_into_the_receivers_memory() -> None:
    async with endpoints(MemoryNetwork(bandwidth=100e6), 2) as [a, b]:
        memory = bytearray(8 * MiB)
        placed: list[int] = []
        received = asyncio.Event()

        async def store(peer: PeerID, request: Number, stream: Stream) -> None:
            def into(message: Number, size: int) -> memoryview:
                placed.append(message.n)
                return memoryview(memory)[message.n * MiB : message.n * MiB + size]

            for n in range(8):
                message, payload = await stream.receive(Number, into)
                assert message.n == n and payload.obj is memory and placed == list(range(n + 1))
            received.set()

        b.serve_stream("store", Number, store)
        async with a.stream(b.peer_id, "store", Number(0), timeout=5) as stream:
            for n in range(8):
                await stream.send(Number(n), bytes([n]) * MiB)
            await received.wait()
        assert memory == b"".join(bytes([n]) * MiB for n in range(8))


@simulated
async def test_a_receiver_that_was_late_once_has_later_payloads_in_its_memory() -> None:
    """Each takes 10 ms to arrive and 100 ms to use: a payload that arrived meanwhile would find no reader's memory."""
    async with endpoints(MemoryNetwork(bandwidth=100e6), 2) as [a, b]:
        ahead: list[int] = []
        received = asyncio.Event()

        async def use(peer: PeerID, request: Number, stream: Stream) -> None:
            memory = memoryview(bytearray(MiB))
            for n in range(6):
                await asyncio.sleep(0.1)
                ahead.append(stream.bytes_received // MiB - n)
                await stream.receive(Number, lambda message, size: memory)
            received.set()

        b.serve_stream("use", Number, use)
        async with a.stream(b.peer_id, "use", Number(0), timeout=5) as stream:
            for n in range(6):
                await stream.send(Number(n), bytes([n]) * MiB)
            await received.wait()
        assert not any(ahead[3:]), ahead


@pytest.mark.parametrize("arrived", [False, True])
@simulated
async def test_giving_up_while_memory_is_lent_resets_the_stream(arrived: bool) -> None:
    """Nobody can take the memory back from a connection that writes into it."""
    async with endpoints(MemoryNetwork(bandwidth=1e6), 2) as [a, b]:

        async def give_up(peer: PeerID, request: Number, stream: Stream) -> None:
            reading = asyncio.create_task(stream.receive(Number, lambda message, size: memoryview(bytearray(size))))
            if arrived:
                receive = stream.piece_received
                stream.piece_received = lambda *piece: (receive(*piece), reading.cancel())  # type: ignore[method-assign]
            else:
                asyncio.get_running_loop().call_later(0.5, reading.cancel)
            await asyncio.wait([reading])
            await asyncio.get_running_loop().create_future()

        b.serve_stream("give up", Number, give_up)
        with pytest.raises(ConnectionLost):
            async with a.stream(b.peer_id, "give up", Number(0), timeout=5) as stream:
                await stream.send(Number(1), bytes(MiB))
                await asyncio.wait_for(stream.receive(Number), 10)


@pytest.mark.parametrize(
    ("error", "early"), [(ProtocolViolation("part twice: 3"), False), (KeyError("no such part"), True)]
)
@simulated
async def test_a_receiver_that_refuses_a_payload_resets_the_stream(error: Exception, early: bool) -> None:
    async with endpoints(MemoryNetwork(), 2) as [a, b]:
        seen: list[Exception] = []

        def refuse(message: Number, size: int) -> memoryview:
            raise error

        async def picky(peer: PeerID, request: Number, stream: Stream) -> None:
            await asyncio.sleep(1 if early else 0)
            try:
                await stream.receive(Number, refuse)
            except (KeyError, ProtocolViolation) as refusal:
                seen.append(refusal)
                raise

        b.serve_stream("picky", Number, picky)
        with pytest.raises(ConnectionLost):
            async with a.stream(b.peer_id, "picky", Number(0), timeout=5) as stream:
                await stream.send(Number(1), b"payload")
                await stream.receive(Number)
        assert [type(refusal) for refusal in seen] == [type(error)]
        assert a.is_connected(b.peer_id)


@simulated
async def test_a_slow_reader_slows_the_writer_and_memory_stays_bounded() -> None:
    async with endpoints(MemoryNetwork(), 2) as [a, b]:
        sink = Sink()
        b.serve_stream("sink", Number, sink)
        sent = 0

        async def flood(stream: Stream) -> None:
            nonlocal sent
            for n in range(100):
                await stream.send(Number(n), bytes(MiB))
                sent += 1
            await stream.finish()

        async with a.stream(b.peer_id, "sink", Number(0), timeout=5) as stream, asyncio.TaskGroup() as group:
            group.create_task(flood(stream))
            await asyncio.sleep(100)
            assert sent < 8 and sink.stream is not None and sink.stream._queued < 6 * MiB
            sink.go.set()
        await asyncio.sleep(1)
        assert sink.seen == list(range(100)) and sink.outcome == "finished"


@pytest.mark.parametrize(
    ("fail", "expected"),
    [
        (lambda: CallRefused("full", "come back later"), CallRefused),
        (lambda: LookupError("lost it"), RemoteError),
    ],
)
@simulated
async def test_a_failed_handler_shows_at_the_next_step(
    fail: Callable[[], Exception], expected: type[Exception]
) -> None:
    async with endpoints(MemoryNetwork(), 2) as [a, b]:

        async def failing(peer: PeerID, request: Number, stream: Stream) -> None:
            raise fail()

        b.serve_stream("failing", Number, failing)

        async def receiving(stream: Stream) -> None:
            await stream.receive(Number)

        async def sending(stream: Stream) -> None:
            while True:
                await stream.send(Number(1), bytes(MiB))

        async def leaving(stream: Stream) -> None:
            await asyncio.sleep(1)

        for step in (receiving, sending, leaving):
            with pytest.raises(expected, match=r"come back later|lost it"):
                async with a.stream(b.peer_id, "failing", Number(0), timeout=5) as stream:
                    await step(stream)
        with pytest.raises(UnknownMethod, match="nonsense"):
            async with a.stream(b.peer_id, "nonsense", Number(0), timeout=5) as stream:
                await stream.receive(Number)


@simulated
async def test_a_handler_that_returns_early_ends_the_stream_but_not_the_connection() -> None:
    async with endpoints(MemoryNetwork(), 2) as [a, b]:

        async def first_only(peer: PeerID, request: Number, stream: Stream) -> None:
            await stream.receive(Number)

        b.serve_stream("first only", Number, first_only)
        b.serve_stream("echo", Number, echo)
        async with a.stream(b.peer_id, "first only", Number(0), timeout=5) as stream:
            with pytest.raises(EndOfStream, match="has returned"):
                while True:
                    await stream.send(Number(1), bytes(100_000))
        await asyncio.sleep(1)
        assert a.statistics().idle_bulk_connections == 1
        async with a.stream(b.peer_id, "echo", Number(0), timeout=5) as stream:
            await stream.send(Number(7))
            assert (await stream.receive(Number))[0] == Number(7)
        assert a.statistics().bulk_connections == 1


@simulated
async def test_finishing_one_direction_leaves_the_other_open() -> None:
    async with endpoints(MemoryNetwork(), 2) as [a, b]:

        async def answer_at_the_end(peer: PeerID, request: Number, stream: Stream) -> None:
            total = 0
            try:
                while True:
                    total += (await stream.receive(Number))[0].n
            except EndOfStream:
                for n in range(3):
                    await asyncio.sleep(10)
                    await stream.send(Number(total + n))

        b.serve_stream("sum", Number, answer_at_the_end)
        async with a.stream(b.peer_id, "sum", Number(0), timeout=5) as stream:
            for n in range(10):
                await stream.send(Number(n))
            await stream.finish()
            with pytest.raises(RuntimeError, match="finished"):
                await stream.send(Number(1))
            assert [(await stream.receive(Number))[0].n for _ in range(3)] == [45, 46, 47]
            await _expect_end(stream)
            await _expect_end(stream)


@simulated
async def test_streams_beyond_the_limit_wait_for_a_place() -> None:
    async with endpoints(MemoryNetwork(), 2, limits=NetworkLimits(max_streams_per_peer=3)) as [a, b]:
        most = 0

        async def brief(peer: PeerID, request: Number, stream: Stream) -> None:
            nonlocal most
            most = max(most, b.statistics().streams_open)
            await asyncio.sleep(1)

        b.serve_stream("brief", Number, brief)

        async def use() -> None:
            async with a.stream(b.peer_id, "brief", Number(0), timeout=60) as stream:
                await _expect_end(stream)

        await asyncio.gather(*[use() for _ in range(10)])
        assert most == 3 and 4 <= now() < 5


@simulated
async def test_a_message_of_another_type_resets_the_stream_only() -> None:
    class Word(msgspec.Struct):
        text: str

    async with endpoints(MemoryNetwork(), 2) as [a, b]:
        b.serve_stream("echo", Number, echo)
        for pause in (0, 1):  # with a reader that waits, and with one that comes later
            with pytest.raises(ProtocolViolation, match="unreadable message: echo"):
                async with a.stream(b.peer_id, "echo", Number(0), timeout=5) as stream:
                    await stream.send(Number(1))
                    await asyncio.sleep(pause)
                    await stream.receive(Word)
        await asyncio.sleep(1)
        assert a.statistics().violations == {"unreadable message": 2}
        assert await reaches(a, b)


@simulated
async def test_a_broken_rule_is_counted_under_one_name_whatever_numbers_the_other_end_sends() -> None:
    async def give(peer: PeerID, request: Number, stream: Stream) -> None:
        await stream.send(request, b"x")

    def refuse(header: Number, size: int) -> memoryview:
        raise ProtocolViolation(f"chunk {header.n} has {size} bytes: none was asked for")

    async with endpoints(MemoryNetwork(), 2) as [a, b]:
        b.serve_stream("give", Number, give)
        for number in (7, 1 << 40):
            with pytest.raises(ProtocolViolation, match=f"chunk {number}"):
                async with a.stream(b.peer_id, "give", Number(number), timeout=5) as stream:
                    await stream.receive(Number, refuse)
        await asyncio.sleep(1)
        assert a.statistics().violations == {"chunk … has … bytes": 2}
