"""Peers of the memory network that nobody can dial directly, and that are reached as if over a relay."""

from __future__ import annotations

from swarmcli.errors import ConnectError
from swarmcli.network.addresses import Scheme, parse_address
from swarmcli.network.endpoint import Endpoint
from swarmcli.network.identity import PeerID
from swarmcli.network.transports.base import Accept, Purpose
from swarmcli.testing.memory_connection import MemoryConnection
from swarmcli.testing.memory_network import MemoryTransport


class ShortCut:
    """Dials relay addresses: the way there is the direct one, as long as the relay lives."""

    scheme: Scheme = "relay"

    def __init__(self, memory: MemoryTransport) -> None:
        self.identity, self.limits = memory.identity, memory.limits
        self._memory = memory

    async def listen(self, accept: Accept) -> tuple[str, ...]:
        return ()

    async def dial(self, address: str, expected: PeerID | None, purpose: Purpose, timeout: float) -> MemoryConnection:
        place = parse_address(address)
        assert place.relay is not None and place.peer_id is not None
        if isinstance(self._memory.network.find(self._memory, place.relay.short, 0), str):
            raise ConnectError(f"{address}: the relay is gone", address=address)
        connection = await self._memory.dial(f"memory://{place.peer_id.short}", expected, purpose, timeout)
        connection.relayed = connection.other.relayed = True
        return connection

    async def close(self) -> None: ...


def hide(endpoint: Endpoint, relay: PeerID) -> None:
    """From now on nobody dials this peer, which listens, other than over the relay."""
    endpoint.announce(direct=(), relayed=[f"relay://{relay.text}/{endpoint.peer_id.text}"])
