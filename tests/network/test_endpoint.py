"""Calls: both ways on one connection, with deadlines, cancellation, refusals, deaths and goodbyes."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest

from swarmcli.errors import (
    AddressError,
    CallRefused,
    CallTimeout,
    ConnectError,
    ConnectionLost,
    PeerUnreachable,
    ProtocolViolation,
    RemoteError,
    UnknownMethod,
    WrongPeerError,
)
from swarmcli.events import Event, PeerConnected, PeerDisconnected
from swarmcli.network import Endpoint, Identity, NetworkLimits, PeerID
from swarmcli.testing import MemoryNetwork
from tests.simulation import now, simulated

from .worlds import Number, endpoints, reaches, slow


class Busy:
    """A handler that never answers, and tells what becomes of it."""

    def __init__(self) -> None:
        self.running = 0
        self.cancelled = 0

    async def __call__(self, peer: PeerID, request: Number, stream: object = None) -> Any:
        self.running += 1
        try:
            return await asyncio.get_running_loop().create_future()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self.running -= 1


@simulated
async def test_a_client_is_called_back_by_whom_it_dialed_and_by_nobody_else() -> None:
    async with endpoints(MemoryNetwork(), 3, clients=(1, 2)) as [a, client, other]:
        assert client.addresses == () and not a.addresses_of(client.peer_id)
        with pytest.raises(PeerUnreachable):
            await reaches(a, client)
        assert now() == 0  # it is known at once
        await client.connect(a.addresses[0], timeout=5)
        await other.connect(a.addresses[0], timeout=5)
        assert await reaches(a, client)
        with pytest.raises(PeerUnreachable):
            await reaches(client, other)


@simulated
async def test_calls_beyond_the_limit_wait_for_their_turn() -> None:
    busiest = 0
    serving = 0
    limits = NetworkLimits(max_calls_per_peer=10)
    async with endpoints(MemoryNetwork(), 2, limits=limits) as [a, b]:

        async def counted(peer: PeerID, request: Number) -> Number:
            nonlocal busiest, serving
            serving += 1
            busiest = max(busiest, serving)
            await asyncio.sleep(1)
            serving -= 1
            return request

        b.serve("slow", Number, counted)
        async with asyncio.TaskGroup() as group:
            for n in range(35):
                group.create_task(a.call(b.peer_id, "slow", Number(n), Number, timeout=60))
        assert busiest == 10 and 4 <= now() < 5


@simulated
async def test_a_deadline_is_kept_and_cancels_the_handler() -> None:
    network = MemoryNetwork()
    async with endpoints(network, 2) as [a, b]:
        busy = Busy()
        b.serve("busy", Number, busy)
        with pytest.raises(CallTimeout, match=r"did not answer busy within 3 s"):
            await a.call(b.peer_id, "busy", Number(0), Number, timeout=3)
        assert now() == pytest.approx(3)
        await asyncio.sleep(1)
        assert busy.cancelled == 1 and busy.running == 0
        assert a.statistics().calls_waiting == b.statistics().calls_serving == 0
        network.cut(a.peer_id, b.peer_id)
        start = now()
        with pytest.raises(CallTimeout, match=r"no stream to .* for echo within 2 s"):
            async with a.stream(b.peer_id, "echo", Number(0), timeout=2):
                pass
        assert now() - start == pytest.approx(2)
        assert a.statistics().bulk_connections == 0


@simulated
async def test_cancelled_calls_give_their_places_back() -> None:
    """Also when the wish to cancel arrives together with the request, before the handler has begun."""

    async with endpoints(MemoryNetwork(), 2, limits=NetworkLimits(max_calls_per_peer=4)) as [a, b]:
        b.serve("busy", Number, Busy())
        await a.connect(b.addresses[0], timeout=5)
        for delay in (0.0, 0.001, 0.01, 0.02, 0.5):
            calls = [asyncio.create_task(a.call(b.peer_id, "busy", Number(0), Number, timeout=60)) for _ in "1234"]
            await asyncio.sleep(delay)
            for call in calls:
                call.cancel()
            await asyncio.wait(calls)
        assert await reaches(a, b)
        assert not b.statistics().violations


@simulated
async def test_refusals_and_failures_of_handlers_have_names() -> None:
    async with endpoints(MemoryNetwork(), 2) as [a, b]:

        async def refuse(peer: PeerID, request: Number) -> Number:
            raise CallRefused("full", "no room for you")

        async def fail(peer: PeerID, request: Number) -> Number:
            raise LookupError("x" * 5000)

        async def huge(peer: PeerID, request: Number) -> Any:
            return bytes(2 << 20)

        for handler in (refuse, fail, huge):
            b.serve(handler.__name__, Number, handler)

        async def call(method: str) -> None:
            await a.call(b.peer_id, method, Number(0), Number, timeout=5)

        with pytest.raises(CallRefused, match="no room for you") as refused:
            await call("refuse")
        assert refused.value.code == "full"
        with pytest.raises(RemoteError, match="LookupError: xxx") as failed:
            await call("fail")
        assert len(str(failed.value)) < 1100
        with pytest.raises(RemoteError):
            await call("huge")
        with pytest.raises(UnknownMethod, match="nonsense"):
            await call("nonsense")
        b.withdraw("refuse", "never served")
        with pytest.raises(UnknownMethod):
            await call("refuse")
        assert await reaches(a, b)


@simulated
async def test_an_answer_of_another_type_ends_the_connection() -> None:
    class Word(msgspec.Struct):
        text: str

    async with endpoints(MemoryNetwork(), 2) as [a, b]:
        with pytest.raises(ProtocolViolation, match="unreadable message: double"):
            await a.call(b.peer_id, "double", Number(1), Word, timeout=5)
        await asyncio.sleep(0.1)
        assert a.statistics().violations == {"unreadable message": 1}


@pytest.mark.parametrize("dead", [0, 1])
@simulated
async def test_the_death_of_either_end_fails_calls_and_streams_and_cancels_handlers(dead: int) -> None:
    network = MemoryNetwork()
    async with endpoints(network, 2) as [a, b]:
        busy = Busy()
        b.serve("busy", Number, busy)
        b.serve_stream("busy stream", Number, busy)
        call = asyncio.create_task(a.call(b.peer_id, "busy", Number(0), Number, timeout=600))
        with pytest.raises(ConnectionLost):
            async with a.stream(b.peer_id, "busy stream", Number(0), timeout=5) as stream:
                await asyncio.sleep(1)
                network.kill((a, b)[dead].peer_id)
                await stream.receive(Number)
        with pytest.raises(ConnectionLost):
            await call
        await asyncio.sleep(1)
        assert busy.cancelled == 2 and now() < 3
        assert not a.is_connected(b.peer_id) and not b.is_connected(a.peer_id)


@simulated
async def test_closing_says_goodbye_and_ends_everything() -> None:
    async with endpoints(MemoryNetwork(), 2) as [a, b]:
        busy, seen = Busy(), list[Event]()
        a.events.subscribe(seen.append)
        b.serve("busy", Number, busy)
        there = asyncio.create_task(a.call(b.peer_id, "busy", Number(0), Number, timeout=600))
        a.serve("busy", Number, busy)
        back = asyncio.create_task(b.call(a.peer_id, "busy", Number(0), Number, timeout=600))
        await asyncio.sleep(1)
        await b.close()
        await b.close()
        with pytest.raises(ConnectionLost, match="closed by peer: the peer has left"):
            await there
        with pytest.raises(ConnectionLost):
            await back
        await asyncio.sleep(1)
        assert busy.cancelled == 2
        assert seen == [
            PeerConnected(b.peer_id.text, b.addresses[0]),
            PeerDisconnected(b.peer_id.text, "closed by peer: the peer has left"),
        ]
        with pytest.raises(ConnectionLost, match="closed"):
            await reaches(b, a)
        with pytest.raises(PeerUnreachable, match="refused"):
            await reaches(a, b)


@simulated
async def test_closing_does_not_wait_for_the_dead() -> None:
    network = MemoryNetwork()
    async with endpoints(network, 2) as [a, b]:
        await a.connect(b.addresses[0], timeout=5)
        network.freeze(b.peer_id)
        start = now()
        await a.close()
        assert now() - start <= 1.5


@simulated
async def test_the_first_contact_may_be_unknown_but_not_another_than_named() -> None:
    async with endpoints(MemoryNetwork(), 3) as [a, b, c]:
        address = b.addresses[0]
        assert await a.connect(address, timeout=5) == b.peer_id
        assert await a.connect(f"{address}/{b.peer_id}", timeout=5) == b.peer_id
        with pytest.raises(WrongPeerError):
            await c.connect(f"{address}/{a.peer_id}", timeout=5)
        with pytest.raises(ConnectError, match="itself"):
            await a.connect(a.addresses[0], timeout=5)
        with pytest.raises(ConnectError) as nobody:
            await a.connect("memory://nobody", timeout=5)
        assert nobody.value.step == "connect"
        with pytest.raises(AddressError):
            await a.connect("nonsense", timeout=5)


@simulated
async def test_round_trips_are_measured_without_the_handlers_time() -> None:
    async with endpoints(MemoryNetwork(latency=0.05), 2) as [a, b]:
        b.serve("slow", Number, slow(3))
        assert a.round_trip(b.peer_id) is None
        await a.call(b.peer_id, "slow", Number(0), Number, timeout=5)
        assert a.round_trip(b.peer_id) == pytest.approx(0.1)


@simulated
async def test_announced_addresses_replace_those_of_the_listener() -> None:
    network = MemoryNetwork()
    peer = Endpoint(network.transport(Identity.from_seed(1)), announce=["memory://public"])
    await peer.start()
    assert peer.addresses == ("memory://public",) == peer.addresses_of(peer.peer_id)
    await peer.close()
    many = Endpoint(network.transport(Identity.from_seed(2)), announce=[f"memory://public{n}" for n in range(20)])
    await many.start()
    assert many.addresses == tuple(f"memory://public{n}" for n in range(8)), "what others take of a peer"
    await many.close()
    with pytest.raises(AddressError, match="expected"):
        Endpoint(network.transport(Identity.from_seed(3)), announce=["example.org:80"])
