"""Budgets: nobody takes more than the page allows, and whoever was there before keeps what it has."""

from __future__ import annotations

import asyncio

import pytest

from swarmcli.errors import CallRefused
from swarmcli.network import Endpoint, Identity, NetworkLimits, Purpose, Stream, wire
from swarmcli.network.budgets import BUDGETS, Budget, Budgets
from swarmcli.network.ledger import Ledger
from swarmcli.network.prefix import prefix_of
from swarmcli.network.transports.tcp import TCPTransport
from swarmcli.network.wire.messages import Open, Piece
from tests.simulation import in_real_time, simulated

from .worlds import Number, reaches, stay_alive, town

HOME, AWAY, LAN = prefix_of("192.0.2.1"), prefix_of("198.51.100.1"), prefix_of("192.168.0.1")


def host(net: int, number: int) -> str:
    """A host of the memory network that has a prefix as those of the internet do."""
    return f"198.51.{net}.{number}"


# Where the system allows few files


def test_connections_of_strangers_leave_descriptors_for_this_peers_own_work() -> None:
    for allowed in (1024, 4096, BUDGETS.descriptors - 1):
        fewer = BUDGETS.within(allowed)
        taken = fewer.connections.everyone + fewer.bulk.everyone + fewer.handshakes.everyone
        assert taken <= allowed - BUDGETS.own_descriptors and fewer.connections.prefix >= 16 <= fewer.bulk.prefix
        assert fewer.connections.prefix + fewer.bulk.prefix + fewer.handshakes.prefix <= allowed // 4
    assert BUDGETS.within(BUDGETS.descriptors) is BUDGETS


@in_real_time
async def test_a_transport_asks_its_system_for_descriptors_and_keeps_to_what_it_gets(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[int] = []

    def allow(wanted: int) -> int:
        asked.append(wanted)
        return 1024

    monkeypatch.setattr("swarmcli.network.transports.tcp.transport.allow_descriptors", allow)
    transport = TCPTransport(Identity.from_seed(1))
    assert asked == [BUDGETS.descriptors] and transport.limits.budgets == BUDGETS.within(1024)
    await transport.close()


# The ledger


def test_each_bound_holds_by_itself() -> None:
    ledger = Ledger(Budget(identity=4, prefix=6, shared=8, everyone=10))
    assert ledger.charge("a", HOME, 4) and not ledger.charge("a", HOME, 1)
    assert ledger.charge("b", HOME, 2) and not ledger.charge("c", HOME, 1)
    assert ledger.charge("c", AWAY, 3) and not ledger.charge("d", LAN, 2)
    assert ledger.crowded(HOME) == HOME and ledger.crowded(LAN) is None and ledger.crowded(LAN, 2) == HOME
    ledger.give_back("a", HOME, 4)
    assert ledger.charge("d", LAN, 4) and ledger.charge("e", HOME, 1)
    assert (ledger.taken, ledger.of_identity("a")) == (10, 0)


# Memory


@simulated
async def test_a_payload_takes_no_memory_beyond_the_budget_and_waits_for_its_reader() -> None:
    limits = NetworkLimits(budgets=Budgets(payloads=Budget(*[100_000] * 4)))
    async with town() as place:
        victim, friend = await place.peer(0, host(0, 1), limits=limits), await place.peer(1, host(1, 1))
        payloads, go, sizes = victim.ledgers.payloads, asyncio.Event(), list[int]()

        async def collect(peer: object, request: Number, stream: Stream) -> None:
            await go.wait()
            sizes.append((await stream.receive(Number))[1].nbytes)
            for _ in range(2):  # memory of its reader costs nothing
                _, payload = await stream.receive(Number, lambda message, size: memoryview(bytearray(size)))
                sizes.append(payload.nbytes)

        victim.serve_stream("collect", Number, collect)
        friend.learn(victim.peer_id, victim.addresses)
        async with friend.stream(victim.peer_id, "collect", Number(0), timeout=5) as stream:
            for size in (90_000, 20_000, 200_000):
                await stream.send(Number(0), bytes(size))
            await asyncio.sleep(5)
            assert 90_000 < payloads.taken < 100_000, "the second one waits in its sender"
            go.set()
            await asyncio.sleep(1)
        assert sizes == [90_000, 20_000, 200_000] and payloads.taken == 0


@pytest.mark.parametrize("staying", [False, True])
@simulated
async def test_strangers_of_one_prefix_do_not_keep_payloads_of_others_waiting(staying: bool) -> None:
    """Two attackers of one network fill everyone's memory; the payload of a third network comes through, at last when
    they are taken for dead, or give way after ten seconds."""
    million = 1_000_000
    budget = Budget(2 * million, 4 * million, 4 * million, 4 * million)
    limits = NetworkLimits(max_payload=million, budgets=Budgets(payloads=budget))
    async with town() as place:
        victim, friend = await place.peer(0, host(0, 1), limits=limits), await place.peer(1, host(1, 1))
        received: asyncio.Queue[int] = asyncio.Queue()

        async def collect(peer: object, request: Number, stream: Stream) -> None:
            received.put_nowait((await stream.receive(Number))[1].nbytes)

        victim.serve_stream("collect", Number, collect)
        alive: list[asyncio.Task[None]] = []
        for attacker in [place.attacker(n, host(9, n)) for n in (60, 61)]:
            control, _ = await attacker.dial(victim, Purpose.CONTROL)
            alive += [asyncio.create_task(stay_alive(control))] if staying else []
            for _ in range(2):
                connection, _ = await attacker.dial(victim, Purpose.BULK)
                await connection.send(wire.encode(Open("hold", Number(0))))
                await connection.send(wire.encode(Piece(Number(0))), [bytes(950_000)])
        await asyncio.sleep(1)
        assert victim.ledgers.payloads.taken > 3.8 * million
        friend.learn(victim.peer_id, victim.addresses)
        try:
            async with friend.stream(victim.peer_id, "collect", Number(0), timeout=5) as stream:
                await stream.send(Number(1), bytes(500_000))
                assert await asyncio.wait_for(received.get(), 30) == 500_000
        finally:
            for task in alive:
                task.cancel()
        assert victim.ledgers.payloads.taken <= 4 * million
    assert victim.ledgers.payloads.taken == 0, "nothing is left in the books"


def held(peer: Endpoint, victim: Endpoint, size: int, count: int = 1) -> list[asyncio.Task[bytes]]:
    """Calls that take their time."""
    peer.learn(victim.peer_id, victim.addresses)
    calls = (peer.call(victim.peer_id, "wait", bytes(size), bytes, timeout=150) for _ in range(count))
    return [asyncio.create_task(each) for each in calls]


@simulated
async def test_many_identities_of_one_prefix_share_the_memory_of_their_requests() -> None:
    limits = NetworkLimits(budgets=Budgets(requests=Budget(100_000, 150_000, 1 << 20, 1 << 20)))
    async with town() as place:
        victim = await place.peer(0, host(0, 1), limits=limits)
        many = [await place.peer(n, host(9, n)) for n in range(1, 6)]
        calls = [call for each in many for call in held(each, victim, BUDGETS.free_bytes + 70_000)]
        await asyncio.sleep(5)
        assert sum(call.done() for call in calls) == 3, "two of five fit"
        await asyncio.gather(*calls, return_exceptions=True)
        assert victim.ledgers.requests.taken == 0


@simulated
async def test_many_identities_of_one_prefix_share_the_memory_of_calls_that_wait() -> None:
    """Each of 32,000 empty ones took 4 KiB, for as long as a service lets callers wait."""
    call, free = 4 << 10, 15  # bytes; calls of one connection
    limits = NetworkLimits(budgets=Budgets(requests=Budget(20 * call, 30 * call, 100 * call, 100 * call)))
    async with town() as place:
        victim = await place.peer(0, host(0, 1), limits=limits)
        floods = [held(await place.peer(n, host(9, n)), victim, 0, 50) for n in range(1, 4)]
        await asyncio.sleep(5)
        waiting = [sum(not call.done() for call in flood) for flood in floods]
        assert free + 19 <= max(waiting) <= free + 21 and 3 * free + 28 <= sum(waiting) <= 3 * free + 33
        refused = next(call.exception() for call in floods[0] if call.done())
        assert isinstance(refused, CallRefused) and refused.code == "busy"
        own = held(await place.peer(4, host(8, 1)), victim, 0, 10)
        await asyncio.sleep(5)
        assert not any(call.done() for call in own), "others are heard as ever"
        await asyncio.gather(*own, *(call for flood in floods for call in flood), return_exceptions=True)
        assert victim.ledgers.requests.taken == 0


# Connections


@simulated
async def test_a_flood_of_identities_from_one_prefix_costs_nobody_else_his_connection() -> None:
    """Those who have been here for long stay, even of the same prefix, and of those who came the newest do."""
    async with town() as place:
        limits = NetworkLimits(budgets=Budgets(connections=Budget(4, 8, 8, 32)))
        victim = await place.peer(0, host(0, 1), limits=limits)
        others = [await place.peer(n, host(9 if n < 5 else n, n)) for n in range(1, 9)]
        for each in others:
            each.learn(victim.peer_id, victim.addresses)
            await reaches(each, victim)
        await asyncio.sleep(BUDGETS.standing + 10)
        for number in range(60, 100):
            await place.attacker(number, host(9, number)).dial(victim, Purpose.CONTROL)
            await asyncio.sleep(0.2)
        await asyncio.sleep(5)
        assert all(victim.is_connected(each.peer_id) for each in others)
        assert len(victim.connected()) <= 8 + 4


@simulated
async def test_whoever_dials_on_and_on_keeps_no_more_connections_than_an_identity_may() -> None:
    async with town() as place:
        limits = NetworkLimits(budgets=Budgets(connections=Budget(4, 100, 100, 100)))
        victim, attacker = await place.peer(0, host(0, 1), limits=limits), place.attacker(66, host(9, 1))
        heard = []
        for _ in range(20):
            heard.append((await attacker.dial(victim, Purpose.CONTROL))[1])
            await asyncio.sleep(0.1)
        await asyncio.sleep(3)
        assert victim.statistics().control_connections == 4
        assert sum(bool(each.ends) for each in heard) == 16


@simulated
async def test_bulk_connections_of_one_prefix_are_bounded_and_unused_ones_make_room() -> None:
    async with town() as place:
        victim = await place.peer(0, host(0, 1), limits=NetworkLimits(budgets=Budgets(bulk=Budget(4, 6, 6, 100))))
        used = []
        for attacker in [place.attacker(n, host(9, n)) for n in (60, 61, 62)]:
            await attacker.dial(victim, Purpose.CONTROL)
            for number in range(4):
                connection, heard = await attacker.dial(victim, Purpose.BULK)
                if number < 3 and len(used) < 6:
                    await connection.send(wire.encode(Open("hold", Number(0))))
                    used.append(heard)
                await asyncio.sleep(0.1)
        assert victim.statistics().bulk_connections == 6
        assert not any(heard.ends for heard in used), "what is used stays"
        assert not victim.statistics().violations, "of a prefix, nobody has broken a rule"


@simulated
async def test_whoever_never_greets_is_let_go() -> None:
    async with town() as place:
        victim = await place.peer(0, host(0, 1))
        _, heard = await place.attacker(66, host(9, 1)).dial(victim, Purpose.CONTROL, greet=False)
        await asyncio.sleep(15)
        assert heard.ends and victim.statistics().control_connections == 0
