"""Every transport gives authenticated connections that carry frames.

A frame is a short header and a raw payload, both bytes to this layer. Payloads are read straight into memory that
the receiver names after it has seen the header, and written straight from the sender's memory.

    Transport ── listen/dial ──▶ Connection ── frames ──▶ Receiver

A connection belongs to one pair of peers and is for one purpose: `control` (small messages, one per pair) or `bulk`
(one stream at a time). Both ends know each other's PeerID before the first frame.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import Protocol, TypeAlias

from swarmcli.network.addresses import Family, Scheme
from swarmcli.network.bounds import NetworkLimits
from swarmcli.network.identity import Identity, PeerID
from swarmcli.network.membership import Membership
from swarmcli.network.rates import LinkRates

Buffer: TypeAlias = bytes | bytearray | memoryview


class Purpose(IntEnum):
    """The use of a connection; the dialer says it in the handshake."""

    CONTROL = 0  # multiplexed calls and keepalives, one per pair of peers
    BULK = 1  # one stream at a time, so that it delays nobody
    PROBE = 2  # the dialer learns where it is seen, and may send one message


class Receiver(Protocol):
    """Takes the frames of a connection. All methods are called on the loop and must not block."""

    def reading_wanted(self) -> bool:
        """Whether the next frame may come. Asked before each; while it may not, the other end is slowed down. A
        receiver that has said no calls `Connection.read_on` once that has changed."""

    def payload_buffer(self, header: bytes, size: int) -> memoryview | None:
        """Memory of exactly `size` bytes to read the payload into. Called only if size > 0.

        None: there is none now; `reading_wanted` is False from then on, and this is called again once that is True.
        Raising ProtocolViolation closes the connection with that reason.
        """

    def frame_received(self, header: bytes, payload: memoryview) -> None:
        """A whole frame is there. Raising ProtocolViolation closes the connection with that reason."""

    def connection_lost(self, error: Exception) -> None:
        """Called exactly once, last. ConnectionLost("closed by us: …"/"closed by peer: …") after an orderly end."""


class Connection(Protocol):
    """One authenticated, encrypted connection. Used from the loop only."""

    peer_id: PeerID  # who the other end has proved to be
    purpose: Purpose
    dialed: bool  # True at the end that dialed
    remote_address: str  # of the other end, as this machine sees it: of a peer behind a router, the router's
    observed_address: str | None  # at the end that dialed: where the listener sees this one; None: it cannot say
    local_host: str | None  # this machine's address on the connection; None where that means nothing
    on_this_computer: bool  # both ends are: its bytes count against no limit of the line
    relayed: bool  # a relay carries it: `remote_address` is then the other end's address over that relay
    punched: bool  # both ends dialed at once (`LocalPort.meet`): nobody can be dialed at its addresses, now or later

    @property
    def bytes_sent(self) -> int:
        """Bytes handed over for writing so far."""

    @property
    def bytes_waiting(self) -> int:
        """How many of these are known not to have reached the other end yet."""

    @property
    def bytes_received(self) -> int:
        """Bytes received so far, those of unfinished frames too: they show the keepalive that the other end lives."""

    def start(self, receiver: Receiver) -> None:
        """Begins delivery of frames; until then nothing is read beyond the handshake."""

    async def send(self, header: bytes, payload: Sequence[Buffer] = ()) -> None:
        """Writes one frame; returns when the bytes are handed over and the write buffer is below its limit.

        Payload pieces are written one after the other; their memory may be reused once this returns.
        Frames of concurrent senders do not interleave. Raises ConnectionLost.
        """

    def read_on(self) -> None:
        """The receiver wants frames again."""

    async def close(self, reason: str = "") -> None:
        """An orderly end: what was sent still arrives if the other end lives. Idempotent."""

    def abort(self, reason: str) -> None:
        """An end at once, nothing is flushed. Idempotent."""


Accept: TypeAlias = Callable[[Connection], None]
Join: TypeAlias = Callable[[bytes], asyncio.BufferedProtocol]


class Transport(Protocol):
    """Makes connections of one kind."""

    scheme: Scheme  # of the addresses that it dials
    identity: Identity
    limits: NetworkLimits  # that the other end must keep; checked before memory is taken for what it sends
    membership: Membership | None  # of a closed run, where only members get a connection; None: everybody does

    async def listen(self, accept: Accept) -> tuple[str, ...]:
        """Opens the listener and returns the addresses that it has found for itself. Raises ListenError.

        `accept` is called with each incoming connection after its handshake. A failed or slow handshake costs
        nobody else anything. A transport in client mode is never asked to listen.
        """

    def own_addresses(self) -> tuple[str, ...]:
        """The addresses that `listen` would return now: a machine may move to another network."""

    async def dial(self, address: str, expected: PeerID | None, purpose: Purpose, timeout: float) -> Connection:
        """Connects; with `expected` only to that peer. Raises ConnectError and its kinds, or AddressError."""

    async def close(self) -> None:
        """Closes the listener and every connection. Idempotent; leaves no task and no socket."""


class LocalPort(Protocol):
    """A port of this machine from which several connections are dialed: a router gives all of them one outer port, if
    its translation does not depend on the destination."""

    async def probe(self, address: str, timeout: float) -> str | None:
        """Where the listener at `address` sees this port; None if it does not say. Raises ConnectError, AddressError.

        The connection is held until `close`, so that routers keep the port as it is.
        """

    def guess(self, host: str) -> str:
        """The address at which others would see this port, if the router at `host` does not change its number."""

    async def meet(
        self, address: str, peer: PeerID, purpose: Purpose, *, leads: bool, crossing: float, timeout: float
    ) -> Connection:
        """A connection with a peer that dials this port at the same moment; exactly one end `leads` the handshake.

        The two have `crossing` seconds to meet, and `timeout` to be done with the handshake. Raises ConnectError.
        """

    def close(self) -> None:
        """Gives the port back; connections that it has made stay. Idempotent."""


class DirectTransport(Transport, Protocol):
    """A transport whose connections no relay carries."""

    rates: LinkRates  # for all its connections together; relayed connections run over these too

    def local_port(self, family: Family) -> LocalPort:
        """Takes any free port. Raises OSError, also where this machine does not have the family."""

    def on_join(self, join: Join | None) -> None:
        """From now on `join(token)` takes over each incoming connection that begins with a token, in the clear, instead
        of a handshake. It may raise Refused, whose words are sent to the other end."""

    async def dial_plain(self, address: str, protocol: asyncio.BufferedProtocol, timeout: float) -> None:
        """Connects, without a handshake. `close` ends it, if it still stands. Raises ConnectError, AddressError."""
