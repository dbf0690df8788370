"""The memory network's distances and faults."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from swarmcli.errors import ConnectError, HandshakeError
from swarmcli.network import Identity, Purpose
from swarmcli.network.transports.base import Connection
from swarmcli.testing import MemoryNetwork
from tests.network.worlds import Recorder
from tests.simulation import simulated

A, B, C = (Identity.from_seed(seed) for seed in range(3))


def now() -> float:
    return asyncio.get_running_loop().time()


class Wire:
    """A connection from A to B, started at both ends."""

    def __init__(self, dialer: Connection, listener: Connection) -> None:
        self.dialer, self.listener = dialer, listener
        self.at_dialer, self.at_listener = Recorder(), Recorder()
        dialer.start(self.at_dialer)
        listener.start(self.at_listener)


@asynccontextmanager
async def wires(network: MemoryNetwork, count: int = 1) -> AsyncIterator[list[Wire]]:
    a, b = network.transport(A), network.transport(B)
    accepted: asyncio.Queue[Connection] = asyncio.Queue()
    (address,) = await b.listen(accepted.put_nowait)
    made = []
    for _ in range(count):
        dialed = await a.dial(address, B.peer_id, Purpose.BULK, 10)
        made.append(Wire(dialed, await accepted.get()))
    yield made
    await a.close()
    await b.close()


async def arrival_times(wire: Wire, sizes: list[int]) -> list[float]:
    """Seconds from sending to arrival of each frame; all are sent at once."""
    start = now()
    times = []
    async with asyncio.TaskGroup() as group:
        for size in sizes:
            group.create_task(wire.dialer.send(b"", [bytes(size)]))
        for count in range(1, len(sizes) + 1):
            await wire.at_listener.until(count)
            times.append(now() - start)
    return times


@simulated
async def test_latency_is_one_way_and_may_depend_on_the_pair() -> None:
    network = MemoryNetwork(latency=lambda source, target: 0.3 if source == A.peer_id else 0.1)
    async with wires(network) as [wire]:
        assert await arrival_times(wire, [10]) == [pytest.approx(0.3)]


@simulated
async def test_bandwidth_is_shared_fairly_between_connections() -> None:
    network = MemoryNetwork(latency=0.01, bandwidth=1e6)
    async with wires(network, 2) as [bulk, small]:
        async with asyncio.TaskGroup() as group:
            flood = group.create_task(arrival_times(bulk, [4_000_000]))
            await asyncio.sleep(0.05)
            assert (await arrival_times(small, [100]))[0] < 0.3  # not behind four seconds of bulk
        assert flood.result()[0] == pytest.approx(4.0, rel=0.1)


@simulated
async def test_a_link_may_be_faster_one_way_than_the_other() -> None:
    network = MemoryNetwork(latency=0.01)
    async with wires(network) as [wire]:
        network.set_bandwidths(A.peer_id, uplink=1e5, downlink=1e6)
        assert await arrival_times(wire, [1_000_000]) == [pytest.approx(10, rel=0.1)]
        network.set_bandwidths(A.peer_id, uplink=None, downlink=1e5)
        assert (await arrival_times(wire, [1_000_000]))[0] < 0.1


class Memory(Recorder):
    """Reads payloads into memory that can be looked at before they are whole."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.memory = bytearray(size)

    def payload_buffer(self, header: bytes, size: int) -> memoryview:
        return memoryview(self.memory)[:size]

    @property
    def filled(self) -> int:
        return len(self.memory.rstrip(b"\0"))


@simulated
async def test_a_payload_arrives_piece_by_piece_also_where_no_link_is_slow() -> None:
    network = MemoryNetwork(latency=0.01)
    async with wires(network) as [wire]:
        wire.at_listener = Memory(1_000_000)
        wire.listener.start(wire.at_listener)
        sending = asyncio.create_task(wire.dialer.send(b"large", [b"x" * 1_000_000]))
        seen = set()
        while not wire.at_listener.frames:
            seen.add(wire.at_listener.filled)
            await asyncio.sleep(2e-4)
        await sending
        assert len(seen) > 3 and wire.at_listener.filled == 1_000_000


@simulated
async def test_loss_costs_time_but_neither_bytes_nor_order() -> None:
    async with wires(MemoryNetwork(seed=4, latency=0.01, loss=0.2)) as [wire]:
        for number in range(100):
            await wire.dialer.send(b"%d" % number)
        await wire.at_listener.until(100)
        assert [header for header, _ in wire.at_listener.frames] == [b"%d" % number for number in range(100)]
        assert now() > 0.2


@simulated
async def test_a_partition_holds_everything_up_until_it_heals() -> None:
    network = MemoryNetwork()
    async with wires(network) as [wire]:
        await wire.dialer.send(b"on its way")
        network.partition([A.peer_id], [B.peer_id])
        await wire.dialer.send(b"behind the wall")
        await asyncio.sleep(1000)
        assert wire.at_listener.frames == [] and not wire.at_dialer.ends
        network.heal()
        await wire.at_listener.until(2)
        assert [header for header, _ in wire.at_listener.frames] == [b"on its way", b"behind the wall"]


@simulated
async def test_a_partition_separates_groups_and_a_cut_two_peers() -> None:
    network = MemoryNetwork()
    transports = [network.transport(identity) for identity in (A, B, C)]
    addresses = [(await transport.listen(lambda connection: None))[0] for transport in transports]

    async def reaches(source: int, target: int) -> bool:
        try:
            await transports[source].dial(addresses[target], None, Purpose.BULK, 1)
        except ConnectError:
            return False
        return True

    network.partition([A.peer_id])
    assert not await reaches(0, 1) and not await reaches(1, 0) and await reaches(1, 2)
    network.heal()
    network.cut(B.peer_id, A.peer_id)
    assert not await reaches(0, 1) and not await reaches(1, 0) and await reaches(0, 2)
    network.heal()
    assert await reaches(0, 1)


@simulated
async def test_a_killed_peer_resets_its_connections_and_is_gone() -> None:
    network = MemoryNetwork()
    async with wires(network) as [wire]:
        network.kill(B.peer_id)
        await wire.at_dialer.ended.wait()
        assert str(wire.at_dialer.ends[0]) == "reset by peer"
        with pytest.raises(ConnectError):
            await network.transport(C).dial(f"memory://{B.peer_id.short}", None, Purpose.BULK, 5)


@simulated
async def test_a_frozen_peer_is_silent_and_its_connections_stand() -> None:
    network = MemoryNetwork()
    async with wires(network) as [wire]:
        network.freeze(B.peer_id)
        await wire.dialer.send(b"hello?")
        with pytest.raises(ConnectError):
            await network.transport(C).dial(f"memory://{B.peer_id.short}", None, Purpose.BULK, 5)
        assert not wire.at_listener.frames and not wire.at_dialer.ends
        network.thaw(B.peer_id)
        await wire.at_listener.until(1)
        assert wire.at_listener.frames == [(b"hello?", b"")]


@simulated
async def test_dialing_through_a_cut_says_that_it_ended_at_the_deadline() -> None:
    network = MemoryNetwork()
    a, b = network.transport(A), network.transport(B)
    (address,) = await b.listen(lambda connection: None)
    network.cut(A.peer_id, B.peer_id)
    with pytest.raises(ConnectError, match="within 3 s") as caught:
        await a.dial(address, None, Purpose.BULK, 3)
    assert caught.value.step == "connect" and now() == pytest.approx(3)
    network.heal()
    asyncio.get_running_loop().call_later(0.03, network.cut, A.peer_id, B.peer_id)
    with pytest.raises(HandshakeError):
        await a.dial(address, None, Purpose.BULK, 3)
