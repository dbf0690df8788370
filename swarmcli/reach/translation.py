"""How this peer is seen from outside, and what kind of translation its routers do.

Two listeners are dialed from one local port. If both see the same outer port, the translation is *independent* of whom
one dials (RFC 4787, section 4.1), and a third peer can be told where to dial. If they see different ones, it is
*dependent*: nobody knows at which port the next one would see this peer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Literal

from swarmcli.errors import AddressError, ConnectError
from swarmcli.network.addresses import parse_address
from swarmcli.network.transports.base import LocalPort

Translation = Literal["none", "independent", "dependent"]


async def outer_address(port: LocalPort, listeners: Sequence[str]) -> str | None:
    """Where the first of these listeners that answers sees the port. None: nobody says."""
    for address in listeners:
        seen = await _probe(port, address)
        if seen is not None:
            return seen
    return None


async def find_translation(
    port: LocalPort, listeners: Sequence[str], own_hosts: frozenset[str]
) -> tuple[str | None, Translation | None]:
    """Where one of the listeners sees the port, and what it says that another one, on an unlike host, sees it so too or
    not. `own_hosts` are those of this machine's interfaces. (None, None): nobody answers; None as the kind: only one
    does, and sees a translated host."""
    first, *others = listeners
    unlike = [each for each in others if parse_address(each).host != parse_address(first).host]
    found = await asyncio.gather(_probe(port, first), *(_probe(port, each) for each in unlike[:1]))
    seen = [address for address in found if address is not None]
    if not seen:
        return None, None
    if len(set(seen)) > 1:
        return seen[0], "dependent"
    if parse_address(seen[0]).host in own_hosts:
        return seen[0], "none"
    return seen[0], "independent" if len(seen) > 1 else None


async def _probe(port: LocalPort, address: str) -> str | None:
    try:
        return await port.probe(address, timeout=5.0)
    except (ConnectError, AddressError):
        return None
