"""Ports from which several connections are dialed, ends that dial each other at once, and connections that only ask."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest

from swarmcli.errors import ConnectError, HandshakeError
from swarmcli.network import Endpoint, Identity, PeerID, Purpose
from swarmcli.network.addresses import parse_address
from swarmcli.network.transports.base import Connection, LocalPort
from swarmcli.network.transports.tcp import TCPTransport
from swarmcli.network.transports.tcp.local_port import TCPLocalPort
from tests.network.worlds import Attacker, MemoryWorld, TCPWorld, World, town
from tests.simulation import in_real_time, simulated

ANN, BEN, EVE = (Identity.from_seed(seed) for seed in range(3))
CROSSING = 0.9


@pytest.fixture(params=[MemoryWorld, TCPWorld], ids=["memory", "tcp"])
def world(request: pytest.FixtureRequest) -> World:
    made: World = request.param()
    return made


def test_two_listeners_see_one_port(world: World) -> None:
    async def main() -> None:
        accepted: asyncio.Queue[Connection] = asyncio.Queue()
        dialer, *listeners = (world.transport(seed) for seed in range(3))
        port = dialer.local_port("IPv4" if world.name == "tcp" else "memory")
        addresses = [(await listener.listen(accepted.put_nowait))[0] for listener in listeners]
        seen = [await port.probe(address, 5) for address in addresses]
        assert seen[0] == seen[1] is not None
        assert [(await accepted.get()).purpose for _ in seen] == [Purpose.PROBE] * 2
        with pytest.raises(ConnectError):
            await port.probe(world.nowhere(), 5)
        port.close()
        port.close()
        for transport in (dialer, *listeners):
            await transport.close()

    world.run(main())


class ConnectedPort(TCPLocalPort):
    """One end of a connection that two ends have dialed at the same moment: on loopback, nothing is slow enough."""

    def __init__(self, transport: TCPTransport, connected: socket.socket) -> None:
        super().__init__("IPv4", transport._greet_on)
        self._end = connected

    async def _connected(self, place: object) -> socket.socket:
        self._end.setblocking(False)
        return self._end


@asynccontextmanager
async def met() -> AsyncIterator[tuple[ConnectedPort, ConnectedPort]]:
    """Two ports of Ann and Ben whose sockets are connected."""
    transports = [TCPTransport(each, host="127.0.0.1") for each in (ANN, BEN)]
    with socket.create_server(("127.0.0.1", 0)) as server:
        ends = [socket.create_connection(server.getsockname()), server.accept()[0]]
    ports = [ConnectedPort(*each) for each in zip(transports, ends, strict=True)]
    async with asyncio.timeout(60):
        try:
            yield ports[0], ports[1]
        finally:
            for port in ports:
                port.close()
            for transport in transports:
                await transport.close()


async def handshakes(ann: LocalPort, ben: LocalPort, **twist: Any) -> Sequence[Connection | BaseException]:
    """The outcomes at Ann, who leads the handshake, and at Ben. `twist` changes Ben's side."""
    bens: dict[str, Any] = {"peer": ANN.peer_id, "purpose": Purpose.BULK, "leads": False, **twist}
    times = {"crossing": 5.0, "timeout": 5.0}
    return await asyncio.gather(
        ann.meet("tcp://127.0.0.1:1", BEN.peer_id, Purpose.BULK, leads=True, **times),
        ben.meet("tcp://127.0.0.1:1", bens.pop("peer"), bens.pop("purpose"), **bens, **times),
        return_exceptions=True,
    )


@in_real_time
async def test_both_ends_prove_themselves_on_what_both_have_dialed() -> None:
    async with met() as ports:
        ann, ben = await handshakes(*ports)
        assert not isinstance(ann, BaseException) and not isinstance(ben, BaseException)
        assert (ann.peer_id, ben.peer_id) == (BEN.peer_id, ANN.peer_id)
        assert (ann.dialed, ben.dialed) == (True, False)
        assert ann.punched and ben.punched and not ann.relayed
        assert ben.purpose is Purpose.BULK


@pytest.mark.parametrize("twist", [{"leads": True}, {"peer": EVE.peer_id}, {"purpose": Purpose.CONTROL}], ids=str)
@in_real_time
async def test_ends_that_expect_something_else_are_left_with_nothing(twist: dict[str, Any]) -> None:
    async with met() as ports:
        _, ben = await handshakes(*ports, **twist)
        assert isinstance(ben, HandshakeError)


Heard = list[tuple[PeerID, str, bytes]]


async def started(world: World, ends: AsyncExitStack, seed: int) -> Endpoint:
    endpoint = Endpoint(world.transport(seed), seed=seed)
    ends.push_async_callback(endpoint.close)
    await endpoint.start()
    return endpoint


def test_a_probe_tells_where_it_is_seen_and_its_word_counts_at_the_listener_alone(world: World) -> None:
    async def main() -> None:
        async with AsyncExitStack() as ends:
            asked, asker = await started(world, ends, 1), await started(world, ends, 2)
            heard: Heard = []
            came = asyncio.Event()

            def hear(peer: PeerID, remote_address: str, message: bytes) -> None:
                heard.append((peer, remote_address, message))
                came.set()

            asked.probes.heard = hear
            await asker.connect(asked.addresses[0], timeout=5)
            place = asked.addresses[0]
            seen = await asker.probe(place, asked.peer_id, b"a word", timeout=5)
            assert (
                seen is not None and parse_address(seen).host == parse_address(place).host
            ) or world.name == "memory"
            await came.wait()
            ((peer, remote_address, message),) = heard
            assert (peer, remote_address, message) == (asker.peer_id, seen, b"a word")
            assert not asked.seen(asker.peer_id).dialed and asker.seen(asked.peer_id).dialed  # type: ignore[union-attr]

            # One that this end dialed brings no word, however it is handed over, and none is as long as it likes.
            dialed, recorder = await Attacker(world.transport(3)).dial(asker, Purpose.PROBE)
            await dialed.send(bytes(100_000))
            await recorder.ended.wait()
            assert len(heard) == 1

    world.run(main())


@simulated
async def test_whoever_holds_many_probes_keeps_nobodys_word_from_being_heard() -> None:
    async with town() as place:
        asked, honest, earlier = [await place.peer(seed, f"198.51.100.{seed}") for seed in (1, 2, 3)]
        heard: Heard = []
        asked.probes.heard = lambda *word: heard.append(word)
        hoarders = [place.attacker(n, f"203.0.113.{n}") for n in range(10, 160)]  # many hosts of one network
        held = [await Attacker(earlier.transport).dial(asked, Purpose.PROBE)]
        held += [await Attacker(earlier.transport).dial(asked, Purpose.PROBE) for _ in range(2)]
        held += [await hoarder.dial(asked, Purpose.PROBE) for hoarder in hoarders * 2]
        await honest.probe(asked.addresses[0], asked.peer_id, b"a proof", timeout=5)
        await asyncio.sleep(1)
        assert [message for _, _, message in heard] == [b"a proof"]
        standing = [not recorder.ends for _, recorder in held]
        assert standing == [True] * 3 + [False] * 48 + [True] * 252, "who holds the most loses its oldest"
