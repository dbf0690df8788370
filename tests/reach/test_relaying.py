"""What a relay gives, and to whom it says no."""

from __future__ import annotations

import asyncio
import socket
from contextlib import ExitStack, suppress
from functools import partial

import pytest

from swarmcli.errors import CallRefused, ConnectionLost, NetworkError
from swarmcli.network import Purpose
from swarmcli.network.task_owner import TaskOwner
from swarmcli.network.transports.base import Connection
from swarmcli.network.transports.tcp.handshake import GreetingKind, Message
from swarmcli.reach.circuits import open_circuits
from swarmcli.reach.relay_messages import (
    COME,
    JOIN,
    OFFER,
    RESERVE,
    AskForOffer,
    Come,
    Coming,
    Joining,
    JoinRequest,
    RelayOffer,
    Reserve,
    Reserved,
)
from swarmcli.reach.relaying import RelayBudgets
from swarmcli.testing import MemoryNetwork
from tests.network.closed_runs import ClosedRunWorld
from tests.network.tcp_helpers import until
from tests.network.worlds import reaches
from tests.reach.relay_worlds import Client, Scene, Word, scene, tcp_scene
from tests.simulation import in_real_time, simulated

PIECE = 64 << 10


async def many(peers: Scene, count: int, first: int = 5) -> list[Client]:
    return [await peers.client(first + number) for number in range(count)]


async def dial(source: Client, target: Client, relay: object) -> Connection:
    return await source.transport.dial(target.address(relay), target.peer_id, Purpose.BULK, 20)  # type: ignore[arg-type]


@simulated
async def test_reservations_are_bounded_and_end() -> None:
    async with scene() as peers:
        endpoint, relay = await peers.relay(budgets=RelayBudgets(reservations=2, reservation_seconds=100))
        a, b, c = await many(peers, 3)
        await a.reserve(endpoint)
        await b.reserve(endpoint)
        with pytest.raises(CallRefused, match="no reservation is left"):
            await c.reserve(endpoint)
        offer = await c.endpoint.call(endpoint.peer_id, OFFER, AskForOffer(), RelayOffer, timeout=5)
        assert offer == RelayOffer(room=False)
        await a.endpoint.call(endpoint.peer_id, RESERVE, Reserve(wanted=False), Reserved, timeout=5)
        await c.reserve(endpoint)  # what was given back is free
        await asyncio.sleep(60)
        await c.reserve(endpoint)  # who renews keeps it
        await asyncio.sleep(60)
        assert relay.statistics().reservations == 1
        await c.endpoint.close()
        await asyncio.sleep(1)
        assert relay.statistics().reservations == 0, "it ends with its connection"


@simulated
async def test_one_network_has_only_its_share_of_the_reservations() -> None:
    network = MemoryNetwork(seed=1)
    home, other = network.router("198.51.100.7"), network.router("198.51.100.99")  # one /24
    async with scene(network) as peers:
        endpoint, _ = await peers.relay(budgets=RelayBudgets(reservations_per_network=2))
        clients = [await peers.client(5 + n, behind=home if n % 2 else other) for n in range(3)]
        for client in clients[:2]:
            await client.reserve(endpoint)
        with pytest.raises(CallRefused, match="none for your network"):
            await clients[2].reserve(endpoint)
        await (await peers.client(9)).reserve(endpoint)


@simulated
async def test_who_cannot_be_dialed_is_no_relay() -> None:
    async with scene() as peers:
        endpoint, relay = await peers.relay()
        a, b = await peers.pair(endpoint)
        endpoint.announce(direct=())  # it has found out that nobody can dial it
        for attempt in (a, b):
            with pytest.raises(CallRefused, match="cannot be dialed"):
                await attempt.reserve(endpoint)
        assert relay.statistics().refusals == {"client": 2}


@simulated
async def test_circuits_are_bounded_for_each_peer_and_in_all_and_come_back() -> None:
    async with scene() as peers:
        budgets = RelayBudgets(circuits=3, circuits_per_peer=2, connects_per_second=100)
        endpoint, relay = await peers.relay(budgets=budgets)
        a, b, c, d = await many(peers, 4)
        for client in (a, b, c, d):
            await client.reserve(endpoint)
        held = [await dial(a, b, endpoint), await dial(a, c, endpoint)]
        with pytest.raises(NetworkError, match="no circuit is left"):
            await dial(a, d, endpoint)
        held.append(await dial(d, a, endpoint))  # those that lead to it are counted apart
        with pytest.raises(NetworkError, match="no circuit is left"):
            await dial(b, c, endpoint)  # in all
        assert not (await b.endpoint.call(endpoint.peer_id, OFFER, AskForOffer(), RelayOffer, timeout=5)).room
        held.pop().abort("done")
        await asyncio.sleep(1)
        held.append(await dial(c, d, endpoint))
        for connection in held:
            connection.abort("done")
        await asyncio.sleep(1)
        assert relay.statistics().circuits == 0 and not relay._used
        assert (await b.endpoint.call(endpoint.peer_id, OFFER, AskForOffer(), RelayOffer, timeout=5)).room


@simulated
async def test_a_flood_of_connects_is_refused_and_others_get_through() -> None:
    async with scene() as peers:
        endpoint, relay = await peers.relay(budgets=RelayBudgets(connects_at_once=20, connects_per_second=1))
        a, b = await peers.pair(endpoint)
        attacker = await peers.client(5)
        await attacker.endpoint.connect(endpoint.addresses[0], timeout=5)

        async def attempt() -> str:
            """A circuit for which nobody comes."""
            try:
                await attacker.endpoint.call(endpoint.peer_id, JOIN, JoinRequest(b.peer_id), Joining, timeout=30)
            except CallRefused as error:
                return error.code
            return "token"

        flood = asyncio.gather(*(attempt() for _ in range(60)))
        await asyncio.sleep(0.5)
        assert relay.statistics().refusals["busy"] >= 30
        await asyncio.sleep(3)  # by then one more attempt to reach b is allowed
        assert await reaches(a.endpoint, b.endpoint)
        assert set(await flood) == {"busy", "token"}
        await asyncio.sleep(RelayBudgets().opening)
        assert relay.statistics().circuits == 1


@simulated
async def test_circuits_that_are_silent_or_half_over_end() -> None:
    async with scene() as peers:
        endpoint, relay = await peers.relay(budgets=RelayBudgets(idle=100, half_open=10))
        a, b = await peers.pair(endpoint)
        far, dials = asyncio.Queue[Word](), TaskOwner()
        peers.at_end(dials.close)

        async def come(peer: object, request: Come) -> Coming:
            word = Word(request.token)
            far.put_nowait(word)
            dials.spawn(b.endpoint.dial_plain(endpoint.peer_id, word, timeout=5))
            return Coming()

        b.endpoint.withdraw(COME)
        b.endpoint.serve(COME, Come, come)

        async def circuit() -> Word:
            joining = await a.endpoint.call(endpoint.peer_id, JOIN, JoinRequest(b.peer_id), Joining, timeout=5)
            near = Word(joining.token)
            await a.endpoint.dial_plain(endpoint.peer_id, near, timeout=5)
            await near.answer
            await (await far.get()).answer
            return near

        near = await circuit()
        for _ in range(3):
            await asyncio.sleep(60)
            near.socket.write(b"x")
        assert relay.statistics().circuits == 1
        await asyncio.sleep(110)
        assert relay.statistics().circuits == 0 and relay.statistics().refusals == {"idle": 1}
        near = await circuit()
        near.socket.write_eof()
        await asyncio.sleep(5)
        assert relay.statistics().circuits == 1
        await asyncio.sleep(10)
        assert relay.statistics().circuits == 0


@in_real_time
async def test_a_circuit_that_nobody_reads_to_its_end_counts_until_it_is_cut() -> None:
    """Both ends have said their last words, and what waits for one of them is a descriptor and a buffer."""
    async with tcp_scene() as peers:
        endpoint, relay = await peers.relay(budgets=RelayBudgets(half_open=0.2))
        a, b = await peers.pair(endpoint)
        loop, tokens = asyncio.get_running_loop(), asyncio.Queue[bytes]()

        async def come(peer: object, request: Come) -> Coming:
            tokens.put_nowait(request.token)
            return Coming()

        async def say(stack: ExitStack, token: bytes) -> socket.socket:
            own = stack.enter_context(socket.socket())
            own.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            own.setblocking(False)
            await loop.sock_connect(own, ("127.0.0.1", endpoint.listen_port))
            await loop.sock_sendall(own, Message(GreetingKind.JOIN, token).encode())
            return own

        def has_passed(nbytes: int) -> bool:
            return relay.statistics().bytes_passed == nbytes

        b.endpoint.withdraw(COME)
        b.endpoint.serve(COME, Come, come)
        with ExitStack() as stack:
            joining = await a.endpoint.call(endpoint.peer_id, JOIN, JoinRequest(b.peer_id), Joining, timeout=5)
            near, far = await say(stack, joining.token), await say(stack, await tokens.get())
            await loop.sock_recv(near, 1)
            (circuit,) = relay._circuits
            sent = read = 0
            while circuit.far.socket.get_write_buffer_size() < PIECE:  # the system's buffers are full, this one not
                await loop.sock_sendall(near, bytes(PIECE))
                sent += PIECE
                await until(partial(has_passed, sent))
            for end in (far, near):
                end.shutdown(socket.SHUT_WR)
            await until(lambda: relay.statistics().circuits == 0)
            with suppress(ConnectionResetError):
                while got := await loop.sock_recv(far, 1 << 20):
                    read += len(got)
            assert read < sent, "what nobody reads is thrown away in the end"


@simulated
async def test_a_circuit_does_not_lead_through_another_one() -> None:
    async with scene() as peers:
        first, _ = await peers.relay(0)
        second, _ = await peers.relay(1)
        a, b = await peers.pair(first)
        await b.reserve(second)
        # `second` is reached by `a` over a circuit through `first`.
        inner = await open_circuits(second)
        inner.relays.add(first.peer_id)
        await second.connect(first.addresses[0], timeout=5)
        await second.call(first.peer_id, RESERVE, Reserve(), Reserved, timeout=5)
        await a.endpoint.connect(f"relay://{first.peer_id.text}/{second.peer_id.text}", timeout=5)
        seen = a.endpoint.seen(second.peer_id)
        assert seen is not None and seen.relayed
        with pytest.raises(CallRefused, match="without a relay"):
            await a.endpoint.call(second.peer_id, RESERVE, Reserve(), Reserved, timeout=5)
        with pytest.raises((CallRefused, ConnectionLost)):
            await a.endpoint.call(second.peer_id, JOIN, JoinRequest(b.peer_id), Joining, timeout=5)


@simulated
async def test_one_network_has_only_its_share_of_the_circuits_whichever_end_it_is() -> None:
    network = MemoryNetwork(seed=1)
    homes = [network.router(host) for host in ("198.51.100.7", "198.51.100.99")]  # one /24
    async with scene(network) as peers:
        endpoint, _ = await peers.relay(budgets=RelayBudgets(circuits_per_network=1))
        near, far = [await peers.client(5 + number, behind=home) for number, home in enumerate(homes)]
        others = await many(peers, 3, first=7)
        for client in (near, far, *others):
            await client.reserve(endpoint)
        held = await dial(others[0], near, endpoint)
        for source, target in ((others[1], far), (far, others[1])):
            with pytest.raises(NetworkError, match="no circuit is left"):
                await dial(source, target, endpoint)
        (await dial(others[1], others[2], endpoint)).abort("done")
        held.abort("done")


@simulated
async def test_nothing_passes_for_whoever_is_no_member_any_more() -> None:
    """It has hung up, so the relay has no control connection with it that would end."""
    async with scene() as peers:
        endpoint, relay = await peers.relay()
        a, b = await peers.pair(endpoint)
        connection = await dial(a, b, endpoint)
        a.endpoint.disconnect(endpoint.peer_id, "the circuit stands")
        endpoint.membership = ClosedRunWorld().member(1)  # which has admitted neither of the two
        await asyncio.sleep(2)
        await connection.send(b"more")
        await asyncio.sleep(1)
        assert relay.statistics().refusals == {"no member": 1}
        assert not connection.is_open
