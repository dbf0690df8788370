"""Dialing a peer that has several addresses."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from swarmcli.errors import AddressError, ConnectError
from swarmcli.network.identity import PeerID
from swarmcli.network.limits import DIAL_STAGGER
from swarmcli.network.transports.base import Connection, Purpose, Transport


async def dial_any(
    transport: Transport, peer: PeerID, addresses: Sequence[str], purpose: Purpose, timeout: float
) -> Connection:
    """Dials all addresses, the next one while those before it are still silent; the first to answer wins.

    Raises ConnectError with what failed at each.
    """
    if len(addresses) == 1:
        return await _dial(transport, peer, addresses[0], purpose, timeout)
    attempts = [
        asyncio.create_task(_dial(transport, peer, address, purpose, timeout, delay=number * DIAL_STAGGER))
        for number, address in enumerate(addresses)
    ]
    winner: Connection | None = None
    errors: list[ConnectError] = []
    try:
        for attempt in asyncio.as_completed(attempts):
            try:
                winner = await attempt
                return winner
            except ConnectError as error:
                errors.append(error)
        raise ConnectError("; ".join(map(str, errors)), step=errors[-1].step, address=errors[-1].address)
    finally:
        try:
            await _give_up(attempts, winner)
        except asyncio.CancelledError:
            if winner is not None:
                winner.abort("given up while being dialed")
            raise


async def _dial(
    transport: Transport, peer: PeerID, address: str, purpose: Purpose, timeout: float, delay: float = 0.0
) -> Connection:
    if delay:
        await asyncio.sleep(delay)
    try:
        return await transport.dial(address, peer, purpose, timeout)
    except AddressError as error:
        raise ConnectError(str(error), address=address) from error


async def _give_up(attempts: list[asyncio.Task[Connection]], winner: Connection | None) -> None:
    """Ends the other attempts; a connection that came about all the same is closed."""
    for task in attempts:
        task.cancel()
    for outcome in await asyncio.gather(*attempts, return_exceptions=True):
        if not isinstance(outcome, BaseException) and outcome is not winner:
            outcome.abort("another address was faster")
