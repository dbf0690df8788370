"""Dialing peers where the address book says, and telling the book what came of it."""

from __future__ import annotations

import asyncio
import errno
import math
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import replace
from typing import TypeAlias

from swarmcli.errors import AddressError, ConnectError, WrongPeerError
from swarmcli.network.address_book import AddressBook
from swarmcli.network.addresses import is_direct, parse_address, scope_of
from swarmcli.network.bounds import DIAL_STAGGER, DIAL_TIMEOUT
from swarmcli.network.identity import PeerID
from swarmcli.network.token_bucket import Meter
from swarmcli.network.transports.base import Connection, Purpose, Transport

# Failures that say something about this machine, and nothing about the address.
_OURS = (errno.ENETUNREACH, errno.ENETDOWN, errno.EADDRNOTAVAIL, errno.EMFILE, errno.ENFILE, errno.ENOBUFS)
# Dials that may fail at addresses which other peers have named, per second in the long run and at once.
FAILED_DIALS = 8.0, 256.0
FAILED_DIALS_PER_HOST = 1.0, 64.0  # many honest peers may share it
# Seconds after which a relay is tried beside silent direct addresses: a TLS handshake with the other side of the world
# takes less, and a connection that is needlessly relayed costs somebody else's line for as long as it stands.
_RELAY_PATIENCE = 1.5
_TOO_MANY = "{} is not tried: too many addresses that others have named do not answer"


Dial: TypeAlias = Callable[[str], Awaitable[Connection]]


async def dial_any(dial: Dial, addresses: Sequence[str]) -> Connection:
    """Dials all addresses in their order, the next one also while those before it are still silent; the first to answer
    wins. Relays come last, and are tried when all others have failed or are silent for _RELAY_PATIENCE.

    Raises ConnectError with what failed at each.
    """
    if len(addresses) == 1:
        return await _dial(dial, addresses[0])
    loop = asyncio.get_running_loop()
    under_way: set[asyncio.Task[Connection]] = set()
    winner: Connection | None = None
    errors: list[ConnectError] = []
    left = list(addresses)
    due = loop.time()
    try:
        while left or under_way:
            if left and (not under_way or loop.time() >= due):
                under_way.add(loop.create_task(_dial(dial, left.pop(0))))
                due = loop.time() + (_RELAY_PATIENCE if left and not is_direct(left[0]) else DIAL_STAGGER)
            patience = max(0.0, due - loop.time()) if left else None
            done, _ = await asyncio.wait(under_way, timeout=patience, return_when=asyncio.FIRST_COMPLETED)
            for attempt in done:
                try:
                    winner = await attempt
                except ConnectError as error:
                    errors.append(error)
                    under_way.discard(attempt)
                else:
                    return winner
        raise ConnectError("; ".join(map(str, errors)), step=errors[-1].step, address=errors[-1].address)
    finally:
        try:
            await _give_up(under_way, winner)
        except asyncio.CancelledError:
            if winner is not None:
                winner.abort("given up while being dialed")
            raise


async def _dial(dial: Dial, address: str) -> Connection:
    try:
        return await dial(address)
    except AddressError as error:
        raise ConnectError(str(error), address=address) from error


async def _give_up(attempts: set[asyncio.Task[Connection]], winner: Connection | None) -> None:
    """Ends the other attempts; a connection that came about all the same is closed."""
    for task in attempts:
        task.cancel()
    for outcome in await asyncio.gather(*attempts, return_exceptions=True):
        if not isinstance(outcome, BaseException) and outcome is not winner:
            outcome.abort("another address was faster")


class Dialer:
    """Dials with the transport of each address's scheme. Failed dials at unproven addresses are charged to a budget."""

    def __init__(self, transport: Transport, book: AddressBook, now: Callable[[], float]) -> None:
        self.transports: dict[str, Transport] = {transport.scheme: transport}
        self.ping_time: Callable[[PeerID], float | None] = lambda peer: None  # to a connected peer, in seconds
        self._book = book
        self._now = now
        # How many dials may fail at addresses that others named. It refills with time, so strangers can make this peer
        # neither scan a network nor burden a victim. Dials under way count as failed.
        self._failures = Meter(host=FAILED_DIALS_PER_HOST, everyone=FAILED_DIALS)

    def addresses_of(self, peer: PeerID) -> tuple[str, ...]:
        """Where this peer can be tried now, with the transports that are there."""
        return self.usable(self._book.addresses_of(peer))

    def usable(self, addresses: Iterable[str]) -> tuple[str, ...]:
        """Those for which there is a transport."""
        return tuple(address for address in addresses if address.partition("://")[0] in self.transports)

    async def dial(self, address: str, expected: PeerID | None, purpose: Purpose, timeout: float) -> Connection:
        """Dials one address, whoever named it. Raises ConnectError and its kinds, or AddressError."""
        parsed = parse_address(address)
        transport = self.transports.get(parsed.scheme)
        if transport is None:
            raise AddressError(f"{address} cannot be dialed: this peer has no transport for it")
        connection = await transport.dial(address, expected, purpose, timeout)
        if connection.peer_id != transport.identity.peer_id:
            # In the form of the book: a direct address without the peer's id.
            bare = str(replace(parsed, peer_id=None) if parsed.direct else parsed)
            self._book.answered(connection.peer_id, bare)
            if parsed.scheme == "tcp" and scope_of(parsed.host) is None:  # a name, which others do not take from us
                self._book.answered(connection.peer_id, connection.remote_address)
        return connection

    async def dial_peer(self, peer: PeerID, addresses: tuple[str, ...], purpose: Purpose) -> Connection:
        """Dials these addresses; the first at which the peer answers wins. Raises ConnectError with what failed at
        each."""

        async def attempt(address: str) -> Connection:
            return await self._attempt(peer, address, purpose)

        if not addresses:
            raise ConnectError("no address is known")
        return await dial_any(attempt, sorted(addresses, key=self._distance))

    def _distance(self, address: str) -> float:
        """Direct addresses in their order, then relays, the nearest to this peer first."""
        relay = parse_address(address).relay
        if relay is None:
            return -1.0
        seconds = self.ping_time(relay)
        return math.inf if seconds is None else seconds

    async def _attempt(self, peer: PeerID, address: str, purpose: Purpose) -> Connection:
        stranger = address not in self._book.first_hand(peer)
        parsed = parse_address(address)
        host = parsed.host if parsed.relay is None else parsed.relay.text
        if stranger and not self._failures.take(self._now(), host=host):
            raise ConnectError(_TOO_MANY.format(address), address=address)
        try:
            connection = await self.dial(address, peer, purpose, DIAL_TIMEOUT)
        except (ConnectError, AddressError) as error:
            ours = isinstance(error.__cause__, OSError) and error.__cause__.errno in _OURS
            if not ours:
                self._book.failed(peer, address, somebody_else=isinstance(error, WrongPeerError))
            raise
        if stranger:
            self._failures.give_back(host=host)
        return connection
