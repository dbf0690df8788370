"""Connections through a relay: what works over them, and what their relay cannot do."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from swarmcli.errors import (
    AddressError,
    CallRefused,
    ConnectError,
    ConnectionLost,
    HandshakeError,
    PeerUnreachable,
    WrongPeerError,
)
from swarmcli.network import Endpoint, Identity, PeerID, Purpose, Stream
from swarmcli.network.transports.tcp.handshake import GreetingKind, Message, expect
from swarmcli.reach.relay_messages import JOIN, OLD_CONNECT, Joining, JoinRequest, OldConnect
from swarmcli.reach.relaying import Relay, RelayBudgets, _End
from swarmcli.testing import MemoryNetwork
from tests.network.worlds import Number, reaches, slow
from tests.reach.relay_worlds import Client, Scene, Word, payload, scene, tcp_scene
from tests.simulation import in_real_time, now, simulated

MIB = 1 << 20


def second_is_farther(source: PeerID, target: PeerID) -> float:
    """Latency by which, of two relays with the seeds 0 and 1, the first one is nearer, and so dialed first."""
    return 0.1 if Identity.from_seed(1).peer_id in (source, target) else 0.01


async def talk(peers: Scene) -> None:
    relay_endpoint, relay = await peers.relay()
    a, b = await peers.pair(relay_endpoint)
    assert await reaches(a.endpoint, b.endpoint) and await reaches(b.endpoint, a.endpoint)
    seen = a.endpoint.seen(b.peer_id)
    assert seen is not None and seen.relayed and seen.remote_address == b.address(relay_endpoint)
    large = payload(3 * MIB)
    for one, other in ((a, b), (b, a)):
        async with one.endpoint.stream(other.peer_id, "echo", Number(2), timeout=10) as stream:
            for n in range(2):
                await stream.send(Number(n), large)
                assert await stream.receive(Number) == (Number(n), large)
    figures = relay.statistics()
    assert figures.circuits >= 1 and figures.bytes_passed > 12 * MIB


@in_real_time
async def test_two_clients_call_each_other_and_send_streams_both_ways() -> None:
    async with tcp_scene() as peers:
        await talk(peers)
    assert asyncio.all_tasks() == {asyncio.current_task()}


class LyingRelay(Relay):
    """Gives reservations, and treats circuits as a test wants."""

    def __init__(self, endpoint: Endpoint, *, swap: dict[PeerID, PeerID], twist: Callable[[bytes], bytes]) -> None:
        super().__init__(endpoint)
        self.heard: list[bytes] = []
        self._swap, self._twist = swap, twist

    async def _join(self, source: PeerID, request: JoinRequest) -> Joining:
        return await super()._join(source, JoinRequest(self._swap.get(request.target, request.target)))

    def _said(self, token: bytes) -> _End:
        end = super()._said(token)
        pass_on = end.buffer_updated

        def lie(nbytes: int) -> None:
            data = bytes(self.memory[:nbytes])
            self.heard.append(data)
            self.memory[:nbytes] = self._twist(data)
            pass_on(nbytes)

        end.buffer_updated = lie  # type: ignore[method-assign]
        return end


async def liar(
    peers: Scene, *, swap: dict[PeerID, PeerID] | None = None, twist: Callable[[bytes], bytes] = bytes
) -> tuple[Endpoint, LyingRelay]:
    endpoint = await peers.listener(5)
    relay = LyingRelay(endpoint, swap={} if swap is None else swap, twist=twist)
    await relay.start()
    return endpoint, relay


@simulated
async def test_a_relay_hears_nothing_but_ciphertext() -> None:
    async with scene() as peers:
        endpoint, relay = await liar(peers)
        a, b = await peers.pair(endpoint)
        secret = b"a secret that is long enough to be found" * 100
        async with a.endpoint.stream(b.peer_id, "echo", Number(1), timeout=10) as stream:
            await stream.send(Number(1), secret)
            assert (await stream.receive(Number))[1] == secret
        heard = b"".join(relay.heard)
        assert len(heard) > 2 * len(secret) and b"a secret" not in heard and b"echo" not in heard


@simulated
async def test_a_relay_that_swaps_peers_fools_nobody() -> None:
    async with scene() as peers:
        swap: dict[PeerID, PeerID] = {}
        endpoint, _ = await liar(peers, swap=swap)
        a, b = await peers.pair(endpoint)
        c = await peers.client(2)
        await c.reserve(endpoint)
        swap[b.peer_id] = c.peer_id
        with pytest.raises(WrongPeerError):
            await a.transport.dial(b.address(endpoint), b.peer_id, Purpose.CONTROL, 5)
        with pytest.raises(PeerUnreachable):
            await reaches(a.endpoint, b.endpoint)
        assert not c.endpoint.is_connected(a.peer_id) and not b.endpoint.is_connected(a.peer_id)


@simulated
async def test_a_relay_that_changes_a_byte_ends_the_connection_and_no_message_is_changed() -> None:
    async with scene() as peers:
        lying = False

        def twist(data: bytes) -> bytes:
            return data[:-1] + bytes([data[-1] ^ 1]) if lying else data

        endpoint, _ = await liar(peers, twist=twist)
        a, b = await peers.pair(endpoint)
        assert await reaches(a.endpoint, b.endpoint)
        lying = True
        with pytest.raises(ConnectionLost):
            await reaches(a.endpoint, b.endpoint)
        assert sum(b.transport.refusals.values()) == 1
        with pytest.raises(PeerUnreachable):
            await reaches(a.endpoint, b.endpoint)  # not even a handshake comes about
        lying = False
        await asyncio.sleep(60)  # until the address is tried again
        assert await reaches(a.endpoint, b.endpoint)


@simulated
async def test_a_relay_brings_only_those_who_reserved_there() -> None:
    async with scene() as peers:
        endpoint, _ = await liar(peers)
        a, b = await peers.pair(endpoint)
        b.transport.relays.clear()  # as it is of a client that the relay dials unasked
        with pytest.raises(ConnectError, match="no reservation"):
            await a.transport.dial(b.address(endpoint), b.peer_id, Purpose.CONTROL, 5)


@simulated
async def test_what_cannot_be_dialed_is_refused_with_a_reason() -> None:
    async with scene() as peers:
        endpoint, relay = await peers.relay()
        a, b = await peers.pair(endpoint)
        c = await peers.client(2)  # connected, without a reservation
        await c.endpoint.connect(endpoint.addresses[0], timeout=5)

        async def dial(address: str, expected: PeerID | None = None) -> None:
            await a.transport.dial(address, expected, Purpose.CONTROL, 5)

        with pytest.raises(ConnectError, match="has no reservation"):
            await dial(c.address(endpoint))
        with pytest.raises(ConnectError, match="this peer itself"):
            await dial(a.address(endpoint))
        with pytest.raises(ConnectError, match="third peer"):
            await dial(f"relay://{b.peer_id.text}/{b.peer_id.text}")
        with pytest.raises(ConnectError, match="no address of the relay"):
            await dial(f"relay://{(await peers.client(3)).peer_id.text}/{b.peer_id.text}")
        with pytest.raises(WrongPeerError):
            await dial(b.address(endpoint), c.peer_id)
        with pytest.raises(AddressError):
            await dial(endpoint.addresses[0])
        for target in (endpoint.peer_id, a.peer_id):
            with pytest.raises(CallRefused, match="three peers"):
                await a.endpoint.call(endpoint.peer_id, JOIN, JoinRequest(target), Joining, timeout=5)
        assert relay.statistics().circuits == 0


@in_real_time
async def test_a_circuit_goes_from_an_address_of_this_machine_which_may_lose_it() -> None:
    async with tcp_scene() as peers:
        endpoint, _ = await peers.relay()
        a, b = await peers.pair(endpoint)
        connection = await a.transport.dial(b.address(endpoint), b.peer_id, Purpose.BULK, 5)
        assert connection.local_host == "127.0.0.1" and not connection.on_this_computer
        connection.abort("enough")


@simulated
async def test_a_relay_is_dialed_where_it_answers_now_before_where_it_last_did() -> None:
    """One of its two addresses fell silent, which used up all the time that a circuit has to be made."""
    network = MemoryNetwork(seed=1)
    router = network.router("203.0.113.1", hairpin=True)
    async with scene(network) as peers:
        endpoint = await peers.listener(0, behind=router)
        relay = Relay(endpoint)
        await relay.start()
        peers.at_end(relay.close)
        a, b = await peers.client(0, behind=router), await peers.client(1, behind=router)
        for client in (a, b):
            await client.reserve(endpoint)
        outer = router.forward(4000, endpoint.peer_id)
        await a.endpoint.probe(outer, endpoint.peer_id, timeout=5)
        router.forget(4000)
        connection = await a.transport.dial(b.address(endpoint), b.peer_id, Purpose.BULK, 5)
        assert connection.peer_id == b.peer_id
        connection.abort("enough")


@in_real_time
async def test_who_comes_with_another_version_or_no_token_hears_so_in_the_clear() -> None:
    async with tcp_scene() as peers:
        endpoint, _ = await peers.relay()
        a = await peers.client(0)
        await a.endpoint.connect(endpoint.addresses[0], timeout=5)
        b = await peers.client(1)
        await b.reserve(endpoint)
        token = (await a.endpoint.call(endpoint.peer_id, JOIN, JoinRequest(b.peer_id), Joining, timeout=5)).token
        first = Word(token)
        await a.endpoint.dial_plain(endpoint.peer_id, first, timeout=5)
        expect(GreetingKind.JOINED, await first.answer)
        other = Message(GreetingKind.JOIN, bytes(16), version=99).encode()
        for words, reason in ((other, "versions differ"), (None, "no such token"), (b"SWAM", "another program")):
            word = Word(token, words)  # that was said once
            await a.endpoint.dial_plain(endpoint.peer_id, word, timeout=5)
            with pytest.raises(HandshakeError, match=reason):
                expect(GreetingKind.JOINED, await word.answer)
        with pytest.raises(CallRefused, match=r"this relay is of swarm .*: use that version"):
            async with a.endpoint.stream(endpoint.peer_id, OLD_CONNECT, OldConnect(a.peer_id), timeout=5) as stream:
                await stream.receive(Number)


@simulated
async def test_a_relay_that_dies_takes_its_circuits_along_and_another_one_is_used() -> None:
    async with scene(latency=second_is_farther) as peers:
        first, _ = await peers.relay(0)
        second, _ = await peers.relay(1)
        a, b = await peers.pair(first)
        for client in (a, b):
            await client.reserve(second)
        await a.meet(b)
        b.endpoint.serve("slow", Number, slow(100))
        call = asyncio.create_task(a.endpoint.call(b.peer_id, "slow", Number(1), Number, timeout=50))
        await asyncio.sleep(1)
        began = now()
        peers.network.kill(first.peer_id)
        with pytest.raises(ConnectionLost):
            await call
        assert await reaches(a.endpoint, b.endpoint) and now() - began < 5
        seen = a.endpoint.seen(b.peer_id)
        assert seen is not None and seen.remote_address == b.address(second)


@simulated
async def test_a_reader_that_does_not_read_stops_the_sender_and_fills_no_relay() -> None:
    async with scene() as peers:
        endpoint, relay = await peers.relay()
        a, b = await peers.pair(endpoint)

        async def sleepy(peer: PeerID, request: Number, stream: Stream) -> None:
            await asyncio.sleep(100)
            for n in range(request.n):
                assert (await stream.receive(Number))[0] == Number(n)
            await stream.send(Number(0))

        b.endpoint.serve_stream("sleepy", Number, sleepy)
        sent = 0
        async with a.endpoint.stream(b.peer_id, "sleepy", Number(200), timeout=10) as stream:

            async def send() -> None:
                nonlocal sent
                for n in range(200):
                    await stream.send(Number(n), payload(MIB // 8))
                    sent += MIB // 8

            sending = asyncio.create_task(send())
            await asyncio.sleep(50)
            # The window of b's stream takes 4 MiB; what is under way before it is small, wherever it is.
            passed = relay.statistics().bytes_passed
            assert 4 * MIB < passed < 6 * MIB and sent - passed < 2 * MIB
            assert await reaches(b.endpoint, a.endpoint)
            await sending
            assert (await stream.receive(Number))[0] == Number(0)


async def flood(a: Client, b: Client) -> None:
    """Sends as much as passes, there and back."""
    async with a.endpoint.stream(b.peer_id, "echo", Number(1000), timeout=10) as stream:
        for _ in range(1000):
            await stream.send(Number(0), payload(1_000_000))
            await stream.receive(Number)


@pytest.mark.parametrize("hangs_up", [False, True])
@simulated
async def test_the_keys_of_one_network_have_the_rate_of_one_peer_together(hangs_up: bool) -> None:
    """Before, two pairs of keys on one machine took all that a relay passes on."""
    network = MemoryNetwork(seed=1)
    routers = [network.router(f"198.51.100.{number}") for number in (7, 99)]
    async with scene(network) as peers:
        budgets = RelayBudgets(rate=2e6, rate_per_peer=1e6, burst_seconds=0.2)
        endpoint, relay = await peers.relay(budgets=budgets, host="203.0.113.1")
        keys = [await peers.client(number, behind=routers[number % 2]) for number in range(6)]
        for client in keys:
            await client.reserve(endpoint)
        for a, b in zip(keys[:3], keys[3:], strict=True):
            await a.meet(b)
        floods = [asyncio.create_task(flood(a, b)) for a, b in zip(keys[:3], keys[3:], strict=True)]
        await asyncio.sleep(20)
        if hangs_up:  # from then on the relay sees nobody of them
            for client in keys:
                client.endpoint.disconnect(endpoint.peer_id, "the circuits stand")
            before = relay.statistics().bytes_passed
            await asyncio.sleep(20)
            assert not endpoint.connected()
            assert 0.5 * 20e6 < relay.statistics().bytes_passed - before < 1.1 * 20e6
        else:
            assert 0.5 * 20e6 < relay.statistics().bytes_passed < 1.1 * 20e6
        for task in floods:
            task.cancel()
        await asyncio.wait(floods)


@simulated
async def test_half_of_what_a_user_lends_is_left_to_the_peer_that_relays() -> None:
    """Before, circuits of strangers took nearly all of it: each got as much as an own stream."""
    async with scene() as peers:
        endpoint, relay = await peers.relay()
        mate = await peers.listener(1)
        keys = [await peers.client(number) for number in range(6)]
        for client in keys:
            await client.reserve(endpoint)
        floods = []
        for a, b in zip(keys[::2], keys[1::2], strict=True):
            await a.meet(b)
            floods.append(asyncio.create_task(flood(a, b)))
        await asyncio.sleep(2)
        endpoint.limit_rates(upload=1e6, download=None)
        await asyncio.sleep(5)
        endpoint.learn(mate.peer_id, mate.addresses)
        before, began = relay.statistics().bytes_passed, now()
        async with endpoint.stream(mate.peer_id, "echo", Number(1), timeout=10) as stream:
            await stream.send(Number(0), payload(5_000_000))
            await stream.receive(Number)
        took, passed = now() - began, relay.statistics().bytes_passed - before
        assert took < 12 and 0.3e6 < passed / took < 0.55e6
        for task in floods:
            task.cancel()
        await asyncio.wait(floods)


@simulated
async def test_a_limit_holds_for_circuits_and_nobody_on_them_is_taken_for_dead() -> None:
    """At 20 kB/s a piece of a circuit takes seven seconds, longer than silence is borne."""
    async with scene() as it:
        relay, _ = await it.relay(1)
        a, b = await it.pair(relay)

        async def sink(peer: PeerID, request: Number, stream: Stream) -> None:
            while True:
                await stream.receive(Number)

        b.endpoint.serve_stream("sink", Number, sink)
        a.endpoint.limit_rates(20e3, None)

        async def pour() -> None:
            async with a.endpoint.stream(b.peer_id, "sink", Number(0), timeout=60) as stream:
                while True:
                    await stream.send(Number(1), payload(256 << 10))

        streams = [asyncio.ensure_future(pour()) for _ in range(2)]
        await asyncio.sleep(20.0)
        before = a.endpoint.statistics().traffic.sent
        await asyncio.sleep(60.0)
        assert (a.endpoint.statistics().traffic.sent - before) / 60.0 == pytest.approx(20e3, rel=0.1)
        assert await reaches(a.endpoint, b.endpoint)
        assert not any(stream.done() for stream in streams)
        for stream in streams:
            stream.cancel()
        await asyncio.wait(streams)


@simulated
async def test_a_relay_of_an_older_version_is_named_as_one() -> None:
    async with scene() as peers:
        endpoint, _ = await peers.relay()
        a, b = await peers.pair(endpoint)
        endpoint.withdraw(JOIN)
        with pytest.raises(ConnectError, match="older version of swarm"):
            await a.transport.dial(b.address(endpoint), b.peer_id, Purpose.CONTROL, 5)
