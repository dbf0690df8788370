"""A port at the gateway: asked for, renewed, asked for again after the gateway forgot it, and given back."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Sequence

from swarmcli.network.loop_thread import set_within
from swarmcli.reach.mapping.gateway import Gateway, GatewayError, Mapping, MappingTimes, Method, default_gateway
from swarmcli.reach.mapping.igd import UPnP
from swarmcli.reach.mapping.nat_pmp import NatPMP

logger = logging.getLogger(__name__)

NOT_ASKED = "not asked for"


class PortMapping:
    """The mapping of one listening port of this peer, at the default gateway. What that grants is a claim, see
    `Mapping`."""

    def __init__(
        self,
        port: int,
        *,
        times: MappingTimes = MappingTimes(),
        find_gateway: Callable[[], Gateway | None] = default_gateway,
        methods: Callable[[Gateway], Sequence[Method]] | None = None,
    ) -> None:
        """`methods(gateway)`: the protocols to try, in their order. None: NAT-PMP, then UPnP."""
        self.current: Mapping | None = None
        self.problem = NOT_ASKED  # why there is none, for people; "" if there is one
        self._port = port
        self._times = times
        self._find_gateway = find_gateway
        self._methods = methods or (lambda gateway: (NatPMP(gateway, times), UPnP(gateway, times)))
        self._gateway: Gateway | None = None
        self._method: Method | None = None  # that granted `current`
        self._failures = 0
        self._asked_again = asyncio.Event()

    async def leases(self) -> AsyncGenerator[Mapping | None, None]:
        """Asks the gateway at once and keeps asking; yields the first result, then every change.

        It runs in the task of its consumer, never ends by itself, and raises nothing.
        """
        times = self._times
        before: Mapping | None = None
        first = True
        while True:
            await self._ask()
            if first or self.current != before:
                first, before = False, self.current
                yield self.current
            seconds = times.search if self.current is None else times.retry if self._failures else times.renew
            await asyncio.sleep(times.spacing)
            await set_within(self._asked_again, seconds - times.spacing)
            self._asked_again.clear()

    def refresh(self) -> None:
        """Asks again soon: after a wake-up, a change of interfaces, or a dial from outside that failed."""
        self._asked_again.set()

    async def withdraw(self) -> None:
        """Gives the port back, after nobody iterates `leases` any more. Takes `times.withdraw` at most, and raises
        nothing."""
        method = self._method
        self._lose("given back")
        if method is None:
            return
        try:
            async with asyncio.timeout(self._times.withdraw):
                await method.withdraw(self._port)
        except (TimeoutError, GatewayError) as error:
            logger.debug("the router did not take the port back (%s); it forgets it by itself", error or "no answer")

    async def _ask(self) -> None:
        gateway = await asyncio.to_thread(self._find_gateway)
        if gateway != self._gateway:
            self._lose(NOT_ASKED)  # this computer is in another network, and cannot tell the old router
            self._gateway = gateway
        if gateway is None:
            self.problem = "this computer knows no router to ask"
        elif self._method is None or not await self._renew(self._method):
            await self._search(gateway)

    async def _renew(self, method: Method) -> bool:
        """Returns whether the mapping stands, or may still stand: one request without an answer says nothing yet."""
        try:
            await self._ask_with(method)
        except GatewayError as error:
            self._failures += 1
            if self._failures < self._times.failures:
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
