"""A port at the gateway: asked for, renewed, asked for again when the gateway forgot it, and given back."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Sequence

from swarmcli.network.loop_thread import set_within
from swarmcli.reach.mapping.gateway import Family, Gateway, GatewayError, Mapping, Method, default_gateway
from swarmcli.reach.mapping.igd import UPnP
from swarmcli.reach.mapping.pcp import PCP, NatPMP

logger = logging.getLogger(__name__)

# The lease is ten times as long. Asking again is what heals: a gateway that was restarted has forgotten its ports, one
# whose outer address has changed tells the new one, and after a computer's sleep the lease is over.
RENEW = 120.0  # seconds between two questions
RETRY = 20.0  # … after one that was not answered
SEARCH = 600.0  # … while no gateway grants anything
SPACING = 5.0  # at least between two questions, however often `refresh` is called
MAX_FAILURES = 3  # questions in a row without an answer, after which the port is taken for lost
WITHDRAW_SECONDS = 1.0  # this peer is about to end, and nobody waits longer for a router

NOT_ASKED = "not asked for"

Methods = Callable[[Gateway], Sequence[Method]]


def methods_of(family: Family) -> Methods:
    """The protocols in which a gateway is asked, in turn."""
    if family == "ipv6":
        return lambda gateway: (PCP(gateway),)
    return lambda gateway: (PCP(gateway), NatPMP(gateway), UPnP(gateway))


class PortMapping:
    """One listening port of this peer, at the default gateway. What it grants is a claim, see `Mapping`."""

    def __init__(
        self,
        port: int,
        *,
        family: Family = "ipv4",
        find_gateway: Callable[[Family], Gateway | None] = default_gateway,
        methods: Methods | None = None,
    ) -> None:
        self.current: Mapping | None = None
        self.problem = NOT_ASKED  # why there is none, for people; "" if there is one
        self._port = port
        self._family: Family = family
        self._find_gateway = find_gateway
        self._methods = methods or methods_of(family)
        self._gateway: Gateway | None = None
        self._method: Method | None = None  # that granted `current`
        self._failures = 0
        self._asked_again = asyncio.Event()

    async def leases(self) -> AsyncGenerator[Mapping | None, None]:
        """Asks the gateway at once and keeps asking; yields first what came of it, then every change.

        It runs in the task of whoever iterates, never ends by itself, and raises nothing.
        """
        before: Mapping | None = None
        first = True
        while True:
            await self._ask()
            if first or self.current != before:
                first, before = False, self.current
                yield self.current
            seconds = SEARCH if self.current is None else RETRY if self._failures else RENEW
            await asyncio.sleep(SPACING)
            await set_within(self._asked_again, seconds - SPACING)
            self._asked_again.clear()

    def refresh(self) -> None:
        """Asks again soon: after a wake-up, a change of interfaces, or a dial from outside that failed."""
        self._asked_again.set()

    async def withdraw(self) -> None:
        """Gives the port back, once nobody iterates any more. It takes WITHDRAW_SECONDS at most and raises nothing."""
        method = self._method
        self._lose("given back")
        if method is None:
            return
        try:
            async with asyncio.timeout(WITHDRAW_SECONDS):
                await method.withdraw(self._port)
        except (TimeoutError, GatewayError) as error:
            logger.debug("the router did not take the port back (%s); it forgets it by itself", error or "no answer")

    async def _ask(self) -> None:
        gateway = await asyncio.to_thread(self._find_gateway, self._family)
        if gateway != self._gateway:
            self._lose(NOT_ASKED)  # in another network its old router cannot even be told
            self._gateway = gateway
        if gateway is None:
            self.problem = "this computer knows no router to ask"
        elif self._method is None or not await self._renew(self._method):
            await self._search(gateway)

    async def _renew(self, method: Method) -> bool:
        """Whether the mapping stands, or may stand: one question that is not answered says nothing yet."""
        try:
            await self._ask_with(method)
        except GatewayError as error:
            self._failures += 1
            if self._failures < MAX_FAILURES:
                return True
            self._lose(f"{method.name}: {error}")
            return False
        return True

    async def _search(self, gateway: Gateway) -> None:
        problems = []
        for method in self._methods(gateway):
            try:
                await self._ask_with(method)
                return
            except GatewayError as error:
                problems.append(f"{method.name}: {error}")
        self.problem = "; ".join(problems)
        logger.debug("no port mapping at %s: %s", gateway.host, self.problem)

    async def _ask_with(self, method: Method) -> None:
        wanted = self.current.port if self.current is not None else self._port
        try:
            self.current = await method.ask(self._port, wanted)
        except asyncio.CancelledError:
            self._method = method  # the gateway may have granted it: `withdraw` gives it back
            raise
        self._method, self._failures, self.problem = method, 0, ""

    def _lose(self, problem: str) -> None:
        self.current, self._method, self._failures, self.problem = None, None, 0, problem
