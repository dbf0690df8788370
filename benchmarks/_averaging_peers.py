"""The processes that benchmarks/averaging.py lets compete: this project, bare TLS, and gloo."""

from __future__ import annotations

import socket
import ssl
import tempfile
import threading
from collections.abc import Sequence
from multiprocessing.connection import Connection as Pipe
from pathlib import Path

import torch

import swarmcli
from benchmarks._contest import join_dht, serve_turns
from swarmcli.averaging.config import AllreduceOptions
from swarmcli.network.identity import Identity
from swarmcli.network.transports.tcp.handshake import dialer_context, listener_context

_MESSAGE = 512 << 10  # bytes, as a part of an all-reduce

AUDIT = AllreduceOptions().audit


def average_here(pipe: Pipe, index: int, peers: int, nbytes: int, half: bool, audit: float = AUDIT) -> None:
    """Averages with this project: a turn is an averager's `step`, as users call it, with finding the group. `nbytes`:
    of float32."""
    torch.set_num_threads(1)
    tensors = [torch.full((nbytes // 16,), float(index)) for _ in range(4)]
    codec = swarmcli.Float16Compression() if half else swarmcli.NoCompression()
    with join_dht(pipe, index) as dht, _averager(tensors, dht, peers, codec, audit) as averager:

        def work() -> None:
            if len(averager.step(timeout=60) or ()) != peers:
                raise RuntimeError("a round failed")

        serve_turns(pipe, work)


def share_state_here(pipe: Pipe, index: int, nbytes: int) -> None:
    """Process 0 has a state, process 1 downloads it."""
    torch.set_num_threads(1)
    tensors = [torch.randn(nbytes // 64) for _ in range(16)]
    with join_dht(pipe, index) as dht, _averager(tensors, dht, 2, swarmcli.NoCompression()) as averager:

        def work() -> None:
            if index and averager.load_state_from_peers(timeout=60) is None:
                raise RuntimeError("nobody shared a state")

        serve_turns(pipe, work)


def _averager(
    tensors: list[torch.Tensor],
    dht: swarmcli.DHT,
    peers: int,
    codec: swarmcli.compression.CompressionBase,
    audit: float = AUDIT,
) -> swarmcli.DecentralizedAverager:
    return swarmcli.DecentralizedAverager(
        tensors,
        dht,
        prefix="bench",
        min_group_size=peers,
        compression=codec,
        min_matchmaking_time=30.0,
        audit=audit,
        start=True,
    )


def send_bare(pipe: Pipe, index: int, count: int, nbytes: int, one_way: bool) -> None:
    """Nothing but TLS: each process sends `nbytes` to each other and receives as much, over blocking sockets with a
    thread each. `one_way`: only the first process sends."""
    listener = listener_context(Identity.generate())
    with socket.create_server(("127.0.0.1", 0)) as server:
        pipe.send(server.getsockname())
        places = pipe.recv()
        incoming: list[ssl.SSLSocket] = []

        def accept() -> None:
            for _ in range(count - 1):
                incoming.append(listener.wrap_socket(server.accept()[0], server_side=True))

        accepting = threading.Thread(target=accept)
        accepting.start()
        others = [place for other, place in enumerate(places) if other != index]
        outgoing = [dialer_context().wrap_socket(socket.create_connection(place)) for place in others]
        accepting.join()
    data = memoryview(bytearray(nbytes))
    sinks = [memoryview(bytearray(_MESSAGE)) for _ in incoming]
    sends, receives = not (one_way and index), not (one_way and not index)

    def work() -> None:
        threads = [threading.Thread(target=_send, args=(connection, data)) for connection in outgoing if sends]
        for connection, sink in zip(incoming, sinks, strict=True):
            if receives:
                threads.append(threading.Thread(target=_receive, args=(connection, sink, nbytes)))
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    serve_turns(pipe, work)


def _send(connection: ssl.SSLSocket, data: memoryview) -> None:
    for offset in range(0, len(data), _MESSAGE):
        connection.sendall(data[offset : offset + _MESSAGE])


def _receive(connection: ssl.SSLSocket, sink: memoryview, nbytes: int) -> None:
    received = 0
    while received < nbytes:
        received += connection.recv_into(sink)


def average_with_gloo(pipe: Pipe, index: int, peers: int, nbytes: int) -> None:
    """Averages with torch.distributed, which encrypts nothing and has a fixed group."""
    from torch import distributed

    torch.set_num_threads(1)
    pipe.send(tempfile.mkdtemp() if index == 0 else None)
    folders: Sequence[str] = pipe.recv()
    rendezvous = Path(folders[0]) / "rendezvous"
    distributed.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=index, world_size=peers)
    tensors = torch.full((nbytes // 4,), float(index))

    def work() -> None:
        distributed.all_reduce(tensors)
        tensors.div_(peers)

    serve_turns(pipe, work)
