"""Dialing a peer that has several addresses."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeAlias

from swarmcli.errors import AddressError, ConnectError
from swarmcli.network.addresses import is_direct
from swarmcli.network.limits import DIAL_STAGGER
from swarmcli.network.transports.base import Connection

Dial: TypeAlias = Callable[[str], Awaitable[Connection]]

# Seconds that silent direct addresses have before a relay is tried beside them: a TLS handshake with the other side of
# the world takes less, and a connection that is needlessly relayed costs somebody else's link for as long as it stands.
RELAY_PATIENCE = 1.5


async def dial_any(dial: Dial, addresses: Sequence[str]) -> Connection:
    """Dials all addresses, the next one while those before it are still silent; the first to answer wins. Relays stand
    behind all others, and are tried when these have failed or are silent for long.

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
                due = loop.time() + (RELAY_PATIENCE if left and not is_direct(left[0]) else DIAL_STAGGER)
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
