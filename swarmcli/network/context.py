"""An endpoint as its pools and channels see it."""

from __future__ import annotations

import logging
import os
import random
import re
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

from swarmcli.clock import Clock
from swarmcli.errors import ConnectionLost, ProtocolViolation
from swarmcli.events import Events, PeerRefused
from swarmcli.network.address_book import AddressBook
from swarmcli.network.bounds import MAX_ADDRESSES, MAX_KNOWN_PEERS
from swarmcli.network.dialer import Dialer
from swarmcli.network.identity import PeerID
from swarmcli.network.ledger import Ledgers
from swarmcli.network.loop_thread import loop_time
from swarmcli.network.task_owner import TaskOwner
from swarmcli.network.transports.base import Connection, Transport

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes on connections with their framing, without what encryption adds."""

    sent: int = 0
    received: int = 0

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(self.sent + other.sent, self.received + other.received)

    def __sub__(self, other: Traffic) -> Traffic:
        return Traffic(self.sent - other.sent, self.received - other.received)


@dataclass(frozen=True, slots=True)
class Handler:
    """`answer(peer, request)` returns a struct; for streams `answer(peer, request, stream)` returns nothing."""

    request_type: type[Any]
    answer: Callable[..., Awaitable[Any]]


PunchBulk: TypeAlias = Callable[[PeerID], Awaitable[Connection]]


class EndpointContext:
    """One peer on the network, without its connections: who it is, where it is, what it serves, and what it keeps of
    others. The channels know the endpoint as this."""

    def __init__(self, transport: Transport, clock: Clock | None, events: Events | None, seed: int | None) -> None:
        self.identity = transport.identity
        self.peer_id = transport.identity.peer_id
        self.limits = transport.limits
        self.direct: tuple[str, ...] = ()  # where this peer says that it can be dialed …
        self.relayed: tuple[str, ...] = ()  # … itself, and through relays
        self.clock = clock or Clock()
        self.events = events or Events()
        self.random = random.Random(seed if seed is not None else os.urandom(16))
        # Drawn anew at each start: a peer that restarted has forgotten older connections.
        self.boot_id = self.random.randbytes(16)
        self.call_handlers: dict[str, Handler] = {}  # a method has one handler, in one of the two
        self.stream_handlers: dict[str, Handler] = {}
        # Makes a bulk connection with a peer whose control connection is punched, or raises NetworkError. If it raises,
        # or is None, a relay carries the stream.
        self.punch_bulk: PunchBulk | None = None
        self.tasks = TaskOwner()
        self.ledgers = Ledgers.of(self.limits.budgets)
        self.book = AddressBook(MAX_KNOWN_PEERS, loop_time)
        self.dialer = Dialer(transport, self.book, loop_time)
        self.ended_traffic = Traffic()  # of connections that have ended, and of what was relayed for others
        self.streamed: dict[str, Traffic] = {}  # by service, of streams that have ended; see Endpoint.moved
        self.violations: Counter[str] = Counter()  # broken rule → connections closed for it

    @property
    def addresses(self) -> tuple[str, ...]:
        """All that this peer announces, once it has started: where it can be dialed itself, then through relays."""
        relayed = self.relayed[: MAX_ADDRESSES // 2]
        return self.direct[: MAX_ADDRESSES - len(relayed)] + relayed

    def stream_ended(self, service: str, traffic: Traffic) -> None:
        self.streamed[service] = self.streamed.get(service, Traffic()) + traffic

    def connection_ended(self, connection: Connection, error: ConnectionLost) -> None:
        self.ended_traffic += Traffic(connection.bytes_sent, connection.bytes_received)
        if isinstance(error, ProtocolViolation):
            # A rule's name stands before the first colon. Numbers in it may come from the other end, which could make
            # up names without end.
            self.violations[re.sub(r"\d+", "…", error.reason.partition(":")[0])] += 1
            self.events.emit(PeerRefused(connection.peer_id.text, error.reason))
            logger.warning("closed the connection to %s: %s", connection.peer_id.short, error.reason)
