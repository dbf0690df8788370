"""The TCP transport beyond the contract of all transports: sockets, names, ports, and what is left behind."""

from __future__ import annotations

import asyncio
import errno
import socket
import struct
from typing import Any

import pytest

from swarmcli.errors import (
    ConnectError,
    ConnectionLost,
    HandshakeError,
    ListenError,
)
from swarmcli.network.transports.base import Purpose
from swarmcli.network.transports.tcp import TCPTransport
from swarmcli.network.transports.tcp import transport as tcp
from tests.simulation import in_real_time

from .tcp_helpers import (
    DIALER,
    LISTENER,
    WAIT,
    Recorder,
    as_tcp,
    dialing,
    host_and_port,
    open_descriptors,
    pair,
    peer,
    still_works,
    until,
)


@in_real_time
async def test_small_frames_are_not_held_back_at_either_end() -> None:
    async with pair() as (near, _, far, _):
        for end in (near, far):
            found = as_tcp(end)._socket.get_extra_info("socket")
            assert found.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


@in_real_time
async def test_a_send_cancelled_within_a_large_frame_ends_the_connection_by_name() -> None:
    async with pair() as (near, near_recorder, far, recorder):
        recorder.reading = False
        send = asyncio.ensure_future(near.send(b"", [bytes(16 << 20)]))
        await until(lambda: near.bytes_sent >= 1 << 20)
        send.cancel()
        await asyncio.wait([send])
        assert send.cancelled()
        assert "cancelled in the middle of a frame" in str(await near_recorder.lost())
        recorder.reading = True
        far.read_on()
        assert "in the middle of a frame" in str(await recorder.lost())
        with pytest.raises(ConnectionLost):
            await near.send(b"more")


@in_real_time
async def test_the_system_forgets_what_an_aborted_bulk_connection_has_not_sent() -> None:
    """Otherwise it would go on filling the line with it. The other end sees a reset, and not the end of the data."""
    async with peer() as listener, dialing() as transport:
        near = await transport.dial(f"{listener.address}/{LISTENER.peer_id}", None, Purpose.BULK, WAIT)
        near.start(Recorder())
        far, recorder = await listener.next()
        recorder.reading = False
        waiting = asyncio.ensure_future(near.send(b"", [bytes(8 << 20)]))
        await until(lambda: near.bytes_sent >= 1 << 20)
        near.abort("no more")
        await asyncio.wait([waiting])
        assert isinstance(waiting.exception(), ConnectionLost)
        await near.close()  # the socket is closed
        recorder.reading = True
        far.read_on()
        assert "the connection broke" in str(await recorder.lost())


@pytest.mark.parametrize("size", [10, 3 << 20])
def test_a_reset_stops_a_sender_in_a_hurry_at_once_and_by_name(size: int, caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        async with pair() as (near, near_recorder, far, _):
            as_tcp(near)._socket.pause_reading()  # so that it does not notice
            found = as_tcp(far)._socket.get_extra_info("socket")
            found.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            far.abort("reset")
            await far.close()
            sent = 0
            with pytest.raises(ConnectionLost, match="the connection broke"):
                while sent < 20:
                    await near.send(b"", [bytes(size)])
                    sent += 1
            assert sent < 2
            assert isinstance(await near_recorder.lost(), ConnectionLost)

    asyncio.run(main())
    assert [record for record in caplog.records if record.name == "asyncio"] == []


# ---- listening


@in_real_time
async def test_a_taken_port_is_named_with_the_fix() -> None:
    async with peer() as listener:
        host, port = host_and_port(listener.address)
        second = TCPTransport(DIALER, host=host, port=port)
        with pytest.raises(ListenError, match=f"cannot listen on {host}:{port}: another program .* choose another"):
            await second.listen(lambda connection: None)
        await second.close()


@pytest.mark.parametrize(
    ("error", "advice"),
    [
        (OSError(errno.EACCES, "Permission denied"), "superuser; choose a higher one"),
        (OSError(errno.EADDRNOTAVAIL, "Cannot assign"), "this machine has no address 127.0.0.1; use 0.0.0.0"),
        (OSError(errno.ENOBUFS, "No buffer space available"), "No buffer space available"),
    ],
)
def test_other_reasons_not_to_listen_are_named(error: OSError, advice: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object, **options: object) -> socket.socket:
        raise error

    monkeypatch.setattr(tcp.socket, "create_server", fail)
    with pytest.raises(ListenError, match=f"127.0.0.1:80: .*{advice}"):
        asyncio.run(TCPTransport(LISTENER, host="127.0.0.1", port=80).listen(lambda connection: None))


@pytest.mark.parametrize("host", ["", "0.0.0.0", "::", "::1", "localhost"])
@in_real_time
async def test_a_listener_can_be_dialed_under_what_it_announces(host: str) -> None:
    if ":" in host and not socket.has_ipv6:
        host = "127.0.0.1"
    async with peer(host=host) as listener:
        await still_works(listener)


def test_accepting_survives_a_system_without_file_descriptors(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        accept = tcp._accept_one
        failures = [OSError(errno.EMFILE, "Too many open files"), OSError(errno.ECONNABORTED, "gone again")]

        async def fail_at_first(listener: socket.socket) -> Any:
            if failures:
                raise failures.pop(0)
            return await accept(listener)

        monkeypatch.setattr(tcp, "_accept_one", fail_at_first)
        async with peer() as listener:
            await still_works(listener)

    asyncio.run(main())
    assert "Too many open files" in caplog.text


# ---- dialing


NO_SUCH_NAME = socket.gaierror(socket.EAI_NONAME, "Name or service not known")
NO_ROUTE = OSError(errno.EHOSTUNREACH, "Connect call failed ('192.0.2.7', 80)")


@pytest.mark.parametrize(
    ("address", "error", "step", "words"),
    [
        ("nowhere.example:80", NO_SUCH_NAME, "name resolution", "Name or service not known"),
        ("127.0.0.1:80", ConnectionRefusedError(), "connect", "nothing listens there"),
        ("127.0.0.1:80", None, "connect", "no answer within 0.01 s"),
        ("192.0.2.7:80", NO_ROUTE, "connect", "connect failed: [^()]+$"),
    ],
)
@in_real_time
async def test_why_a_dial_failed_is_told(
    address: str, error: Exception | None, step: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = asyncio.get_running_loop()

    def fail(*args: object, **options: object) -> asyncio.Future[None]:
        if error is not None:
            raise error
        return loop.create_future()

    if error is NO_SUCH_NAME:
        monkeypatch.setattr(socket, "getaddrinfo", fail)
    else:
        monkeypatch.setattr(loop, "create_connection", fail)
    async with dialing() as transport:
        with pytest.raises(ConnectError, match=f"^tcp://{address}: .*{words}") as caught:
            await transport.dial(f"tcp://{address}", None, Purpose.CONTROL, 0.01 if error is None else WAIT)
    assert caught.value.step == step and caught.value.address == f"tcp://{address}"


def test_closing_fails_dials_under_way_and_leaves_no_socket() -> None:
    descriptors = open_descriptors()

    async def main() -> None:
        with socket.create_server(("127.0.0.1", 0)) as silent:
            transport = TCPTransport(DIALER)
            dial = asyncio.ensure_future(
                transport.dial(f"tcp://127.0.0.1:{silent.getsockname()[1]}", None, Purpose.CONTROL, WAIT)
            )
            await until(lambda: bool(transport._shared.live))
            await transport.close()
            await transport.close()
            with pytest.raises(HandshakeError, match="shutting down"):
                await dial
            with pytest.raises(ConnectError):
                await transport.dial(f"tcp://127.0.0.1:{silent.getsockname()[1]}", None, Purpose.CONTROL, WAIT)

    asyncio.run(main())
    assert open_descriptors() <= descriptors


@in_real_time
async def test_bytes_within_this_computer_count_against_no_limit() -> None:
    """At five kilobytes per second these would take an hour and a half."""
    async with pair() as (near, _, far, _):
        assert near.on_this_computer and far.on_this_computer
    async with peer() as listener, dialing() as transport:
        for end in (listener.transport, transport):
            end.rates.change(5e3, 5e3)
        near = await transport.dial(listener.address, None, Purpose.BULK, WAIT)
        near.start(Recorder())
        _, recorder = await listener.next()
        await near.send(b"", [bytes(16 << 20)])
        await near.send(b"", [bytes(11 << 20)])
        assert [len(payload) for _, payload in await recorder.until(2)] == [16 << 20, 11 << 20]
        assert all(end.rates.upload.is_open and end.rates.download.is_open for end in (listener.transport, transport))
