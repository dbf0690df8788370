"""A transport inside one process: delay, bandwidth, loss, partitions, kills and freezes, all from one seed.

The faults are those of real networks. A cut path loses nothing and resets nothing: what was sent waits (TCP sends
it again) until the path heals or someone gives up. A killed peer's connections are reset. A frozen peer is silent.
"""

from __future__ import annotations

import asyncio
from typing import Literal, NamedTuple

from swarmcli.errors import ConnectError, HandshakeError, ListenError, NotAMember, WrongPeerError
from swarmcli.network.addresses import Address, Family, Scheme, parse_address
from swarmcli.network.bounds import NetworkLimits
from swarmcli.network.identity import Identity, PeerID
from swarmcli.network.membership import Membership
from swarmcli.network.rates import LinkRates
from swarmcli.network.transports.base import Accept, Join, Purpose
from swarmcli.network.transports.tcp.connection import Shared
from swarmcli.testing.memory_cables import Cables, Latency
from swarmcli.testing.memory_connection import MemoryConnection
from swarmcli.testing.memory_pipe import MemorySocket
from swarmcli.testing.memory_router import MemoryRouter, Translation, networks, seen_through


class _Place(NamedTuple):
    """Where a peer is. Behind different routers there may be equal hosts."""

    router: MemoryRouter | None
    host: str
    port: int


class MemoryNetwork(Cables):
    """The peers of one simulation, and the cables between them."""

    def __init__(
        self, *, seed: int = 0, latency: Latency = 0.01, bandwidth: float | None = None, loss: float = 0.0
    ) -> None:
        """`latency`: seconds one way, or a function of source and target. `bandwidth`: bytes per second of each peer's
        line, in each direction (None: unlimited). `loss`: the probability that a packet has to be sent twice, which
        delays it."""
        super().__init__(seed, latency, bandwidth, loss)
        self._transports: dict[_Place, MemoryTransport] = {}
        self._routers: dict[tuple[MemoryRouter | None, str], MemoryRouter] = {}  # by network and host
        self._syns: dict[tuple[str, str], _Syn] = {}  # under way, by source and target
        self.dials: list[tuple[PeerID, str]] = []  # all so far: (who dialed, which address)

    def transport(
        self,
        identity: Identity,
        *,
        listening: bool = True,
        limits: NetworkLimits | None = None,
        host: str = "",
        port: int = 0,
        behind: MemoryRouter | None = None,
    ) -> MemoryTransport:
        """A peer's access to this network, at memory://<host>[:<port>] if it may listen. `host`: the short form of the
        peer's id unless given; peers of one host are on one computer. With a `port`, each dial comes from another port.
        `behind`: a router; only peers behind the same one can dial it then."""
        place = _Place(behind, host or identity.peer_id.short, port)
        transport = MemoryTransport(self, identity, place, listening=listening, limits=limits or NetworkLimits())
        self._transports[place] = transport
        self.plug_in(identity.peer_id)
        return transport

    def router(
        self,
        host: str,
        *,
        behind: MemoryRouter | None = None,
        hairpin: bool = False,
        translation: Translation = "independent",
        refuses: bool = False,
    ) -> MemoryRouter:
        """A router, seen from outside at `host`. `hairpin`: its outer addresses can be dialed from inside too.
        `refuses`: it refuses SYNs that it does not let in, instead of being silent."""
        router = self._routers[behind, host] = MemoryRouter(host, behind, hairpin, translation, refuses)
        return router

    def move(self, transport: MemoryTransport, host: str, behind: MemoryRouter | None = None) -> None:
        """The machine moves to another place, where it listens at once; its connections are reset."""
        del self._transports[transport.place]
        transport.place = _Place(behind, host, transport.place.port)
        self._transports[transport.place] = transport
        transport.reset("moved to another network")

    def kill(self, peer: PeerID) -> None:
        """Like SIGKILL: its connections are reset, it neither listens nor dials again."""
        for transport in list(self._transports.values()):
            if transport.identity.peer_id == peer:
                transport.die("killed")

    def find(self, dialer: MemoryTransport, host: str, port: int) -> MemoryTransport | Literal["refused", "silence"]:
        """The peer that a dial meets, or how the dial fails."""
        inside = networks(dialer.place.router)
        for network in inside:
            found = self._transports.get(_Place(network, host, port))
            router = self._routers.get((network, host))
            if router is not None:
                peer = router.inside(port)
                found = self._of(peer, router) if peer is not None else None
                if found is None or (router in inside and not router.hairpin):
                    return "silence"
            if found is not None:
                return found if found.accepts else "refused"
        # A host that exists only in another private network gives silence; one that exists nowhere, a refusal.
        elsewhere = any(place.host == host and place.router not in inside for place in self._transports)
        return "silence" if elsewhere else "refused"

    def send_syn(self, syn: _Syn) -> None:
        """One end dials another, which may dial it at the same moment."""
        self._syns[syn.source, syn.target] = syn
        asyncio.get_running_loop().call_later(self.latency(*syn.ends), self._syn_arrives, syn)

    def forget_syn(self, syn: _Syn) -> None:
        self._syns.pop((syn.source, syn.target), None)

    def _syn_arrives(self, syn: _Syn) -> None:
        """The router there lets a SYN in if the other end has sent one from there to here: it looks like the answer."""
        if self.severed(*syn.ends):
            return
        other = self._syns.get((syn.target, syn.source))
        if other is not None:
            if not (syn.met.done() or other.met.done()):
                syn.transport.cross(syn, other)
        elif (router := self._routers.get((None, parse_address(syn.target).host))) is not None and router.refuses:
            asyncio.get_running_loop().call_later(self.latency(*syn.ends), syn.refuse)

    def _of(self, peer: PeerID, router: MemoryRouter) -> MemoryTransport | None:
        fitting = (each for each in self._transports.values() if each.place.router is router)
        return next((each for each in fitting if each.identity.peer_id == peer), None)


class MemoryTransport:
    """One peer's access to a MemoryNetwork. `limits` bound what it takes in."""

    scheme: Scheme = "memory"

    def __init__(
        self, network: MemoryNetwork, identity: Identity, place: _Place, *, listening: bool, limits: NetworkLimits
    ) -> None:
        self.network = network
        self.identity = identity
        self.limits = limits
        self.rates = LinkRates()
        self.membership: Membership | None = None
        self.place = place
        self._next_port = 40_000
        self._connections: list[MemoryConnection | MemorySocket] = []  # those that stand, and some that have ended
        self._plain = Shared(identity, limits)  # reads the tokens of connections that come without a handshake
        self._listening = listening
        self._accept: Accept | None = None
        self._closed = False

    @property
    def accepts(self) -> bool:
        return self._accept is not None and not self._closed

    async def listen(self, accept: Accept) -> tuple[str, ...]:
        if self._closed or not self._listening:
            name = self.place.host
            raise ListenError(f"{name} cannot listen on this memory network: closed or made with listening=False")
        self._accept = accept
        return self.own_addresses()

    def own_addresses(self) -> tuple[str, ...]:
        return (str(Address("memory", self.place.host, self.place.port)),)

    def local_port(self, family: Family) -> MemoryPort:
        """See `base.DirectTransport`."""
        self._next_port += 1
        return MemoryPort(self, self._next_port)

    async def dial(
        self, address: str, expected: PeerID | None, purpose: Purpose, timeout: float, *, source: int | None = None
    ) -> MemoryConnection:
        """`source` is the port to dial from; None: another one for each connection."""
        parsed = parse_address(address)
        self.network.dials.append((self.identity.peer_id, address))
        wanted = expected if expected is not None else parsed.peer_id
        progress = ["connect"]
        try:
            async with asyncio.timeout(timeout):
                return await self._dial(parsed, wanted, purpose, address, progress, source)
        except TimeoutError:
            kind = ConnectError if progress == ["connect"] else HandshakeError
            raise kind(f"{address} did not answer within {timeout:g} s", address=address) from None

    async def _dial(
        self,
        place: Address,
        wanted: PeerID | None,
        purpose: Purpose,
        address: str,
        progress: list[str],
        source: int | None,
    ) -> MemoryConnection:
        there = self._find(place, address)
        while there is None:
            await asyncio.get_running_loop().create_future()
        ids = (self.identity.peer_id, there.identity.peer_id)
        await self._round_trip(*ids)  # TCP
        progress.append("handshake")
        await self._round_trip(*ids)  # TLS
        if wanted is not None and there.identity.peer_id != wanted:
            raise WrongPeerError(f"{address} is {there.identity.peer_id.short}, not {wanted.short}", address=address)
        if not there.accepts or self._closed:
            raise HandshakeError(f"{address} went away during the handshake", address=address)
        self.greet(there)
        return self._connect(there, purpose, address, source)

    def on_join(self, join: Join | None) -> None:
        """See `base.DirectTransport`."""
        self._plain.join = join

    async def dial_plain(self, address: str, protocol: asyncio.BufferedProtocol, timeout: float) -> None:
        """See `base.DirectTransport`."""
        place = parse_address(address)
        self.network.dials.append((self.identity.peer_id, address))
        try:
            async with asyncio.timeout(timeout):
                there = self._find(place, address)
                while there is None:
                    await asyncio.get_running_loop().create_future()
                await self._round_trip(self.identity.peer_id, there.identity.peer_id)
        except TimeoutError:
            raise ConnectError(f"{address} did not answer within {timeout:g} s", address=address) from None
        ids = (self.identity.peer_id, there.identity.peer_id)
        taken_in = there._plain.listening(None)
        near, far = MemorySocket(self.network, ids, protocol), MemorySocket(self.network, ids[::-1], taken_in)
        near.other, far.other = far, near
        self._keep(near)
        there._keep(far)
        taken_in.connection_made(far)
        protocol.connection_made(near)

    def _find(self, place: Address, address: str) -> MemoryTransport | None:
        """The peer at an address; None: silence. Raises ConnectError."""
        if self._closed:
            raise ConnectError("this transport is closed", address=address)
        there = self.network.find(self, place.host, place.port)
        if there == "refused":
            raise ConnectError(f"{address} refused the connection: nobody listens there", address=address)
        return there if isinstance(there, MemoryTransport) else None

    def greet(self, there: MemoryTransport) -> None:
        """Both ends show what makes them members, as the greeting over TCP does. Raises HandshakeError."""
        ids = (self.identity.peer_id, there.identity.peer_id)
        own = self.membership.proof(ids[1]) if self.membership is not None else b""
        theirs = binding = b""
        if there.membership is not None:
            try:
                binding = there.membership.check(ids[0], own)
            except NotAMember as error:
                raise NotAMember(f"refused by the other end: {error}") from None
            theirs = there.membership.proof(ids[0])
        if self.membership is not None:
            self.membership.welcomed(ids[1], theirs, binding)

    async def shake_hands(self, peer: PeerID) -> None:
        await self._round_trip(self.identity.peer_id, peer)

    async def _round_trip(self, a: PeerID, b: PeerID) -> None:
        await asyncio.sleep(self.network.latency(a, b) + self.network.latency(b, a))
        await self.network.until_flowing(a, b)

    def _connect(self, there: MemoryTransport, purpose: Purpose, address: str, source: int | None) -> MemoryConnection:
        ids = (self.identity.peer_id, there.identity.peer_id)
        on_one_computer = self.place[:2] == there.place[:2]
        rates = (LinkRates(), LinkRates()) if on_one_computer else (self.rates, there.rates)
        local = MemoryConnection(self.network, ids, purpose, self.limits, rates[0], dialed=True, address=address)
        own_address = self._seen_at(there, source)
        remote = MemoryConnection(
            self.network, ids[::-1], purpose, there.limits, rates[1], dialed=False, address=own_address
        )
        local.other, remote.other = remote, local
        local.on_this_computer = remote.on_this_computer = on_one_computer
        local.observed_address = own_address
        self._keep(local)
        there._keep(remote)
        # The dialer has finished the handshake half a round trip before the listener.
        delay = self.network.latency(*ids)
        asyncio.get_running_loop().call_later(delay, there.accept, remote)
        return local

    def outer_address(self, source: int) -> str:
        """The address at which the open network sees this port now."""
        router = seen_through(self.place.router, None)
        if router is not None:
            return router.outer_address((self.identity.peer_id, source))
        return f"memory://{self.place.host}:{source}"

    def cross(self, syn: _Syn, other: _Syn) -> None:
        """Two SYNs have met: makes one connection of both."""
        leader, follower = (syn, other) if syn.leads else (other, syn)
        ends: list[MemoryConnection] = []
        for end in (leader, follower):
            at = end.transport
            connection = MemoryConnection(
                self.network, end.ends, end.purpose, at.limits, at.rates, dialed=end.leads, address=end.target
            )
            connection.punched = True
            end.transport._keep(connection)
            ends.append(connection)
        ends[0].other, ends[1].other = ends[1], ends[0]
        for end, connection in zip((leader, follower), ends, strict=True):
            end.met.set_result(connection)
        if leader.leads == follower.leads or leader.purpose is not follower.purpose:
            ends[0].die("no handshake came about")
        try:
            leader.transport.greet(follower.transport)
        except HandshakeError:
            ends[0].die("no handshake came about")

    def _seen_at(self, listener: MemoryTransport, source: int | None) -> str:
        """The address at which a listener sees the connection that is made now."""
        router = seen_through(self.place.router, listener.place.router)
        if router is not None:
            return router.outer_address((self.identity.peer_id, source) if source is not None else None)
        if source is not None:
            return f"memory://{self.place.host}:{source}"
        if not self.place.port:
            return f"memory://{self.place.host}"
        self._next_port += 1
        return f"memory://{self.place.host}:{self._next_port}"

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
        self.reset(f"closed by us: {reason}")

    def reset(self, reason: str) -> None:
        """Every connection ends; new ones may be made."""
        for connection in self._connections:
            connection.die(reason)

    def _keep(self, connection: MemoryConnection | MemorySocket) -> None:
        self._connections = [each for each in self._connections if not each.ended]
        self._connections.append(connection)


class _Syn:
    """The SYN of an end that dials another one while that dials it."""

    def __init__(
        self, transport: MemoryTransport, source: int, target: str, peer: PeerID, purpose: Purpose, leads: bool
    ) -> None:
        self.transport = transport
        self.ends = (transport.identity.peer_id, peer)
        self.source, self.target = transport.outer_address(source), target
        self.purpose, self.leads = purpose, leads
        self.met: asyncio.Future[MemoryConnection] = asyncio.get_running_loop().create_future()

    def refuse(self) -> None:
        if not self.met.done():
            self.met.set_exception(ConnectError(f"{self.target} refused the connection", address=self.target))


class MemoryPort:
    """Implements `base.LocalPort`."""

    def __init__(self, transport: MemoryTransport, number: int) -> None:
        self._transport = transport
        self._number = number
        self._probes: list[MemoryConnection] = []

    async def probe(self, address: str, timeout: float) -> str | None:
        connection = await self._transport.dial(address, None, Purpose.PROBE, timeout, source=self._number)
        self._probes.append(connection)
        return connection.observed_address

    def guess(self, host: str) -> str:
        return f"memory://{host}:{self._number}"

    async def meet(
        self, address: str, peer: PeerID, purpose: Purpose, *, leads: bool, crossing: float, timeout: float
    ) -> MemoryConnection:
        network = self._transport.network
        network.dials.append((self._transport.identity.peer_id, address))
        syn = _Syn(self._transport, self._number, address, peer, purpose, leads)
        network.send_syn(syn)
        try:
            async with asyncio.timeout(crossing):
                connection = await syn.met
        except TimeoutError:
            raise ConnectError(f"{address} did not answer in time", address=address) from None
        finally:
            network.forget_syn(syn)
        try:
            async with asyncio.timeout(timeout):
                await self._transport.shake_hands(peer)
        except BaseException as error:  # a cancellation too: nobody else knows this connection
            connection.die("given up in the handshake")
            if isinstance(error, TimeoutError):
                raise HandshakeError(f"{address} did not answer in time", address=address) from None
            raise
        if connection.ended or connection.peer_id != connection.other.own_id:
            connection.die("another peer was expected here")
            raise HandshakeError(f"{address} is not {peer.short}, or went away", address=address)
        return connection

    def close(self) -> None:
        for connection in self._probes:
            connection.abort("it has shown where this peer is seen")
        self._probes.clear()
