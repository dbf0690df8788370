"""How a port at the gateway is kept, under virtual time: renewed, lost, found again, given back."""

from __future__ import annotations

import asyncio

from swarmcli.reach.mapping import NOT_ASKED, Gateway, Mapping, MappingTimes, PortMapping
from swarmcli.reach.mapping.gateway import GatewayError, GatewayRefused, MethodName
from tests.simulation import simulated

PORT = 31330
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
