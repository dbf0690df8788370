"""Reach as a whole, in virtual time on a memory network with routers."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest

from swarmcli.errors import CallRefused
from swarmcli.events import Noticed, WokeUp
from swarmcli.network.addresses import Scope
from swarmcli.network.identity import Identity, PeerID
from swarmcli.reach.budgets import BACK_LIMITS
from swarmcli.reach.checks import PATIENCE, Checks
from swarmcli.reach.dialback import DIAL_BACK, DialBackReply, DialBackRequest
from swarmcli.reach.reach import REST
from swarmcli.reach.verdict import AskedContact, Family, Surroundings
from swarmcli.testing.memory_router import MemoryRouter
from tests.reach.homes import PORT, Homes
from tests.simulation import now, simulated


@simulated
async def test_the_first_peer_and_its_neighbours_need_nobody():
    async with Homes() as homes:
        router = homes.router("5.2.0.1")
        first = await homes.peer("192.168.1.2", router)
        assert first.reach.dialable and first.endpoint.addresses == (f"memory://192.168.1.2:{PORT}",)
        second = await homes.peer("192.168.1.3", router, contacts=[first])
        before = asyncio.get_running_loop().time()
        assert await second.reach.settle(5) and asyncio.get_running_loop().time() == before
        assert second.reach.dialable and second.reach.scope is Scope.LAN
        assert "peers in this network can dial" in second.reach.sentence()
        assert first.reach.dialable and first.reach.checks == second.reach.checks == 0


@simulated
async def test_behind_a_router_a_peer_is_a_client_until_a_dial_back_proves_the_opposite():
    async with Homes(latency=0.05) as homes:
        router = homes.router("5.2.0.1")
        public = await homes.peer("5.1.0.1")
        home = await homes.peer("192.168.1.2", router, contacts=[public])
        begun = now()
        assert home.endpoint.client_mode  # before it is known
        assert await home.reach.settle(5)
        assert now() - begun <= PATIENCE + 0.1
        assert home.reach.dialable is False and home.endpoint.client_mode
        assert "lets nobody in" in home.reach.sentence() == home.said[-1].sentence

        router.forward(PORT, home.endpoint.peer_id)
        await asyncio.sleep(1.3 * REST)
        assert home.reach.dialable and not home.endpoint.client_mode
        assert home.endpoint.addresses == (f"memory://5.2.0.1:{PORT}",)
        assert public.endpoint.own_word(home.endpoint.peer_id)[-1] == f"memory://5.2.0.1:{PORT}"

        router.forget(PORT)
        await asyncio.sleep(1.3 * REST)
        assert home.endpoint.client_mode and home.said[-1].dialable is False
        assert [event.dialable for event in home.said] == [None, False, True, False]


@simulated
async def test_a_public_newcomer_is_proved_at_once_and_proves_the_first_one():
    async with Homes(latency=0.05) as homes:
        first = await homes.peer("5.1.0.1")
        assert first.endpoint.addresses == (first.address,)
        second = await homes.peer("5.2.0.1", contacts=[first])
        begun = now()
        assert second.endpoint.client_mode and await second.reach.settle(5)
        assert now() - begun < 1.0
        assert second.reach.verdicts[0].how == "dialed back" and second.endpoint.addresses == (second.address,)
        assert first.reach.verdicts[0].how == "dialed from outside" and first.reach.checks == 0


@simulated
async def test_a_silent_contact_alone_decides_nothing():
    """It says that it will dial the newcomer, and does nothing. Two others dial."""
    async with Homes() as homes:
        liar = await homes.peer("5.9.0.1", honest=False)

        async def lie(peer: PeerID, request: DialBackRequest) -> DialBackReply:
            return DialBackReply("memory://5.66.0.1:9")

        liar.endpoint.serve(DIAL_BACK, DialBackRequest, lie)
        honest = [await homes.peer(f"5.{number}.0.1") for number in (1, 2)]
        newcomer = await homes.peer("5.5.0.1", contacts=[liar, *honest])
        assert await newcomer.reach.settle(5)
        assert newcomer.reach.dialable and newcomer.endpoint.addresses == (newcomer.address,)

        alone = await homes.peer("5.6.0.1", contacts=[liar])
        assert await alone.reach.settle(5) and alone.reach.dialable is False
        await alone.meet(honest[0])  # and it recovers once it knows an honest one
        await alone.meet(honest[1])
        await asyncio.sleep(30)
        assert alone.reach.dialable and alone.endpoint.addresses == (alone.address,)


@simulated
async def test_who_says_that_a_dial_worked_has_to_have_dialed():
    """A peer in the newcomer's own home can dial it, but that proves nothing about dials from the liar's network."""
    async with Homes() as homes:
        router = homes.router("5.2.0.1")
        liar = await homes.peer("5.9.0.1", honest=False)
        nonces: list[bytes] = []

        async def lie(peer: PeerID, request: DialBackRequest) -> DialBackReply:
            nonces.append(request.nonce)
            return DialBackReply("memory://5.2.0.1:4000")

        liar.endpoint.serve(DIAL_BACK, DialBackRequest, lie)
        newcomer = await homes.peer("192.168.1.2", router, contacts=[liar])
        assert await newcomer.reach.settle(5) and nonces
        insider = await homes.peer("192.168.1.3", router, honest=False)
        place = f"memory://192.168.1.2:{PORT}"
        await insider.endpoint.probe(place, newcomer.endpoint.peer_id, nonces[0], timeout=1)
        await asyncio.sleep(1)
        assert newcomer.reach.dialable is False


@simulated
async def test_one_bad_moment_takes_no_proved_verdict_away():
    async with Homes() as homes:
        contacts = [await homes.peer(f"5.{number}.0.1") for number in range(10, 17)]
        router = homes.router("5.2.0.1")
        home = await homes.peer("192.168.1.2", router, expects=True)
        router.forward(PORT, home.endpoint.peer_id)
        for contact in contacts:
            await home.meet(contact)
        assert await home.reach.settle(5) and home.reach.dialable
        for lasting in (False, True):
            checks = home.reach.checks
            router.forget(PORT)
            while home.reach.checks == checks:  # noqa: ASYNC110  no event
                await asyncio.sleep(1)
            await asyncio.sleep(PATIENCE + 1)
            assert home.reach.dialable
            if not lasting:
                router.forward(PORT, home.endpoint.peer_id)
            await asyncio.sleep(25)
            assert home.reach.checks == checks + 2 and home.reach.dialable is not lasting


@simulated
async def test_nobody_can_be_made_to_dial_more_than_its_budget():
    """A flood of requests, by many identities that stand in one network, against hosts of that network, and against
    others that are merely named."""
    rate, burst = BACK_LIMITS["network"]
    async with Homes() as homes:
        public = await homes.peer("5.1.0.1")
        asked = public.endpoint.peer_id

        async def flood(first: int, count: int, host: str, address: str = "") -> int:
            served = 0
            for number in range(first, first + count):
                stranger = await homes.peer(host.format(number), honest=False)
                await stranger.meet(public)
                for port in range(1024, 1060):
                    request = DialBackRequest(bytes(16), port, address and f"{address}:{port}")
                    try:
                        await stranger.endpoint.call(asked, DIAL_BACK, request, DialBackReply, timeout=9)
                        served += 1
                    except CallRefused as refusal:
                        assert refusal.code == "busy"
            await asyncio.sleep(10)
            return served

        homes.network.dials.clear()
        served = await flood(1, 12, "5.66.0.{}")
        assert served <= burst + 1 + now() * rate
        assert homes.dials_to("5.66.") == served
        served = await flood(100, 20, "of-another-family-{}", "memory://5.7.0.1")
        assert burst <= served <= burst + 1 + now() * rate
        neighbour = await homes.peer("5.7.0.2", honest=False)
        await neighbour.meet(public)
        refused = {"192.168.1.1:8080": "scope", "5.8.0.1:443": "port", "5.8.0.1:8080": "family"}
        for address, code in [("", None)] + [(f"memory://{place}", code) for place, code in refused.items()]:
            request = DialBackRequest(bytes(16), PORT, address)
            try:
                await neighbour.endpoint.call(asked, DIAL_BACK, request, DialBackReply, timeout=9)
                assert code is None, "what is only named uses up nothing of what its neighbours ask for themselves"
            except CallRefused as refusal:
                assert refusal.code == code
        public.endpoint.seen = lambda other: SimpleNamespace(relayed=True)  # type: ignore[method-assign,assignment,return-value]
        with pytest.raises(CallRefused, match="does not see where you are"):
            await neighbour.endpoint.call(asked, DIAL_BACK, request, DialBackReply, timeout=9)


@simulated
async def test_a_statement_that_does_not_hold_is_said_and_not_announced():
    async with Homes() as homes:
        router = homes.router("5.2.0.1")
        public = await homes.peer("5.1.0.1")
        stated = f"memory://5.2.0.1:{PORT}"
        home = await homes.peer("192.168.1.2", router, contacts=[public], announce=(stated,))
        assert await home.reach.settle(5)
        assert home.endpoint.addresses == ()
        warnings = [event.text for event in home.events if isinstance(event, Noticed)]
        assert len(warnings) == 1 and stated in warnings[0] and "nobody could dial this peer" in warnings[0]

        router.forward(PORT, home.endpoint.peer_id)
        await asyncio.sleep(1.3 * REST)
        assert home.endpoint.addresses == (stated,) and home.reach.verdicts[0].how == "stated"


@simulated
async def test_client_mode_stays_a_wish():
    async with Homes() as homes:
        public = await homes.peer("5.1.0.1")
        wisher = await homes.peer("5.2.0.1", contacts=[public], client_mode=True)
        assert await wisher.reach.settle(5) and wisher.reach.checks == 0
        assert wisher.endpoint.addresses == () and "client mode" in wisher.reach.sentence()
        assert homes.dials_to("5.2.0.1") == 0


@simulated
async def test_routers_and_relays_are_asked_where_nobody_can_dial_this_peer():
    async with Homes() as homes:
        router = homes.router("5.2.0.1")
        public = await homes.peer("5.1.0.1")
        relays, mappings = FakeRelays(), []

        def mapping(port: int) -> FakeMapping:
            mappings.append(FakeMapping(router))
            return mappings[-1]

        home = await homes.peer("192.168.1.2", router, contacts=[public], mapping=mapping, relays=relays)
        assert await home.reach.settle(5) and home.reach.dialable is False
        await asyncio.sleep(1)
        assert relays.running and len(mappings) == 1
        mappings[0].open(home.endpoint.peer_id, 5000)
        await asyncio.sleep(20)
        assert home.endpoint.addresses == ("memory://5.2.0.1:5000",) and home.reach.verdicts[0].how == "mapped"
        assert not relays.running  # given back
        mappings[0].lose()
        await asyncio.sleep(20)
        assert home.endpoint.client_mode and relays.running
        await home.reach.close()
        assert mappings[0].withdrawn and not relays.running


@simulated
async def test_a_public_peer_that_nobody_would_check_takes_the_place_of_a_contact_that_goes():
    """Its one contact never dials back, and dies. The peer gives up no relay until somebody has dialed it."""
    async with Homes() as homes:
        contact, relays = await homes.peer("5.1.0.1", honest=False), FakeRelays()
        public = await homes.peer("5.2.0.1", contacts=[contact], relays=relays)
        assert await public.reach.settle(5) and public.reach.dialable
        assert public.endpoint.addresses == (public.address,) and relays.running
        homes.network.kill(contact.endpoint.peer_id)
        home = await homes.peer("192.168.1.2", homes.router("5.3.0.1"), contacts=[public])
        assert await home.reach.settle(5) and home.reach.dialable is False
        await asyncio.sleep(REST)
        assert public.reach.verdicts[0].how in ("dialed back", "dialed from outside") and not relays.running


@simulated
async def test_an_assumption_ends_with_the_first_silence():
    async with Homes() as homes:
        contact = await homes.peer("5.1.0.1", honest=False)
        peer = await homes.peer("5.2.0.1", contacts=[contact])
        assert await peer.reach.settle(5) and peer.reach.dialable

        async def nod(peer: PeerID, request: DialBackRequest) -> DialBackReply:
            return DialBackReply("memory://5.2.0.1:4000")

        contact.endpoint.serve(DIAL_BACK, DialBackRequest, nod)
        await asyncio.sleep(30)
        assert peer.reach.dialable is False and peer.endpoint.addresses == ()


@simulated
async def test_an_assumed_address_stays_during_a_check_and_ends_once_somebody_checks_it():
    """The first contact never answers. Whoever else is met while it is asked again changes nothing."""
    async with Homes() as homes:

        async def hang(peer: PeerID, request: DialBackRequest) -> DialBackReply:
            await asyncio.sleep(10)
            raise CallRefused("busy", "later")

        async def nod(peer: PeerID, request: DialBackRequest) -> DialBackReply:
            return DialBackReply("memory://5.2.0.1:4000")

        contact = await homes.peer("5.1.0.1", honest=False)
        contact.endpoint.serve(DIAL_BACK, DialBackRequest, hang)
        peer = await homes.peer("5.2.0.1", contacts=[contact])
        assert await peer.reach.settle(5) and peer.reach.dialable
        for number in range(170):  # through the three early checks
            await asyncio.sleep(0.7)
            neighbour = await homes.peer(f"5.1.1.{number}", honest=False)
            neighbour.endpoint.serve(DIAL_BACK, DialBackRequest, hang)
            await peer.meet(neighbour)
            assert peer.endpoint.addresses == (peer.address,)
        await asyncio.sleep(300)
        other = await homes.peer("5.3.0.1", honest=False)
        other.endpoint.serve(DIAL_BACK, DialBackRequest, nod)
        await peer.meet(other)
        await asyncio.sleep(30)
        assert peer.reach.dialable is False


@simulated
async def test_a_peer_that_moves_to_another_network_is_judged_anew():
    async with Homes() as homes:
        public = await homes.peer("5.1.0.1")
        mover = await homes.peer("5.5.0.1", contacts=[public])
        assert await mover.reach.settle(5) and mover.reach.dialable
        homes.move(mover, "192.168.1.7", homes.router("5.6.0.1"))
        await asyncio.sleep(6)
        assert mover.endpoint.addresses == ()  # nothing of what was known holds
        await mover.meet(public)
        await asyncio.sleep(PATIENCE + 1)
        assert mover.reach.dialable is False


class FakeRelays:
    running = False

    async def start(self) -> None:
        self.running = True

    async def close(self) -> None:
        self.running = False


class FakeMapping:
    """What a router opens, when the test says so."""

    def __init__(self, router: MemoryRouter) -> None:
        self._router = router
        self._port: int | None = None
        self._changed = asyncio.Event()
        self.withdrawn = False

    def open(self, peer: PeerID, port: int) -> None:
        self._router.forward(port, peer)
        self._port = port
        self._changed.set()

    def lose(self) -> None:
        self._router.forget(self._port or 0)
        self._port = None
        self._changed.set()

    async def leases(self) -> AsyncIterator[FakeLease | None]:
        while True:
            yield FakeLease(self._port) if self._port else None
            await self._changed.wait()
            self._changed.clear()

    def refresh(self) -> None:
        pass

    async def withdraw(self) -> None:
        self.withdrawn = True


@dataclass
class FakeLease:
    port: int


@simulated
async def test_a_wake_up_is_a_reason_to_ask_again():
    async with Homes() as homes:
        router = homes.router("5.2.0.1")
        public = await homes.peer("5.1.0.1")
        home = await homes.peer("192.168.1.2", router, contacts=[public])
        router.forward(PORT, home.endpoint.peer_id)
        await asyncio.sleep(1.2 * REST)
        assert home.reach.dialable
        checks = home.reach.checks
        home.endpoint.events.emit(WokeUp(7200.0))
        await asyncio.sleep(10)
        assert home.reach.dialable and home.reach.checks == checks + 1


class FakeContact:
    """In place of endpoint and evidence: one contact, connected over IPv4, that also listens on IPv6."""

    def __init__(self, peer: PeerID) -> None:
        self.peer, self.asked = peer, list[DialBackRequest]()
        self.random = random.Random(1)
        self.around = Surroundings()

    def families(self) -> list[Family]:
        return ["IPv6"]

    def port(self, family: Family) -> int:
        return PORT

    def candidates(self, family: Family, without: set[PeerID], most: int) -> list[tuple[PeerID, str]]:
        return [] if self.peer in without else [(self.peer, "2a00:9::/32")]

    def seen(self, peer: PeerID) -> SimpleNamespace:
        return SimpleNamespace(remote_address="tcp://5.9.0.1:4000", relayed=False)

    def addresses_of(self, peer: PeerID) -> tuple[str, ...]:
        return "tcp://5.9.0.1:4000", "tcp://[2a00:9::1]:4000"

    async def probe(self, address: str, peer: PeerID, *, timeout: float) -> str:
        assert address == "tcp://[2a00:9::1]:4000"
        return "tcp://[2a00:2::2]:33001"

    def round_trip(self, peer: PeerID) -> float:
        return 0.01

    async def call(self, peer: PeerID, method: str, request: DialBackRequest, kind: type, *, timeout: float) -> Any:
        self.asked.append(request)
        return DialBackReply(request.address)


@simulated
async def test_in_a_family_in_which_no_contact_is_connected_the_asker_finds_out_where_it_is_seen_and_names_that():
    contact = FakeContact(Identity.from_seed(b"contact").peer_id)
    checks = Checks(contact, contact, lambda: None)  # type: ignore[arg-type]
    check = asyncio.create_task(checks.run())
    await asyncio.sleep(0.1)
    [request] = contact.asked
    assert request.address == f"tcp://[2a00:2::2]:{PORT}"
    checks.heard(contact.peer, "tcp://5.9.0.1:40000", bytes(16))  # no nonce of ours
    assert checks.asked("IPv6") == []
    checks.heard(contact.peer, "tcp://[2a00:9::1]:40000", request.nonce)
    await check
    assert checks.asked("IPv6") == [AskedContact("2a00:9::/32", request.address, proved=True)]
