"""The TCP transport beyond the contract of all transports: sockets, names, ports, and what is left behind."""

from __future__ import annotations

import asyncio
import errno
import socket
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from swarmcli.errors import (
    ConnectError,
    ConnectionLost,
    HandshakeError,
    ListenError,
)
from swarmcli.network.limits import NetworkLimits
from swarmcli.network.transports.base import Connection, Purpose
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
        far.pause_reading()
        send = asyncio.ensure_future(near.send(b"", [bytes(16 << 20)]))
        await until(lambda: near.bytes_sent >= 1 << 20)
        send.cancel()
        await asyncio.wait([send])
        assert send.cancelled()
        assert "cancelled in the middle of a frame" in str(await near_recorder.lost())
        far.resume_reading()
        assert "in the middle of a frame" in str(await recorder.lost())
        with pytest.raises(ConnectionLost):
            await near.send(b"more")


@in_real_time
async def test_the_system_forgets_what_an_aborted_bulk_connection_has_not_sent() -> None:
    """Else it would go on to fill the link with it: the other end hears of a reset, and not of the end of all data."""
    async with peer() as listener, dialing() as transport:
        near = await transport.dial(f"{listener.address}/{LISTENER.peer_id}", None, Purpose.BULK, WAIT)
        near.start(Recorder())
        far, recorder = await listener.next()
        far.pause_reading()
        waiting = asyncio.ensure_future(near.send(b"", [bytes(8 << 20)]))
        await until(lambda: near.bytes_sent >= 1 << 20)
        near.abort("no more")
        await asyncio.wait([waiting])
        assert isinstance(waiting.exception(), ConnectionLost)
        await near.close()  # the socket is closed
        far.resume_reading()
        assert "the other end broke off" in str(await recorder.lost())


@asynccontextmanager
async def pair_with_a_reset() -> AsyncIterator[tuple[Connection, Recorder]]:
    """One end of a connection whose other end has sent a reset that this end has not noticed: it does not read."""
    async with pair() as (near, near_recorder, far, _):
        near.pause_reading()
        found = as_tcp(far)._socket.get_extra_info("socket")
        found.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        far.abort("reset")
        await far.close()
        yield near, near_recorder


@pytest.mark.parametrize("size", [10, 100_000, 3 << 20])
def test_a_reset_stops_a_sender_in_a_hurry_at_once_and_by_name(size: int, caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        async with pair_with_a_reset() as (near, near_recorder):
            sent = 0
            with pytest.raises(ConnectionLost, match="the other end broke off"):
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
        async with peer(limits=NetworkLimits(accept_retry=0.0)) as listener:
            await still_works(listener)

    asyncio.run(main())
    assert "Too many open files" in caplog.text


# ---- dialing


async def fails(address: str, timeout: float = WAIT) -> ConnectError:
    async with dialing() as transport:
        with pytest.raises(ConnectError) as caught:
            await transport.dial(address, None, Purpose.CONTROL, timeout)
    assert address in str(caught.value) and caught.value.address == address
    return caught.value


def test_a_name_that_does_not_exist_fails_at_name_resolution(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(*args: object, **options: object) -> object:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    error = asyncio.run(fails("tcp://nowhere.example:80"))
    assert error.step == "name resolution" and "Name or service not known" in str(error)


def test_a_port_where_nothing_listens_fails_at_connect() -> None:
    with socket.socket() as taken:  # so that no other test listens there
        taken.bind(("127.0.0.1", 0))
        error = asyncio.run(fails(f"tcp://127.0.0.1:{taken.getsockname()[1]}"))
    assert error.step == "connect" and "nothing listens there" in str(error)


def test_a_host_that_does_not_answer_fails_at_connect(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> ConnectError:
        loop = asyncio.get_running_loop()

        async def never(*args: object, **options: object) -> object:
            return await loop.create_future()

        monkeypatch.setattr(loop, "create_connection", never)
        return await fails("tcp://127.0.0.1:80", timeout=0.01)

    error = asyncio.run(main())
    assert error.step == "connect" and "no answer within 0.01 s" in str(error)


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
async def test_an_address_that_leads_nowhere_is_told_of_in_the_systems_words(monkeypatch: pytest.MonkeyPatch) -> None:
    async def fails(*_: object, **__: object) -> None:
        raise OSError(errno.EHOSTUNREACH, "Connect call failed ('192.0.2.77', 31330)")

    async with dialing() as transport:
        monkeypatch.setattr(asyncio.get_running_loop(), "create_connection", fails)
        with pytest.raises(ConnectError, match=r"^tcp://192\.0\.2\.77:31330: connect failed: [^()]+$"):
            await transport.dial("tcp://192.0.2.77:31330", None, Purpose.CONTROL, WAIT)


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
