"""The TCP transport beyond the contract of all transports: sockets, names, ports, and what is left behind."""

from __future__ import annotations

import asyncio
import errno
import gc
import random
import socket
import struct
import warnings
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from swarmcli.errors import (
    AddressError,
    ConnectError,
    ConnectionLost,
    HandshakeError,
    ListenError,
    OwnAddressError,
    WrongPeerError,
)
from swarmcli.network.limits import NetworkLimits
from swarmcli.network.transports.base import Connection, Purpose
from swarmcli.network.transports.tcp import TCPTransport
from swarmcli.network.transports.tcp import transport as tcp

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


def test_both_ends_know_each_other_and_the_purpose() -> None:
    async def main() -> None:
        async with peer() as listener, dialing() as transport:
            near = await transport.dial(f"{listener.address}/{LISTENER.peer_id}", None, Purpose.BULK, WAIT)
            far, _ = await listener.next()
            assert (near.peer_id, near.purpose, near.dialed) == (LISTENER.peer_id, Purpose.BULK, True)
            assert (far.peer_id, far.purpose, far.dialed) == (DIALER.peer_id, Purpose.BULK, False)
            assert near.remote_address == listener.address

    asyncio.run(main())


def test_frames_of_every_size_arrive_in_order_and_whole() -> None:
    chance = random.Random(5)
    sizes = [0, 1, 7, 8, 1000, 16_000, 16_384, 16_385, 65_536, 300_000, 1 << 20, (1 << 20) + 1, 5_000_001]
    frames = [(chance.randbytes(size % 5000), chance.randbytes(size)) for size in sizes * 2]
    chance.shuffle(frames)

    async def main() -> None:
        async with pair() as (near, _, far, recorder):
            for header, payload in frames:
                cut = chance.randint(0, len(payload))
                await near.send(header, [payload[:cut], b"", memoryview(payload)[cut:]])
            assert await recorder.wait_for(len(frames)) == frames
            assert near.bytes_sent >= sum(map(len, [h + p for h, p in frames])) and far.bytes_received > 0

    asyncio.run(main())


def test_small_frames_are_not_held_back_at_either_end() -> None:
    async def main() -> None:
        async with pair() as (near, _, far, _):
            for end in (near, far):
                found = as_tcp(end)._socket.get_extra_info("socket")
                assert found.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)

    asyncio.run(main())


def test_concurrent_senders_do_not_interleave() -> None:
    async def main() -> None:
        async with pair() as (near, _, _, recorder):
            async with asyncio.TaskGroup() as group:
                for number in range(20):
                    size = 2_000_000 if number % 4 == 0 else 10
                    group.create_task(near.send(bytes([number]), [bytes([number]) * size]))
            frames = await recorder.wait_for(20)
            assert all(set(payload) == {header[0]} for header, payload in frames)

    asyncio.run(main())


def test_payload_pieces_may_be_arrays_of_any_kind_but_not_with_gaps() -> None:
    numbers = memoryview(bytes(range(16)))

    async def main() -> None:
        async with pair() as (near, _, _, recorder):
            await near.send(b"", [numbers.cast("I"), numbers.cast("B", (4, 4))])
            assert (await recorder.wait_for(1))[0][1] == bytes(range(16)) * 2
            with pytest.raises(TypeError):
                await near.send(b"", [numbers[::2]])
            await near.send(b"goes on")
            await recorder.wait_for(2)

    asyncio.run(main())


def test_what_the_other_end_would_not_take_is_not_sent() -> None:
    async def main() -> None:
        async with pair() as (near, _, _, recorder):
            with pytest.raises(ValueError, match="header of 1048577"):
                await near.send(bytes((1 << 20) + 1))
            with pytest.raises(ValueError, match="payload of 16777217"):
                await near.send(b"", [bytes(16 << 20), b"x"])
            await near.send(b"goes on")
            assert await recorder.wait_for(1) == [(b"goes on", b"")]

    asyncio.run(main())


def test_nothing_is_delivered_before_start_and_nothing_lost() -> None:
    async def main() -> None:
        accepted: asyncio.Queue[Connection] = asyncio.Queue()
        transport = TCPTransport(LISTENER, host="127.0.0.1")
        address = (await transport.listen(accepted.put_nowait))[0]
        async with dialing() as dialer:
            near = await dialer.dial(address, None, Purpose.CONTROL, WAIT)
            for number in range(3):
                await near.send(bytes([number]), [bytes(1000)])
            far = await accepted.get()
            closing = asyncio.ensure_future(near.close("said it all"))
            recorder = Recorder()
            far.start(recorder)
            assert [header[0] for header, _ in await recorder.wait_for(3)] == [0, 1, 2]
            assert str(await recorder.wait_lost()) == "closed by peer: said it all"
            await closing
        await transport.close()

    asyncio.run(main())


def test_a_pause_takes_effect_after_the_frame_in_progress() -> None:
    async def main() -> None:
        async with pair() as (near, _, far, recorder):
            deliver = recorder.frame_received

            def pause_after_each(header: bytes, payload: memoryview) -> None:
                deliver(header, payload)
                far.pause_reading()

            recorder.frame_received = pause_after_each  # type: ignore[method-assign]
            for number in range(4):
                await near.send(bytes([number]), [bytes(100)])  # all in the receiver's buffers at once
            for number in range(1, 5):
                await recorder.wait_for(number)
                for _ in range(5):
                    await asyncio.sleep(0)
                assert len(recorder.frames) == number
                far.resume_reading()

    asyncio.run(main())


def test_a_cancelled_small_send_leaves_the_connection_whole() -> None:
    async def main() -> None:
        async with pair() as (near, _, far, recorder):
            far.pause_reading()
            sends = [asyncio.ensure_future(near.send(bytes([n]), [bytes(1 << 19)])) for n in range(40)]
            await asyncio.wait(sends, return_when=asyncio.FIRST_COMPLETED)
            blocked = [task for task in sends if not task.done()]
            assert blocked, "the paused end slows its writer down"
            for task in blocked:
                task.cancel()
            await asyncio.wait(blocked)
            far.resume_reading()
            await near.send(b"after")
            while recorder.frames[-1:] != [(b"after", b"")]:
                await recorder.wait_for(len(recorder.frames) + 1)
            assert not recorder.lost.done()

    asyncio.run(main())


def test_a_send_cancelled_within_a_large_frame_ends_the_connection_by_name() -> None:
    async def main() -> None:
        async with pair() as (near, near_recorder, far, recorder):
            far.pause_reading()
            send = asyncio.ensure_future(near.send(b"", [bytes(16 << 20)]))
            await until(lambda: near.bytes_sent >= 1 << 20)
            send.cancel()
            await asyncio.wait([send])
            assert send.cancelled()
            assert "cancelled in the middle of a frame" in str(await near_recorder.wait_lost())
            far.resume_reading()
            assert "in the middle of a frame" in str(await recorder.wait_lost())
            with pytest.raises(ConnectionLost):
                await near.send(b"more")

    asyncio.run(main())


def test_an_orderly_end_delivers_everything_and_names_the_reason_at_both_ends() -> None:
    async def main() -> None:
        async with pair() as (near, near_recorder, far, recorder):
            for _ in range(4):
                await near.send(b"", [bytes(3 << 20)])
            await near.close("enough")
            await near.close("twice")
            assert len(recorder.frames) == 4
            assert str(await recorder.wait_lost()) == "closed by peer: enough"
            assert str(await near_recorder.wait_lost()) == "closed by us: enough"
            for end in (near, far):
                with pytest.raises(ConnectionLost, match="enough"):
                    await end.send(b"more")

    asyncio.run(main())


def test_what_still_waits_to_be_written_arrives_before_the_end() -> None:
    async def main() -> None:
        async with pair() as (near, _, far, recorder):
            far.pause_reading()
            sent = 0
            while not as_tcp(near)._socket.get_write_buffer_size():
                await near.send(b"", [bytes(1 << 16)])
                sent += 1
            closing = asyncio.ensure_future(near.close("enough"))
            await asyncio.sleep(0)
            far.resume_reading()
            assert str(await recorder.wait_lost()) == "closed by peer: enough"
            assert len(recorder.frames) == sent
            await closing

    asyncio.run(main())


def test_both_ends_may_close_at_the_same_moment() -> None:
    async def main() -> None:
        async with pair() as (near, near_recorder, far, recorder):
            await asyncio.gather(near.close("one"), far.close("two"))
            assert str(await near_recorder.wait_lost()) == "closed by us: one"
            assert str(await recorder.wait_lost()) == "closed by us: two"

    asyncio.run(main())


def test_an_abort_is_seen_at_the_other_end_and_by_those_who_wait_to_send() -> None:
    async def main() -> None:
        async with pair() as (near, near_recorder, far, recorder):
            far.pause_reading()
            waiting = [asyncio.ensure_future(near.send(b"", [bytes(8 << 20)])) for _ in range(3)]
            await until(lambda: near.bytes_sent >= 1 << 20)
            near.abort("no more")
            results = await asyncio.gather(*waiting, return_exceptions=True)
            assert all(isinstance(result, ConnectionLost) for result in results)
            assert str(await near_recorder.wait_lost()) == "closed by us: no more"
            far.resume_reading()
            assert "the other end" in str(await recorder.wait_lost())

    asyncio.run(main())


def test_the_system_forgets_what_an_aborted_bulk_connection_has_not_sent() -> None:
    """Else it would go on to fill the link with it: the other end hears of a reset, and not of the end of all data."""

    async def main() -> None:
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
            assert "the other end broke off" in str(await recorder.wait_lost())

    asyncio.run(main())


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
            assert isinstance(await near_recorder.wait_lost(), ConnectionLost)

    asyncio.run(main())
    assert [record for record in caplog.records if record.name == "asyncio"] == []


def test_a_reset_fails_all_who_wait_for_their_turn_to_send(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        async with pair_with_a_reset() as (near, near_recorder):
            sends = [near.send(b"", [bytes(10)]) for _ in range(20)]
            results = await asyncio.gather(*sends, return_exceptions=True)
            assert all(isinstance(result, ConnectionLost) for result in results)
            await near.close("too late")
            assert isinstance(await near_recorder.wait_lost(), ConnectionLost)

    asyncio.run(main())
    assert [record for record in caplog.records if record.name == "asyncio"] == []


def test_a_receiver_that_fails_loses_its_connection_and_no_other(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        async with peer() as listener, dialing() as transport:
            near = await transport.dial(listener.address, None, Purpose.CONTROL, WAIT)
            _, recorder = await listener.next()

            def fail(header: bytes, payload: memoryview) -> None:
                raise LookupError("a bug")

            recorder.frame_received = fail  # type: ignore[method-assign]
            await near.send(b"frame")
            assert "LookupError" in str(await recorder.wait_lost())
            await still_works(listener)

    asyncio.run(main())
    assert "a receiver failed" in caplog.text


# ---- listening


def test_a_taken_port_is_named_with_the_fix() -> None:
    async def main() -> None:
        async with peer() as listener:
            host, port = host_and_port(listener.address)
            second = TCPTransport(DIALER, host=host, port=port)
            with pytest.raises(ListenError, match=f"cannot listen on {host}:{port}: another program .* choose another"):
                await second.listen(lambda connection: None)
            await second.close()

    asyncio.run(main())


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


@pytest.mark.parametrize("port", [-1, 70000])
def test_wrong_options_are_refused(port: int) -> None:
    with pytest.raises(ValueError, match=str(port)):
        TCPTransport(LISTENER, port=port)


@pytest.mark.parametrize("host", ["", "0.0.0.0", "::", "::1", "localhost"])
def test_a_listener_can_be_dialed_under_what_it_announces(host: str) -> None:
    if ":" in host and not socket.has_ipv6:
        host = "127.0.0.1"

    async def main() -> None:
        async with peer(host=host) as listener:
            await still_works(listener)

    asyncio.run(main())


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


def test_an_accept_that_is_cancelled_while_a_connection_waits_reports_nothing(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            listener.setblocking(False)
            accepting = asyncio.create_task(tcp._accept_one(listener))
            await asyncio.sleep(0)
            with socket.create_connection(listener.getsockname()):
                asyncio.get_running_loop().call_soon(accepting.cancel)
                await asyncio.wait([accepting])
                assert accepting.cancelled()
                incoming = await tcp._accept_one(listener)
                incoming.close()

    asyncio.run(main())
    assert caplog.text == ""


def test_accepting_survives_whoever_takes_the_connections(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        def fail(connection: Connection) -> None:
            raise LookupError("a bug")

        transport = TCPTransport(LISTENER, host="127.0.0.1")
        address = (await transport.listen(fail))[0]
        async with dialing() as dialer:
            for _ in range(2):
                recorder = Recorder()
                (await dialer.dial(address, None, Purpose.CONTROL, WAIT)).start(recorder)
                assert isinstance(await recorder.wait_lost(), ConnectionLost)
        await transport.close()

    asyncio.run(main())
    assert caplog.text.count("could not be taken over") == 2


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


def test_an_address_of_oneself_is_named() -> None:
    async def main() -> None:
        async with peer() as listener:
            with pytest.raises(OwnAddressError, match="this peer itself") as caught:
                await listener.transport.dial(listener.address, None, Purpose.CONTROL, WAIT)
            assert caught.value.step == "handshake"

    asyncio.run(main())


def test_an_address_that_names_another_peer_than_expected_is_not_dialed() -> None:
    async def main() -> None:
        async with dialing() as transport:
            with pytest.raises(WrongPeerError, match="is not an address of peer"):
                await transport.dial(f"tcp://127.0.0.1:1/{DIALER.peer_id}", LISTENER.peer_id, Purpose.CONTROL, WAIT)
            with pytest.raises(AddressError, match="expected tcp"):
                await transport.dial("memory://abc", None, Purpose.CONTROL, WAIT)

    asyncio.run(main())


def test_a_cancelled_dial_leaves_nothing() -> None:
    async def main() -> None:
        with socket.create_server(("127.0.0.1", 0)) as silent:
            async with dialing() as transport:
                dial = asyncio.ensure_future(
                    transport.dial(f"tcp://127.0.0.1:{silent.getsockname()[1]}", None, Purpose.CONTROL, WAIT)
                )
                await until(lambda: bool(transport._shared.live))
                dial.cancel()
                await asyncio.wait([dial])
                assert dial.cancelled()
                await until(lambda: not transport._shared.live)

    asyncio.run(main())


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
    assert open_descriptors() == descriptors


def test_a_closed_listener_is_gone_with_all_its_connections() -> None:
    descriptors = open_descriptors()

    async def main() -> None:
        async with peer() as listener, dialing() as transport:
            recorders = [Recorder() for _ in range(5)]
            for recorder in recorders:
                (await transport.dial(listener.address, None, Purpose.BULK, WAIT)).start(recorder)
            await listener.transport.close()
            for recorder in recorders:
                assert str(await recorder.wait_lost()) == "closed by peer: shutting down"
            assert (await fails(listener.address)).step == "connect"

    asyncio.run(main())
    assert open_descriptors() == descriptors


def test_a_listener_closed_at_once_leaves_no_socket() -> None:
    descriptors = open_descriptors()

    async def main() -> None:
        transport = TCPTransport(LISTENER, host="127.0.0.1")
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", ResourceWarning)
            await transport.listen(lambda connection: None)
            await transport.close()
            gc.collect()
        assert not caught

    asyncio.run(main())
    assert open_descriptors() == descriptors


def test_connections_show_their_state() -> None:
    async def main() -> None:
        async with pair() as (near, _, _, _):
            assert as_tcp(near).is_open and repr(near).endswith(" open>")
            near.abort("")
            assert repr(near).endswith(" ended>")

    asyncio.run(main())


def test_closing_a_connection_that_the_other_end_has_just_reset_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def reset() -> None:
        raise OSError(errno.ENOTCONN, "Transport endpoint is not connected")

    async def main() -> None:
        async with pair() as (near, near_recorder, _, _):
            monkeypatch.setattr(as_tcp(near)._socket, "write_eof", reset)
            await near.close("going")
            assert str(await near_recorder.wait_lost()) == "closed by us: going"

    asyncio.run(main())


def test_an_address_that_leads_nowhere_is_told_of_in_the_systems_words(monkeypatch: pytest.MonkeyPatch) -> None:
    async def fails(*_: object, **__: object) -> None:
        raise OSError(errno.EHOSTUNREACH, "Connect call failed ('192.0.2.77', 31330)")

    async def main() -> None:
        async with dialing() as transport:
            monkeypatch.setattr(asyncio.get_running_loop(), "create_connection", fails)
            with pytest.raises(ConnectError, match=r"^tcp://192\.0\.2\.77:31330: connect failed: [^()]+$"):
                await transport.dial("tcp://192.0.2.77:31330", None, Purpose.CONTROL, WAIT)

    asyncio.run(main())


def test_bytes_within_this_computer_count_against_no_limit() -> None:
    """At five kilobytes per second these would take an hour and a half."""

    async def main() -> None:
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
            assert [len(payload) for _, payload in await recorder.wait_for(2)] == [16 << 20, 11 << 20]
            assert all(
                end.rates.upload.is_open and end.rates.download.is_open for end in (listener.transport, transport)
            )

    asyncio.run(main())
