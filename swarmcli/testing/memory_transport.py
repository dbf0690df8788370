"""Transport and connections on a MemoryNetwork; see memory.py for the faults that it can have."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING

from swarmcli.errors import ConnectError, ConnectionLost, HandshakeError, ListenError, ProtocolViolation, WrongPeerError
from swarmcli.network.addresses import parse_address
from swarmcli.network.identity import Identity, PeerID
from swarmcli.network.transports.base import Accept, Buffer, FrameLimits, Purpose, Receiver
from swarmcli.testing.memory_link import Kind, Packet, frame_packets

if TYPE_CHECKING:
    from swarmcli.testing.memory_network import MemoryNetwork

_WRITE_BUFFER = 256 * 1024  # bytes under way in one direction, beyond which a sender waits


class MemoryConnection:
    """One end of a connection; `other` is the other one."""

    other: MemoryConnection

    def __init__(
        self, owner: MemoryTransport, peer_id: PeerID, purpose: Purpose, *, dialed: bool, address: str
    ) -> None:
        self.peer_id = peer_id
        self.purpose = purpose
        self.dialed = dialed
        self.remote_address = address
        self.bytes_sent = 0
        self.bytes_received = 0
        self._owner = owner
        self._own_id = owner.identity.peer_id
        self._network = owner.network
        self._loop = asyncio.get_running_loop()
        self._receiver: Receiver | None = None
        self._error: Exception | None = None
        self._paused = False
        self._pumping = False
        self._travelling: deque[Packet] = deque()  # towards this end, in order
        self._last_arrival = 0.0
        self._inbox: deque[Packet] = deque()  # arrived and not yet delivered
        self._unacknowledged = 0  # bytes sent from here that the other end has not taken yet
        self._writers: deque[asyncio.Future[None]] = deque()
        self._network.joined(self)
        owner.connections[self] = None

    @property
    def bytes_waiting(self) -> int:
        return self._unacknowledged

    def start(self, receiver: Receiver) -> None:
        self._receiver = receiver
        if self._error is not None:
            self._loop.call_soon(receiver.connection_lost, self._error)
        else:
            self._loop.call_soon(self.pump)

    async def send(self, header: bytes, payload: Sequence[Buffer] = ()) -> None:
        self._check_open()
        self._check_size(ValueError, len(header), sum(memoryview(piece).nbytes for piece in payload))
        whole = b"".join(payload) if payload else b""
        uplink, downlink = self._network.uplink(self._own_id), self._network.downlink(self.peer_id)
        limited = uplink.bandwidth is not None or downlink.bandwidth is not None
        for packet in frame_packets(header, whole, split=limited):
            self._unacknowledged += packet.size
            self.bytes_sent += packet.size
            uplink.submit(self, packet, self.other.travel)
        while self._unacknowledged > _WRITE_BUFFER:
            waiter = self._loop.create_future()
            self._writers.append(waiter)
            await waiter
            self._check_open()

    def pause_reading(self) -> None:
        self._paused = True

    def resume_reading(self) -> None:
        if self._paused:
            self._paused = False
            self._loop.call_soon(self.pump)

    async def close(self, reason: str = "") -> None:
        if self._error is None:
            self._end_in_order(ConnectionLost(f"closed by us: {reason}"), reason)

    def abort(self, reason: str) -> None:
        if self._error is None:
            self.reset_other("reset by peer")
            self._end(ConnectionLost(f"closed by us: {reason}"))

    def reset_other(self, reason: str) -> None:
        """Sends the other end a reset; it is lost where the path is cut."""
        delay = self._network.latency(self._own_id, self.peer_id)
        self._loop.call_later(delay, self.other._was_reset, reason)

    def travel(self, packet: Packet) -> None:
        """The packet has left the other end's link and will reach this one's, behind those before it."""
        arrival = self._loop.time() + self._network.latency(self.peer_id, self._own_id)
        self._last_arrival = max(arrival, self._last_arrival)
        self._travelling.append(packet)
        self._loop.call_at(self._last_arrival, self._reach_link)

    def pump(self) -> None:
        """Delivers what has arrived as far as path, pauses and receiver allow."""
        if self._pumping:  # a receiver resumed reading while being handed a frame
            return
        self._pumping = True
        try:
            while self._inbox and self._may_deliver():
                self._deliver(self._inbox.popleft())
        finally:
            self._pumping = False

    def _may_deliver(self) -> bool:
        if self._error is not None or self._receiver is None or not self._network.flows(self._own_id, self.peer_id):
            return False
        return not self._paused or self._inbox[0].kind is Kind.RESET

    def _reach_link(self) -> None:
        self._network.downlink(self._own_id).submit(self, self._travelling.popleft(), self._arrive)

    def _arrive(self, packet: Packet) -> None:
        self._inbox.append(packet)
        if self._error is None:
            self.pump()
        elif self._network.flows(self._own_id, self.peer_id) and self.other._error is None:
            self.reset_other("reset by peer")  # like a kernel that knows no such connection (any more)

    def _was_reset(self, reason: str) -> None:
        if not self._network.severed(self._own_id, self.peer_id):
            self._inbox.clear()
            self._inbox.append(Packet(Kind.RESET, 0, reason=reason))
            self.pump()

    def _deliver(self, packet: Packet) -> None:
        self.bytes_received += packet.size
        self.other._acknowledged(packet.size)
        if packet.kind is Kind.FRAME:
            try:
                self._hand_over(packet.header, packet.payload)
            except ProtocolViolation as error:
                self._end_in_order(error, error.reason)
        elif packet.kind is not Kind.PART:
            ended = packet.kind is Kind.FIN
            self._end(ConnectionLost(f"closed by peer: {packet.reason}" if ended else packet.reason))

    def _hand_over(self, header: bytes, payload: bytes) -> None:
        assert self._receiver is not None
        self._check_size(ProtocolViolation, len(header), len(payload))
        memory = memoryview(b"")
        if payload:
            memory = self._receiver.payload_buffer(header, len(payload))
            memory[:] = payload
        if self._error is None:  # the receiver may have closed us meanwhile
            self._receiver.frame_received(header, memory)

    def _check_size(self, kind: type[ValueError | ProtocolViolation], header: int, payload: int) -> None:
        limits = self._owner.limits
        if header > limits.max_header:
            raise kind(f"oversized header: {header} bytes, at most {limits.max_header}")
        if payload > limits.max_payload:
            raise kind(f"oversized payload: {payload} bytes, at most {limits.max_payload}")

    def _acknowledged(self, size: int) -> None:
        self._unacknowledged -= size
        if self._unacknowledged <= _WRITE_BUFFER:
            self._wake_writers()

    def _wake_writers(self) -> None:
        while self._writers:
            waiter = self._writers.popleft()
            if not waiter.done():
                waiter.set_result(None)

    def _check_open(self) -> None:
        if self._error is not None:
            raise ConnectionLost(str(self._error))

    def _end_in_order(self, error: Exception, reason: str) -> None:
        uplink = self._network.uplink(self._own_id)
        uplink.submit(self, Packet(Kind.FIN, 0, reason=reason), self.other.travel)
        self._end(error)

    def _end(self, error: Exception) -> None:
        """This end is no more; says so to the receiver, from the loop."""
        self._error = error
        self._inbox.clear()
        self._wake_writers()
        self._network.left(self)
        self._owner.connections.pop(self, None)
        if self._receiver is not None:
            self._loop.call_soon(self._receiver.connection_lost, error)

    def die(self, reason: str) -> None:
        if self._error is None:
            self.reset_other("reset by peer")
            self._end(ConnectionLost(reason))


class MemoryTransport:
    """One peer's access to a MemoryNetwork. `limits` bound what it takes in."""

    def __init__(self, network: MemoryNetwork, identity: Identity, *, listening: bool, limits: FrameLimits) -> None:
        self.network = network
        self.identity = identity
        self.limits = limits
        self.name = identity.peer_id.short
        self.connections: dict[MemoryConnection, None] = {}
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
        own_id = self.identity.peer_id
        local = MemoryConnection(self, there.identity.peer_id, purpose, dialed=True, address=address)
        remote = MemoryConnection(there, own_id, purpose, dialed=False, address=f"memory://{self.name}")
        local.other, remote.other = remote, local
        # The dialer is done half a round trip before the listener.
        delay = self.network.latency(own_id, there.identity.peer_id)
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
        for connection in list(self.connections):
            connection.die(f"closed by us: {reason}")
