"""Finding the network: first contacts are tried side by side and again until one answers or time is up."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from swarmcli.dht.client import DHTClient
from swarmcli.dht.core import NodeCore
from swarmcli.errors import BootstrapError, CallTimeout, OwnAddressError, SwarmError, WrongPeerError
from swarmcli.events import Noticed
from swarmcli.network.addresses import parse_address
from swarmcli.network.identity import PeerID

_FIRST_PAUSE = 0.1  # seconds between two attempts at one address; it doubles
_LONGEST_PAUSE = 1.0


async def find_first_contact(
    core: NodeCore, client: DHTClient, addresses: Sequence[str], timeout: float
) -> dict[str, PeerID | None]:
    """Returns, as soon as one address answered, whom each address led to so far (None: nobody yet).

    Raises AddressError for an address that cannot be read, and BootstrapError, with what failed last at each
    address, when none has answered after `timeout` seconds. A node whose only first contact is itself is alone,
    which is no error. The first failure at each address is an event of the endpoint: the wait may be long.
    """
    found: dict[str, PeerID | None] = {address: parse_address(address).peer_id for address in addresses}
    others = [address for address, peer in found.items() if peer != core.endpoint.peer_id]
    if not others:
        return found
    search = _Search(core, client, found, timeout)
    await search.run(others)
    return found


class _Search:
    def __init__(self, core: NodeCore, client: DHTClient, found: dict[str, PeerID | None], timeout: float) -> None:
        self._core = core
        self._client = client
        self._found = found
        self._timeout = timeout
        self._deadline = core.loop_time() + timeout
        self._attempts: dict[str, Exception] = {}
        self._untried = 0  # addresses that may still answer
        self._answered = False
        self._over = asyncio.Event()  # one has answered, or none can any more

    async def run(self, addresses: Sequence[str]) -> None:
        self._untried = len(addresses)
        async with asyncio.TaskGroup() as group:
            tries = [group.create_task(self._keep_trying(address)) for address in addresses]
            try:
                async with asyncio.timeout_at(self._deadline):
                    await self._over.wait()
            except TimeoutError:
                pass  # judged below, once nothing runs any more
            for task in tries:
                task.cancel()
        if not self._answered:
            raise self._failure(addresses)

    async def _keep_trying(self, address: str) -> None:
        pause = _FIRST_PAUSE
        while True:
            try:
                await self._try(address)
            except OwnAddressError:
                self._leads_here(address)
                return
            except WrongPeerError as error:
                self._give_up(address, error)
                return
            except SwarmError as error:
                self._failed(address, error)
            else:
                self._succeed()
                return
            await asyncio.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)

    async def _try(self, address: str) -> None:
        endpoint = self._core.endpoint
        peer = await endpoint.connect(address, timeout=self._core.limits.call_timeout)
        self._found[address] = peer
        await self._client.ping(peer)

    def _failed(self, address: str, error: SwarmError) -> None:
        first = address not in self._attempts
        self._attempts[address] = error
        if first:
            what = str(error).removeprefix(f"{address}: ") or type(error).__name__
            left = round(self._deadline - self._core.loop_time(), 1)
            text = f"{address} does not answer yet: {what}; trying again for {left:g} s"
            self._core.endpoint.events.emit(Noticed("info", text))

    def _leads_here(self, address: str) -> None:
        own = self._core.endpoint.peer_id
        self._found[address] = own
        if all(peer == own for peer in self._found.values()):
            self._succeed()  # by the only first contact that there is

    def _succeed(self) -> None:
        self._answered = True
        self._over.set()

    def _give_up(self, address: str, error: SwarmError) -> None:
        """Another peer answers at this address, and will do so at every try."""
        self._attempts[address] = error
        self._untried -= 1
        if not self._untried:
            self._over.set()

    def _failure(self, addresses: Sequence[str]) -> BootstrapError:
        unanswered = CallTimeout("no answer yet")
        attempts = {address: self._attempts.get(address, unanswered) for address in addresses}
        lines = "; ".join(_describe(address, error) for address, error in attempts.items())
        within = f" within {self._timeout:g} s" if self._untried else ""
        return BootstrapError(f"no first contact answered{within}: {lines}", attempts)


def _describe(address: str, error: Exception) -> str:
    text = str(error) or type(error).__name__
    return text if address in text else f"{address}: {text}"
