"""A transport inside one process: delay, bandwidth, loss, partitions, kills and freezes, all from one seed.

The faults are those of real networks. A cut path loses nothing and resets nothing: what was sent waits (TCP sends
it again) until the path heals or someone gives up. A killed peer's connections are reset. A frozen peer is silent.
"""

from __future__ import annotations

import asyncio

from swarmcli.errors import ConnectError, HandshakeError, ListenError, WrongPeerError
from swarmcli.network.addresses import parse_address
from swarmcli.network.identity import Identity, PeerID
from swarmcli.network.limits import Limits
from swarmcli.network.transports.base import Accept, Purpose
from swarmcli.testing.memory_cables import Cables, Latency
from swarmcli.testing.memory_connection import MemoryConnection


class MemoryNetwork(Cables):
    """The peers of one simulation, and the cables between them."""

    def __init__(
        self, *, seed: int = 0, latency: Latency = 0.01, bandwidth: float | None = None, loss: float = 0.0
    ) -> None:
        """`latency` is seconds one way, or a function of source and target; `bandwidth` bytes per second of each
        peer's own link, in each direction (None: unlimited); `loss` the probability that a packet has to be sent
        twice, which delays it."""
        super().__init__(seed, latency, bandwidth, loss)
        self._transports: dict[str, MemoryTransport] = {}

    def transport(self, identity: Identity, *, listening: bool = True, limits: Limits | None = None) -> MemoryTransport:
        """A peer's access to this network, at memory://<peer id's short form> if it may listen."""
        transport = MemoryTransport(self, identity, listening=listening, limits=limits or Limits())
        self._transports[transport.name] = transport
        self.plug_in(identity.peer_id)
        return transport

    def kill(self, peer: PeerID) -> None:
        """Like SIGKILL: its connections are reset, it neither listens nor dials again."""
        for transport in list(self._transports.values()):
            if transport.identity.peer_id == peer:
                transport.die("killed")

    def listener(self, name: str) -> MemoryTransport | None:
        transport = self._transports.get(name)
        return transport if transport is not None and transport.accepts else None


class MemoryTransport:
    """One peer's access to a MemoryNetwork. `limits` bound what it takes in."""

    def __init__(self, network: MemoryNetwork, identity: Identity, *, listening: bool, limits: Limits) -> None:
        self.network = network
        self.identity = identity
        self.limits = limits
        self.name = identity.peer_id.short
        self._connections: list[MemoryConnection] = []  # those that stand, and some that have ended
        self._listening = listening
        self._accept: Accept | None = None
        self._closed = False

    @property
    def accepts(self) -> bool:
        return self._accept is not None and not self._closed

    async def listen(self, accept: Accept) -> tuple[str, ...]:
        if self._closed or not self._listening:
            raise ListenError(f"{self.name} cannot listen on this memory network: closed or made with listening=False")
        self._accept = accept
        return (f"memory://{self.name}",)

    async def dial(self, address: str, expected: PeerID | None, purpose: Purpose, timeout: float) -> MemoryConnection:
        parsed = parse_address(address)
        wanted = expected if expected is not None else parsed.peer_id
        progress = ["connect"]
        try:
            async with asyncio.timeout(timeout):
                return await self._dial(parsed.host, wanted, purpose, address, progress)
        except TimeoutError:
            kind = ConnectError if progress == ["connect"] else HandshakeError
            raise kind(f"{address} did not answer within {timeout:g} s", address=address) from None

    async def _dial(
        self, name: str, wanted: PeerID | None, purpose: Purpose, address: str, progress: list[str]
    ) -> MemoryConnection:
        if self._closed:
            raise ConnectError("this transport is closed", address=address)
        there = self.network.listener(name)
        if there is None:
            raise ConnectError(f"{address} refused the connection: nobody listens there", address=address)
        ids = (self.identity.peer_id, there.identity.peer_id)
        await self._round_trip(*ids)  # TCP
        progress.append("handshake")
        await self._round_trip(*ids)  # TLS
        if wanted is not None and there.identity.peer_id != wanted:
            raise WrongPeerError(f"{address} is {there.identity.peer_id.short}, not {wanted.short}", address=address)
        if not there.accepts or self._closed:
            raise HandshakeError(f"{address} went away during the handshake", address=address)
        return self._connect(there, purpose, address)

    async def _round_trip(self, a: PeerID, b: PeerID) -> None:
        await asyncio.sleep(self.network.latency(a, b) + self.network.latency(b, a))
        await self.network.until_flowing(a, b)

    def _connect(self, there: MemoryTransport, purpose: Purpose, address: str) -> MemoryConnection:
        ids = (self.identity.peer_id, there.identity.peer_id)
        local = MemoryConnection(self.network, ids, purpose, self.limits, dialed=True, address=address)
        own_address = f"memory://{self.name}"
        remote = MemoryConnection(self.network, ids[::-1], purpose, there.limits, dialed=False, address=own_address)
        local.other, remote.other = remote, local
        self._keep(local)
        there._keep(remote)
        # The dialer is done half a round trip before the listener.
        delay = self.network.latency(*ids)
        asyncio.get_running_loop().call_later(delay, there.accept, remote)
        return local

    def accept(self, connection: MemoryConnection) -> None:
        if self._accept is not None and not self._closed:
            self._accept(connection)
        else:
            connection.die("the listener is gone")

    async def close(self) -> None:
        self.die("transport closed")

    def die(self, reason: str) -> None:
        """Every connection is reset; nothing listens and nothing is dialed any more."""
        self._closed = True
        for connection in self._connections:
            connection.die(f"closed by us: {reason}")

    def _keep(self, connection: MemoryConnection) -> None:
        self._connections = [each for each in self._connections if not each.ended]
        self._connections.append(connection)
