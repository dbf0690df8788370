"""What attackers and strangers do to a TCP listener or dialer: each ends by name on its one connection."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import tracemalloc
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest

from swarmcli.errors import ConnectionLost, HandshakeError, ProtocolViolation, WrongPeerError
from swarmcli.network.bounds import NetworkLimits
from swarmcli.network.budgets import Budget, Budgets
from swarmcli.network.identity import Identity
from swarmcli.network.transports.base import Purpose
from swarmcli.network.transports.tcp.handshake import PROTOCOL_VERSION, GreetingKind, listener_context
from tests.simulation import faults, in_real_time

from .tcp_helpers import (
    LISTENER,
    MALLORY,
    WAIT,
    RawPeer,
    Recorder,
    as_tcp,
    dialing,
    host_and_port,
    peer,
    raw_peer,
    still_works,
    until,
)

Serve = Callable[[RawPeer], Awaitable[None]]


@asynccontextmanager
async def raw_listener(serve: Serve, context: ssl.SSLContext | None = None) -> AsyncIterator[str]:
    """Another program that listens, with TLS or without; gives its address."""
    failures: list[Exception] = []

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await serve(RawPeer(reader, writer))
        except (ConnectionError, asyncio.IncompleteReadError, ssl.SSLError):
            pass  # the dialer has left, as it should
        except Exception as error:
            failures.append(error)
        finally:
            writer.close()

    async with await asyncio.start_server(handle, "127.0.0.1", 0, ssl=context) as server:
        host, port = server.sockets[0].getsockname()
        yield f"tcp://{host}:{port}"
    assert not failures


async def dial_fails(address: str, expected: Identity | None = None, timeout: float = WAIT) -> HandshakeError:
    async with dialing() as transport:
        with pytest.raises(HandshakeError) as caught:
            peer_id = None if expected is None else expected.peer_id
            await transport.dial(address, peer_id, Purpose.CONTROL, timeout)
    assert caught.value.step == "handshake" and caught.value.address == address and address in str(caught.value)
    return caught.value


# ---- who is there


@in_real_time
async def test_another_peer_than_the_wanted_one_is_refused() -> None:
    async with peer() as listener:
        error = await dial_fails(listener.address, expected=MALLORY)
        assert isinstance(error, WrongPeerError)
        assert LISTENER.peer_id.short in str(error) and MALLORY.peer_id.short in str(error)
        error = await dial_fails(f"{listener.address}/{MALLORY.peer_id}")
        assert isinstance(error, WrongPeerError)
        await still_works(listener)


@in_real_time
async def test_a_man_in_the_middle_gains_nothing_by_relaying_the_proof() -> None:
    relayed: list[int] = []

    async def relay(victim: RawPeer) -> None:
        async with raw_peer(listener.address) as upstream:
            for source, target in ((victim, upstream), (upstream, victim), (victim, upstream), (upstream, victim)):
                message = await source.hear()
                relayed.append(message.kind)
                target.say(message.kind, message.body)
            await victim.rest()

    async with peer() as listener, raw_listener(relay, listener_context(MALLORY)) as address:
        # A dialer that knows whom it wants sees the wrong certificate at once.
        assert isinstance(await dial_fails(address, expected=LISTENER), WrongPeerError)
        assert relayed == []
        # One that does not know signs for the man in the middle, and the real listener sees that.
        assert "refused by the other end" in str(await dial_fails(address))
        assert relayed == [GreetingKind.HELLO, GreetingKind.CHALLENGE, GreetingKind.PROOF, GreetingKind.REFUSAL]
        assert listener.transport.refusals == {"false proof": 1} and listener.incoming.empty()
        await still_works(listener)


@in_real_time
async def test_versions_that_differ_are_named_at_both_ends() -> None:
    async def answer(raw: RawPeer) -> None:
        await raw.hear()
        raw.say(9, b"whatever that version says", PROTOCOL_VERSION + 1)
        await raw.rest()

    async with peer() as listener:
        async with raw_peer(listener.address) as raw:
            raw.say(GreetingKind.HELLO, b"a hello of the future", PROTOCOL_VERSION + 1)
            refusal = await raw.hear()
            assert refusal.kind == GreetingKind.REFUSAL and refusal.version == PROTOCOL_VERSION
            assert b"speaks %d, the other %d" % (PROTOCOL_VERSION, PROTOCOL_VERSION + 1) in refusal.body
        assert listener.transport.refusals == {"another version": 1}
        await still_works(listener)
    async with raw_listener(answer, listener_context(MALLORY)) as address:
        versions = f"this end speaks {PROTOCOL_VERSION}, the other {PROTOCOL_VERSION + 1}"
        assert f"versions differ: {versions}; update" in str(await dial_fails(address))


# ---- other programs


@pytest.mark.parametrize(
    ("greeting", "protocols", "words"),
    [
        (b"SSH-2.0-OpenSSH_9.2\r\n", [], "another program: it does not speak TLS"),
        (b"", [], "no answer within 3 s; another program may be listening there"),
        (None, [], "closed the connection during the handshake"),
        (b"", ["h2", "http/1.1"], "another program: it speaks TLS, but is no swarm peer"),
    ],
)
@in_real_time
async def test_a_dialed_program_is_recognized(greeting: bytes | None, protocols: list[str], words: str) -> None:
    context = listener_context(MALLORY) if protocols else None
    if context is not None:
        context.set_alpn_protocols(protocols)

    async def serve(raw: RawPeer) -> None:
        if greeting is not None:
            raw.writer.write(greeting)
            await raw.rest()

    async with raw_listener(serve, context) as address:
        assert words in str(await dial_fails(address, timeout=3.0))  # in which a busy machine connects


@in_real_time
async def test_words_of_strangers_cannot_play_tricks_on_a_terminal() -> None:
    async def serve(raw: RawPeer) -> None:
        await raw.hear()
        raw.say(GreetingKind.REFUSAL, b"\x1b[2Jgo away\r\n\xff" + b"!" * 400)
        await raw.rest()

    async with raw_listener(serve, listener_context(MALLORY)) as address:
        words = str(await dial_fails(address))
        assert "go away" in words and words.isprintable() and len(words) < 400


@pytest.mark.parametrize("knock", [b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", b"\x16\x03\x01\xff\xff" + bytes(600)])
@in_real_time
async def test_programs_that_knock_without_tls_are_turned_away(knock: bytes) -> None:
    async with peer() as listener, raw_peer(listener.address, tls=False) as raw:
        raw.writer.write(knock)
        await raw.rest()
        assert listener.transport.refusals["no TLS"] + listener.transport.refusals["no swarm TLS"] == 1
        await still_works(listener)


# ---- strangers that cost time


@pytest.mark.parametrize("kind", [GreetingKind.REFUSAL, GreetingKind.NO_MEMBER])
@in_real_time
async def test_a_refusal_instead_of_a_token_ends_its_connection_and_nothing_else(kind: GreetingKind) -> None:
    wrong = faults()
    async with peer() as listener, raw_peer(listener.address, tls=False) as raw:
        listener.transport.on_join(lambda token: pytest.fail("no token was said"))
        raw.say(kind, b"no")
        await raw.rest()
        await still_works(listener)
    assert wrong == []


@pytest.mark.parametrize("tls", [True, False])
@in_real_time
async def test_a_handshake_that_does_not_go_on_is_ended(tls: bool) -> None:
    patient = NetworkLimits(handshake_timeout=3.0)  # in which a busy machine shakes hands
    async with peer(limits=patient) as listener, raw_peer(listener.address, tls=tls) as raw:
        raw.writer.write(b"SWRM" if tls else b"\x16\x03")  # the beginning of what is expected, and no more
        await raw.rest()
        assert listener.transport.refusals == {"handshake timeout": 1}
        await still_works(listener)


@in_real_time
async def test_a_thousand_silent_strangers_do_not_keep_others_out() -> None:
    async with peer(limits=NetworkLimits(budgets=Budgets(handshakes=Budget(*[16] * 4)), handshake_grace=0)) as listener:
        place = host_and_port(listener.address)
        strangers = [socket.socket() for _ in range(1000)]
        try:
            for stranger in strangers:
                stranger.setblocking(False)
                stranger.connect_ex(place)
            await still_works(listener)
            assert len(listener.transport._pending) <= 16
            assert listener.transport.refusals["too many handshakes"] >= 900
        finally:
            for stranger in strangers:
                stranger.close()


@in_real_time
async def test_handshakes_within_their_grace_are_not_dropped_for_others() -> None:
    async with (
        peer(limits=NetworkLimits(budgets=Budgets(handshakes=Budget(*[2] * 4)), handshake_grace=WAIT)) as listener,
        dialing() as transport,
        raw_peer(listener.address, tls=False),
        raw_peer(listener.address, tls=False) as second,
    ):
        await until(lambda: len(listener.transport._pending) == 2)
        dial = asyncio.ensure_future(transport.dial(listener.address, None, Purpose.CONTROL, WAIT))
        await until(lambda: bool(transport._shared.live))
        assert not dial.done() and not listener.transport.refusals
        second.leave()  # makes room
        (await dial).start(Recorder())


# ---- peers that broke bounds after an honest greeting


@pytest.mark.parametrize(
    ("announced", "rule"),
    [
        ((1001, 0), "oversized message: 1001 bytes, at most 1000"),
        ((10, 2001), "oversized payload: 2001 bytes, at most 2000"),
        ((0xFFFF_FFFF, 513), "oversized goodbye: 513 bytes, at most 512"),
    ],
)
@in_real_time
async def test_oversized_frames_end_their_connection_before_anything_is_allocated(
    announced: tuple[int, int], rule: str
) -> None:
    async with peer(limits=NetworkLimits(max_message=1000, max_payload=2000)) as listener:
        async with raw_peer(listener.address) as raw:
            await raw.greet()
            _, recorder = await listener.next()
            tracemalloc.start()
            raw.frame(b"0123456789", announced=announced)
            error = await recorder.lost()
            peak = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
            assert isinstance(error, ProtocolViolation) and rule in error.reason
            assert recorder.asked == [] and recorder.frames == [] and peak < 1 << 20
            assert rule.encode() in await raw.rest(), "the offender is told"
        assert listener.transport.refusals == {"ProtocolViolation": 1}
        await still_works(listener)


@in_real_time
async def test_tampering_on_the_way_is_noticed_at_both_ends() -> None:
    tamper = asyncio.Event()

    async def forward(raw: RawPeer) -> None:
        onward = await RawPeer.connect(listener.address, tls=False)

        async def pump(source: RawPeer, target: RawPeer, spoil: bool) -> None:
            while data := await source.reader.read(65536):
                if spoil and tamper.is_set():
                    data = data[:-1] + bytes([data[-1] ^ 1])
                target.writer.write(data)

        async with asyncio.TaskGroup() as group:
            group.create_task(pump(raw, onward, True))
            group.create_task(pump(onward, raw, False))
        onward.leave()

    async with peer() as listener, raw_listener(forward) as address, dialing() as transport:
        near = await transport.dial(address, LISTENER.peer_id, Purpose.CONTROL, WAIT)
        near_recorder = Recorder()
        near.start(near_recorder)
        _, recorder = await listener.next()
        await near.send(b"untouched")
        await recorder.until(1)
        tamper.set()
        await near.send(b"spoilt", [bytes(100)])
        error = await recorder.lost()
        assert isinstance(error, ProtocolViolation) and "broken TLS record" in error.reason
        assert isinstance(await near_recorder.lost(), ConnectionLost)
        assert len(recorder.frames) == 1
        await still_works(listener)


@in_real_time
async def test_a_half_closed_connection_is_lost_by_name() -> None:
    async with peer() as listener, raw_peer(listener.address) as raw:
        await raw.greet()
        connection, recorder = await listener.next()
        raw.frame(b"begun", announced=(1000, 0))
        await raw.writer.drain()
        # Only the sending side: the other end could still be written to, in vain.
        raw.writer.get_extra_info("socket").shutdown(socket.SHUT_WR)
        error = await recorder.lost()
        assert str(error) == "the connection ended without a goodbye, in the middle of a frame"
        with pytest.raises(ConnectionLost, match="without a goodbye"):
            await connection.send(b"to whom?")
        await still_works(listener)


@in_real_time
async def test_messages_whose_last_byte_never_comes_hold_no_more_than_their_budget() -> None:
    """The oldest of the network gives way to the newest, and honest messages, which are whole soon, get through."""
    MiB = 1 << 20
    limits = NetworkLimits(budgets=Budgets(heads=Budget(2 * MiB, 3 * MiB, 3 * MiB, 8 * MiB)))
    async with peer(limits=limits) as listener, contextlib.AsyncExitStack() as stack:
        shared = listener.transport._shared
        ends = []
        for number in range(6):
            raw = await stack.enter_async_context(raw_peer(listener.address))
            await raw.greet(Identity.from_seed(number // 3))
            raw.frame(b"x" * (MiB - 1), announced=(MiB, 0))
            ends.append((await listener.next())[0])
            await until(lambda: bool(shared.heads) and next(reversed(shared.heads)) is ends[-1])
            assert shared._heads.taken == sum(shared.heads.values()) <= 3 * MiB
        assert list(shared.heads) == [ends[2], ends[4], ends[5]] and [as_tcp(each).is_open for each in ends] == [
            False,
            False,
            True,
            False,
            True,
            True,
        ]
        async with dialing(limits=limits) as transport:
            honest = await transport.dial(listener.address, LISTENER.peer_id, Purpose.CONTROL, WAIT)
            honest.start(Recorder())
            end, recorder = await listener.next()
            for _ in range(3):
                await honest.send(b"y" * MiB)
            assert [len(header) for header, _ in await recorder.until(3)] == [MiB] * 3
            await until(lambda: end not in shared.heads)
        await until(lambda: shared._heads.taken == sum(shared.heads.values()) <= 2 * MiB)
    assert not shared.heads and not shared._heads.taken
