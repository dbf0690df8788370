"""Probes: short connections that show their dialer where it is seen, and may carry one short message."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable

from swarmcli.errors import ProtocolViolation
from swarmcli.network.context import EndpointContext
from swarmcli.network.identity import PeerID
from swarmcli.network.loop_thread import set_within
from swarmcli.network.prefix import Prefix, prefix_of_address
from swarmcli.network.transports.base import Connection

MAX_PROBE = 4096  # bytes of the message
_PROBES = 256  # connections that others may hold at one time …
_PROBE_LIFE = 30.0  # … and for so many seconds


class Probes:
    """The probes that others have dialed to this peer."""

    def __init__(self, endpoint: EndpointContext) -> None:
        self.held: dict[Connection, Prefix] = {}  # with their networks, the oldest first
        # Called for each message on a probe that the listener accepted: with sender, address and message.
        self.heard: Callable[[PeerID, str, bytes], None] | None = None
        self._endpoint = endpoint

    def end_those_of(self, peer: PeerID, reason: str) -> None:
        for connection in [each for each in self.held if each.peer_id == peer]:
            connection.abort(reason)

    def accepted(self, connection: Connection) -> None:
        """Holds a probe. Its dialer knows by now where it is seen, but may keep the connection for a while, since that
        keeps its router's ports as they are."""
        if len(self.held) >= _PROBES:
            self._end_one()
        self.held[connection] = prefix_of_address(connection.remote_address)
        self._endpoint.tasks.spawn(self._hold(connection))

    def _end_one(self) -> None:
        """Ends the oldest probe of the network that holds the most. If new ones were refused instead, whoever holds all
        could keep every proof from being heard. Messages come at the beginning, so those of old probes were heard."""
        held = Counter(self.held.values())
        oldest = max(self.held, key=lambda connection: held[self.held[connection]])
        del self.held[oldest]
        oldest.abort("too many probes")

    async def _hold(self, connection: Connection) -> None:
        def heard(message: bytes) -> None:
            # Shows that a stranger's dial gets through, which a relayed or punched connection does not.
            came_in = not (connection.dialed or connection.relayed or connection.punched)
            if self.heard is not None and came_in:
                self.heard(connection.peer_id, connection.remote_address, message)

        probe = ProbeReceiver(heard)
        connection.start(probe)
        try:
            if not await set_within(probe.ended, _PROBE_LIFE):
                await connection.close("held long enough")
        finally:
            self.held.pop(connection, None)
            connection.abort("held long enough")


class ProbeReceiver:
    """The Receiver of a connection on which one short message may come, or nothing."""

    def __init__(self, heard: Callable[[bytes], None] | None) -> None:
        self.ended = asyncio.Event()
        self._heard = heard

    def reading_wanted(self) -> bool:
        return True

    def payload_buffer(self, header: bytes, size: int) -> memoryview:
        raise ProtocolViolation("unexpected message: on a connection for probing")

    def frame_received(self, header: bytes, payload: memoryview) -> None:
        if self._heard is None or len(header) > MAX_PROBE:
            raise ProtocolViolation("unexpected message: on a connection for probing")
        heard, self._heard = self._heard, None
        heard(header)

    def connection_lost(self, error: Exception) -> None:
        self.ended.set()
