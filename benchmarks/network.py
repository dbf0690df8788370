"""Streams and calls between two processes, beside plain TLS over a socket in the same run.

Streaming: 256 MiB through one stream, in messages as large as an all-reduce part and larger. Round trips: small calls
one after the other. The peer for comparison does nothing but `sendall` and `recv_into` on a blocking ssl.SSLSocket,
and asyncio's own TLS streams. Memory: how far the resident memory of both processes rises above what it was before.

    python -m benchmarks network
"""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import resource
import socket
import ssl
import statistics
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Connection as Pipe
from pathlib import Path
from typing import Any, TypeAlias

import msgspec

from swarmcli.network.endpoint import Endpoint, Stream
from swarmcli.network.identity import Identity, PeerID
from swarmcli.network.transports.tcp.handshake import dialer_context, listener_context
from swarmcli.network.transports.tcp.transport import TCPTransport

MIB = 1 << 20
TOTAL = 256 * MIB
MESSAGES = (512 * 1024, 4 * MIB)  # bytes; the first is the default part of an all-reduce
CALLS = 3000
REPEATS = 5
TARGET = 0.7  # of plain TLS
MEMORY_TARGET = 8  # MiB above the start, of either process
_PING = b"x" * 64


class Size(msgspec.Struct, frozen=True):
    bytes: int


class Done(msgspec.Struct, frozen=True):
    received: int
    risen: float  # MiB


# ---- this project


def serve_endpoint(pipe: Pipe) -> None:
    async def main() -> None:
        endpoint = Endpoint(TCPTransport(Identity.generate(), host="127.0.0.1"))
        endpoint.serve_stream("sink", Size, _sink)
        endpoint.serve("echo", Size, _echo)
        await endpoint.start()
        pipe.send((bytes(endpoint.peer_id), endpoint.addresses))
        await asyncio.get_running_loop().run_in_executor(None, pipe.recv)
        await endpoint.close()

    asyncio.run(main())


async def _sink(peer: PeerID, request: Size, stream: Stream) -> None:
    memory = memoryview(bytearray(request.bytes))
    received = 0
    before = restart_peak()
    while received < TOTAL:
        _, payload = await stream.receive(Size, lambda message, size: memory[:size])
        received += payload.nbytes
    await stream.send(Done(received, peak() - before))


async def _echo(peer: PeerID, request: Size) -> Size:
    return request


def use_endpoint(place: Any, report: Callable[[str, float], None]) -> None:
    asyncio.run(_use_endpoint(PeerID(place[0]), tuple(place[1]), report))


async def _use_endpoint(peer: PeerID, addresses: tuple[str, ...], report: Callable[[str, float], None]) -> None:
    endpoint = Endpoint(TCPTransport(Identity.generate()), client_mode=True)
    await endpoint.start()
    endpoint.learn(peer, addresses)
    for size in MESSAGES:
        memory = memoryview(bytearray(size))
        before = restart_peak()
        async with endpoint.stream(peer, "sink", Size(size), timeout=10) as stream:
            began = time.perf_counter()
            for _ in range(TOTAL // size):
                await stream.send(Size(size), memory)
            done, _ = await stream.receive(Done)
            report(f"stream {size}", TOTAL / (time.perf_counter() - began))
        report("memory of the sender", peak() - before)
        report("memory of the receiver", done.risen)
    times = []
    for _ in range(CALLS):
        began = time.perf_counter()
        await endpoint.call(peer, "echo", Size(1), Size, timeout=10)
        times.append(time.perf_counter() - began)
    report("round trip", statistics.median(times))
    await endpoint.close()


# ---- plain TLS, blocking


def serve_plain(pipe: Pipe) -> None:
    context = listener_context(Identity.generate())
    with socket.create_server(("127.0.0.1", 0)) as listener:
        pipe.send(listener.getsockname())
        for size in MESSAGES:
            with _accepted(listener, context) as connection:
                memory = memoryview(bytearray(size))
                received = 0
                while received < TOTAL:
                    received += connection.recv_into(memory)
                connection.sendall(b"!")
        with _accepted(listener, context) as connection:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            while ping := connection.recv(len(_PING)):
                connection.sendall(ping)
    pipe.recv()


def _accepted(listener: socket.socket, context: ssl.SSLContext) -> ssl.SSLSocket:
    return context.wrap_socket(listener.accept()[0], server_side=True)


def use_plain(place: Any, report: Callable[[str, float], None]) -> None:
    context = dialer_context()
    for size in MESSAGES:
        with context.wrap_socket(socket.create_connection(place)) as connection:
            memory = bytearray(size)
            began = time.perf_counter()
            for _ in range(TOTAL // size):
                connection.sendall(memory)
            connection.recv(1)
            report(f"stream {size}", TOTAL / (time.perf_counter() - began))
    with context.wrap_socket(socket.create_connection(place)) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        times = []
        for _ in range(CALLS):
            began = time.perf_counter()
            connection.sendall(_PING)
            connection.recv(len(_PING))
            times.append(time.perf_counter() - began)
        report("round trip", statistics.median(times))


# ---- asyncio's own TLS


def serve_asyncio(pipe: Pipe) -> None:
    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            size = int.from_bytes(await reader.readexactly(8), "big")
            while size == len(_PING):
                writer.write(await reader.readexactly(size))
            for _ in range(TOTAL // size):
                await reader.readexactly(size)
            writer.write(b"!")
            await writer.drain()
        writer.close()

    async def main() -> None:
        context = listener_context(Identity.generate())
        async with await asyncio.start_server(handle, "127.0.0.1", 0, ssl=context) as server:
            pipe.send(server.sockets[0].getsockname())
            await asyncio.get_running_loop().run_in_executor(None, pipe.recv)

    asyncio.run(main())


def use_asyncio(place: Any, report: Callable[[str, float], None]) -> None:
    asyncio.run(_use_asyncio(place, report))


async def _use_asyncio(place: Any, report: Callable[[str, float], None]) -> None:
    for size in (*MESSAGES, len(_PING)):
        reader, writer = await asyncio.open_connection(*place, ssl=dialer_context(), server_hostname="anyone")
        writer.write(size.to_bytes(8, "big"))
        memory = bytes(size)
        began = time.perf_counter()
        if size in MESSAGES:
            for _ in range(TOTAL // size):
                writer.write(memory)
                await writer.drain()
            await reader.readexactly(1)
            report(f"stream {size}", TOTAL / (time.perf_counter() - began))
        else:
            times = []
            for _ in range(CALLS):
                began = time.perf_counter()
                writer.write(memory)
                await reader.readexactly(size)
                times.append(time.perf_counter() - began)
            report("round trip", statistics.median(times))
        writer.transport.abort()


# ---- memory


def restart_peak() -> float:
    """Forgets the peak of resident memory where the system can (Linux) and returns it as it is now, in MiB."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
    return peak()


def peak() -> float:
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) / 1024
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / MIB


# ---- the run

Report: TypeAlias = Callable[[str, float], None]
Figures: TypeAlias = dict[str, float]
KINDS: dict[str, tuple[Callable[[Pipe], None], Callable[[Any, Report], None]]] = {
    "swarm": (serve_endpoint, use_endpoint),
    "plain TLS, blocking": (serve_plain, use_plain),
    "plain TLS, asyncio": (serve_asyncio, use_asyncio),
}


def one_run(kind: str) -> Figures:
    """Starts the serving end in a process of its own and returns what the using end has measured."""
    serve, use = KINDS[kind]
    figures: Figures = {}

    def report(name: str, value: float) -> None:
        figures[name] = max(value, figures.get(name, 0.0))

    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=serve, args=(there,))
    process.start()
    use(here.recv(), report)
    here.send("enough")
    process.join()
    return figures


def main() -> None:
    runs: dict[str, list[Figures]] = {kind: [] for kind in KINDS}
    for _ in range(REPEATS):  # in turns, so that other work on the machine disturbs all alike
        for kind in KINDS:
            runs[kind].append(one_run(kind))
    for size in MESSAGES:
        print(f"  256 MiB in messages of {size // 1024} KiB")
        show_table(runs, f"stream {size}", 1 / MIB, "MiB/s", f" (target: at least {TARGET})")
    print("  small round trip")
    show_table(runs, "round trip", 1e6, "µs", "")
    for figure in ("memory of the sender", "memory of the receiver"):
        risen = max(run[figure] for run in runs["swarm"])
        print(f"  {figure}: {risen:.1f} MiB above the start (target: at most {MEMORY_TARGET})")


def show_table(runs: dict[str, list[Figures]], figure: str, scale: float, unit: str, target: str) -> None:
    """Medians, and the median of the ratios within each turn."""
    for kind in KINDS:
        middle = statistics.median(run[figure] for run in runs[kind]) * scale
        ratio = statistics.median(
            ours[figure] / theirs[figure] for ours, theirs in zip(runs["swarm"], runs[kind], strict=True)
        )
        beside = "" if kind == "swarm" else f"   swarm / this: {ratio:.2f}{target}"
        print(f"    {kind:20} {middle:8.0f} {unit}{beside}")


if __name__ == "__main__":
    main()
