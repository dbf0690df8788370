"""Ports at the gateway: asked for in two protocols, of one that may lie, refuse or vanish; and how they are kept."""

from __future__ import annotations

import asyncio
import contextlib
import gzip

import pytest
from async_upnp_client.const import HttpRequest

from swarmcli.reach.mapping import NOT_ASKED, Gateway, Mapping, MappingTimes, PortMapping, igd, nat_pmp
from swarmcli.reach.mapping import gateway as gateways
from swarmcli.reach.mapping.gateway import GatewayError, GatewayRefused, MethodName
from tests.reach.gateway import Behaviour, HomeGateway, description, soap
from tests.simulation import in_real_time, simulated

HERE = Gateway("127.0.0.1", "127.0.0.1")
PORT = 31330


# For gateways that never answer; one that answers may take its time to, on a busy machine.
IMPATIENT = MappingTimes(nat_pmp_waits=(0.05, 0.1), upnp_search=0.5, upnp_request=0.5)


def of(home: HomeGateway, times: MappingTimes = MappingTimes()) -> dict[str, gateways.Method]:
    return {
        "NAT-PMP": nat_pmp.NatPMP(HERE, times, home.nat_pmp_port),
        "UPnP": igd.UPnP(HERE, times, ("127.0.0.1", home.ssdp_port)),
    }


async def asked(protocol: str) -> None:
    async with HomeGateway() as home:
        home.ports[PORT] = ("192.168.1.9", PORT)  # somebody else's
        method = of(home)[protocol]
        mapping = await method.ask(PORT, PORT)
        assert (mapping.host, mapping.method, mapping.gateway) == ("5.2.0.1", protocol, "127.0.0.1")
        assert home.ports[mapping.port] == ("127.0.0.1", PORT)
        assert await method.ask(PORT, mapping.port) == mapping
        await method.withdraw(PORT)
        assert home.ports == {PORT: ("192.168.1.9", PORT)}


@pytest.mark.parametrize("protocol", ["NAT-PMP", "UPnP"])
def test_a_port_is_given_renewed_and_given_back_without_touching_anyone_elses(protocol: str) -> None:
    asyncio.run(asked(protocol))


@pytest.mark.parametrize("protocol", ["NAT-PMP", "UPnP"])
@in_real_time
async def test_a_gateway_that_refuses_or_says_nothing_grants_nothing(protocol: str) -> None:
    async with HomeGateway(behaviour=Behaviour(refuses=True)) as home:
        with pytest.raises(GatewayRefused):
            await of(home)[protocol].ask(PORT, PORT)
        home.behaviour.silent = True
        with pytest.raises(GatewayError):
            await of(home, IMPATIENT)[protocol].ask(PORT, PORT)
        assert home.ports == {}


@pytest.mark.parametrize(("protocol", "outer"), [("NAT-PMP", "127.0.0.1"), ("UPnP", "169.254.3.3")])
@in_real_time
async def test_an_outer_address_that_nobody_can_have_is_no_mapping(protocol: str, outer: str) -> None:
    async with HomeGateway(behaviour=Behaviour(outer=outer)) as home:
        with pytest.raises(GatewayError, match="outer address"):
            await of(home)[protocol].ask(PORT, PORT)


@in_real_time
async def test_a_router_that_keeps_ports_forever_gets_them_back_in_the_end() -> None:
    async with HomeGateway(behaviour=Behaviour(permanent_only=True)) as home:
        method = of(home)["UPnP"]
        for _ in range(2):
            assert (await method.ask(PORT, PORT)).port == PORT
        assert [asked for asked in home.asked if asked.startswith("UPnP")] == ["UPnP 0", "UPnP 0"]
        await method.withdraw(PORT)
        assert home.ports == {}


ENTITIES = b"""<?xml version="1.0"?><!DOCTYPE r [<!ENTITY a "aaaaaaaaaa"><!ENTITY b "&a;&a;&a;&a;&a;&a;">]>
<root>&b;</root>"""
NESTED = "<device><deviceList>" * 3000 + "</deviceList></device>" * 3000


@pytest.mark.parametrize(
    ("behaviour", "words"),
    [
        (Behaviour(description=ENTITIES), "EntitiesForbidden"),
        (Behaviour(description=b"<root" + b"x" * (igd.MAX_BODY + 1)), "too large"),
        (Behaviour(description=b"\xff\xfe no document"), "cannot be read"),
        (Behaviour(description=description(devices=NESTED).encode()), "cannot be read"),
        (Behaviour(description=description(services=100).encode()), "never ends"),
        (Behaviour(description=description("http://192.0.2.1/control").encode()), "offers no ports|another computer"),
        (Behaviour(description=description("http://[").encode()), "offers no ports|cannot be read"),
        (Behaviour(description=gzip.compress(bytes(50_000_000)), http_head="Content-Encoding: gzip\r\n"), "be read"),
        (Behaviour(drip=True), "too slowly"),
        (Behaviour(http_head="Location: http://192.0.2.1/\r\n", action_answer=b""), "cannot be read"),
        (
            Behaviour(action_answer=soap("GetSpecificPortMappingEntryResponse", {"NewInternalPort": "ten"}).encode()),
            "cannot",
        ),
        (Behaviour(action_answer=ENTITIES), "EntitiesForbidden"),
    ],
    ids="entities large unreadable deep many elsewhere nowhere packed drip empty words answers".split(),  # noqa: SIM905
)
@in_real_time
async def test_what_a_hostile_gateway_says_is_an_error_of_ours(behaviour: Behaviour, words: str) -> None:
    times = IMPATIENT if behaviour.drip else MappingTimes()
    async with HomeGateway(behaviour=behaviour) as home:
        with pytest.raises(GatewayError, match=words):
            await of(home, times)["UPnP"].ask(PORT, PORT)
        assert home.ports == {}


@pytest.mark.parametrize(
    "url", ["http://127.0.0.2/", "https://127.0.0.1/", "http://127.0.0.1.example.org/", "file:///x"]
)
@in_real_time
async def test_nothing_is_asked_for_at_another_computer(url: str) -> None:
    with pytest.raises(GatewayError, match="another computer"):
        await igd.PinnedRequester("127.0.0.1", 4.0).async_http_request(HttpRequest("GET", url, {}, None))


@in_real_time
async def test_a_port_that_the_router_would_take_from_another_computer_is_left_to_it() -> None:
    async with HomeGateway(behaviour=Behaviour(gives_away=True)) as home:
        home.ports[PORT] = ("192.168.1.9", PORT)
        assert (await of(home)["UPnP"].ask(PORT, PORT)).port != PORT
        assert home.ports[PORT] == ("192.168.1.9", PORT)


def test_only_the_gateways_own_address_is_taken_from_an_answer_to_a_search() -> None:
    ours = b"HTTP/1.1 200 OK\r\nLOCATION: http://192.168.1.1:5000/igd.xml\r\n\r\n"
    assert igd.location_in(ours, "192.168.1.1") == "http://192.168.1.1:5000/igd.xml"
    for location in (
        "http://192.168.1.2/x",
        "https://192.168.1.1/x",
        "http://192.168.1.1@evil/x",
        "file:///etc",
        "http://[",
    ):
        assert (
            igd.location_in(ours.replace(b"http://192.168.1.1:5000/igd.xml", location.encode()), "192.168.1.1") is None
        )
    assert igd.location_in(ours + b"x" * igd.MAX_DATAGRAM, "192.168.1.1") is None
    assert igd.location_in(ours.replace(b"/igd", b"/" + b"i" * igd.MAX_LOCATION), "192.168.1.1") is None


@pytest.mark.parametrize(
    "answer", [b"", b"\x02", bytes(4), bytes(2000), b"\x02\x81" + bytes(58), b"\x00\x82" + bytes(14)]
)
def test_a_datagram_that_answers_something_else_is_passed_over(answer: bytes) -> None:
    with contextlib.suppress(GatewayError):
        assert nat_pmp.read_granted(answer, PORT) is None
    with contextlib.suppress(GatewayError):
        assert nat_pmp.read_address(answer) is None


def test_the_default_route_is_read_from_what_systems_print() -> None:
    linux = """Iface Destination Gateway Flags RefCnt Use Metric Mask MTU Window IRTT
tun0 00000000 00000000 0001 0 0 0 00000000 0 0 0
wlan0 00000000 0101A8C0 0003 0 0 600 00000000 0 0 0
eth0 00000000 FE01A8C0 0003 0 0 100 00000000 0 0 0
eth0 0001A8C0 00000000 0001 0 0 100 00FFFFFF 0 0 0
"""
    assert gateways.parse_routes(linux) == "192.168.1.254"
    assert gateways.parse_routes(linux.splitlines()[0]) is None
    assert gateways.parse_route_command("   route to: default\n    gateway: 10.0.0.1\n interface: en0\n") == "10.0.0.1"
    assert gateways.parse_route_command("   route to: default\n") is None
    with pytest.raises(ValueError, match="link#5"):
        gateways.parse_route_command("    gateway: link#5\n")


TIMES = MappingTimes()
HOME = Gateway("192.168.1.1", "192.168.1.2")


class FakeMethod:
    """A gateway that speaks one protocol; a test changes what it does."""

    def __init__(self, name: MethodName = "NAT-PMP", problem: GatewayError | None = None) -> None:
        self.name: MethodName = name
        self.host = "5.2.0.1"
        self.problem = problem
        self.slow = 0.0
        self.asked: list[float] = []
        self.withdrawn = 0

    async def ask(self, port: int, wanted: int) -> Mapping:
        self.asked.append(asyncio.get_running_loop().time())
        await asyncio.sleep(self.slow)
        if self.problem is not None:
            raise self.problem
        return Mapping(self.host, wanted, self.name, HOME.host)

    async def withdraw(self, port: int) -> None:
        self.withdrawn += 1
        await asyncio.sleep(self.slow)


class Home:
    """A peer whose gateway speaks these protocols, and what it was told of its port so far."""

    def __init__(self, *methods: FakeMethod) -> None:
        self.gateway: Gateway | None = HOME
        self.mapping = PortMapping(PORT, find_gateway=lambda: self.gateway, methods=lambda _: methods)
        self.told: list[Mapping | None] = []
        self._following: asyncio.Task[None] | None = None

    async def follow(self) -> None:
        async for mapping in self.mapping.leases():
            self.told.append(mapping)

    async def __aenter__(self) -> Home:
        self._following = asyncio.create_task(self.follow())
        await asyncio.sleep(1)
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._following is not None
        self._following.cancel()
        await asyncio.wait([self._following])
        await self.mapping.withdraw()


@simulated
async def test_it_is_renewed_long_before_its_end_and_told_once() -> None:
    method = FakeMethod()
    async with Home(method) as home:
        await asyncio.sleep(3600)
        assert [mapping.port for mapping in home.told if mapping] == [PORT]
        gaps = [later - sooner for sooner, later in zip(method.asked, method.asked[1:], strict=False)]
        assert max(gaps) <= TIMES.renew < TIMES.lease / 3
        assert home.mapping.problem == ""
    assert method.withdrawn == 1
    assert home.mapping.current is None


@simulated
async def test_the_next_protocol_is_tried_where_one_fails_and_the_problem_names_all() -> None:
    first, second = FakeMethod("NAT-PMP", GatewayError("it does not answer")), FakeMethod("UPnP")
    async with Home(first, second) as home:
        assert home.told[0] is not None
        assert home.told[0].method == "UPnP"
    assert (first.withdrawn, second.withdrawn) == (0, 1)

    second.problem = GatewayRefused("no")
    async with Home(first, second) as home:
        assert home.told == [None]
        assert home.mapping.problem == "NAT-PMP: it does not answer; UPnP: no"
        second.problem = None
        await asyncio.sleep(TIMES.search)
        assert home.mapping.current is not None


@simulated
async def test_a_gateway_that_vanishes_keeps_the_port_for_a_while_and_is_found_again() -> None:
    method = FakeMethod()
    async with Home(method) as home:
        method.problem = GatewayError("it does not answer")
        await asyncio.sleep(TIMES.renew + TIMES.retry)
        assert home.mapping.current is not None  # it may just be starting again
        await asyncio.sleep(2 * TIMES.retry)
        assert home.told[-1] is None
        method.problem = None
        home.mapping.refresh()
        await asyncio.sleep(TIMES.spacing + 1)
        assert home.told[-1] is not None
        assert len(home.told) == 3


@simulated
async def test_another_outer_address_and_another_network_are_told() -> None:
    method = FakeMethod()
    async with Home(method) as home:
        method.host = "5.9.0.1"
        await asyncio.sleep(TIMES.renew)
        assert [mapping and mapping.host for mapping in home.told] == ["5.2.0.1", "5.9.0.1"]
        home.gateway = Gateway("10.0.0.1", "10.0.0.2")
        method.slow = TIMES.renew
        await asyncio.sleep(TIMES.renew + 1)
        assert home.mapping.current is None
        assert home.mapping.problem == NOT_ASKED  # nothing has been answered there yet
        method.slow = 0.0
        await asyncio.sleep(2 * TIMES.renew)
        assert home.mapping.current is not None
        home.gateway = None
        await asyncio.sleep(TIMES.renew)
        assert home.told[-1] is None
        assert "no router" in home.mapping.problem
    assert method.withdrawn == 0  # that router is not there any more


@simulated
async def test_refresh_is_no_way_to_flood_the_gateway() -> None:
    method = FakeMethod()
    async with Home(method) as home:
        for _ in range(100):
            home.mapping.refresh()
            await asyncio.sleep(0.1)
        assert len(method.asked) <= 1 + 10 / TIMES.spacing + 1


@simulated
async def test_a_port_that_was_just_asked_for_is_given_back_and_a_slow_gateway_holds_nobody_up() -> None:
    method = FakeMethod()
    method.slow = 1e4
    loop = asyncio.get_running_loop()
    async with Home(method) as home:
        assert home.told == []
        before = loop.time()
    assert method.withdrawn == 1
    assert loop.time() - before <= TIMES.withdraw
