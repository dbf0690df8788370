"""How the ports of this peer are seen from outside its routers: it dials two listeners from one local port and asks.

What it finds out about the translation holds for ten minutes, for every port.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Literal

from swarmcli.errors import AddressError, ConnectError
from swarmcli.network.addresses import Address, Family, is_direct, parse_address, scope_of
from swarmcli.network.endpoint import Endpoint
from swarmcli.network.loop_thread import loop_time
from swarmcli.network.transports.base import LocalPort
from swarmcli.reach.verdict import Surroundings, family_of, host_of

_LISTENERS = 4  # that are asked how a port is seen, one after the other
_KNOWN_FOR = 600.0  # seconds for which the kind of translation is taken to stay as it is

# How routers translate. Two listeners are dialed from one local port. If both see the same outer port, the translation
# is *independent* of the destination (RFC 4787, section 4.1), and a third peer can be told where to dial. If they see
# different ones, it is *dependent*: nobody knows at which port a third peer would see this one.
Translation = Literal["none", "independent", "dependent"]


async def outer_address(port: LocalPort, listeners: Sequence[str]) -> str | None:
    """Where a listener sees the port: the first of these that says. None: none does."""
    for address in listeners:
        seen = await _probe(port, address)
        if seen is not None:
            return seen
    return None


async def find_translation(
    port: LocalPort, listeners: Sequence[str], own_hosts: frozenset[str]
) -> tuple[str | None, Translation | None]:
    """Where a listener sees the port, and how the routers translate, by comparison with another listener on another
    host. `own_hosts` are those of this machine's interfaces. (None, None): nobody answers; None as the kind: only one
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


@dataclass
class OwnEnd:
    """This end of a connection to be: a port for each family, and where it is seen. With a `dependent` translation
    that address cannot be dialed, but its host shows behind which router this peer is."""

    ports: dict[Family, LocalPort] = field(default_factory=dict)
    seen: dict[Family, str] = field(default_factory=dict)
    dependent: dict[Family, str] = field(default_factory=dict)

    @property
    def anywhere(self) -> list[str]:
        return [*self.seen.values(), *self.dependent.values()]

    def close(self) -> None:
        for port in self.ports.values():
            port.close()


class Outside:
    """What this peer knows of its routers."""

    def __init__(self, endpoint: Endpoint, around: Callable[[], Surroundings]) -> None:
        """`around` says what this machine's interfaces are at the moment."""
        self._endpoint, self._around = endpoint, around
        self._translations: dict[Family, tuple[Translation, float]] = {}  # with the time at which it was found
        self._outer_hosts: dict[Family, str] = {}  # at which a listener saw this peer last

    def forget(self) -> None:
        """This machine is in another network."""
        self._translations.clear()
        self._outer_hosts.clear()

    def translation(self, family: Family) -> Translation | None:
        """How this peer's routers translate, as far as it was found out in the last ten minutes."""
        kind, at = self._translations.get(family, (None, 0.0))
        return kind if kind is not None and loop_time() - at < _KNOWN_FOR else None

    async def prepare(self, end: OwnEnd) -> None:
        """Opens a port in each family and finds out how it is seen. Raises ConnectError."""
        listeners = self._farthest_listeners()
        for family in listeners:
            with suppress(OSError):  # this machine has no such addresses now
                end.ports[family] = self._endpoint.transport.local_port(family)
        async with asyncio.TaskGroup() as group:
            for family, port in end.ports.items():
                group.create_task(self._look(end, family, port, listeners[family]))
        if not end.anywhere:
            self._guess(end)
        if not end.anywhere:
            raise ConnectError("nobody outside says how it is seen")

    def _guess(self, end: OwnEnd) -> None:
        """Nobody says how a port is seen. Most routers leave its number as it is, so the two try that."""
        for family, host in self._outer_hosts.items():
            with suppress(OSError):
                port = end.ports.get(family) or self._endpoint.transport.local_port(family)
                end.ports[family] = port
                end.seen[family] = port.guess(host)

    async def _look(self, end: OwnEnd, family: Family, port: LocalPort, listeners: Sequence[str]) -> None:
        kind = self.translation(family)
        if kind is None:
            seen, kind = await find_translation(port, listeners, self._around().hosts)
            if kind is not None:
                self._translations[family] = kind, loop_time()
        else:
            seen = await outer_address(port, listeners)
        if seen is not None and family_of(host_of(seen)) == family:
            (end.dependent if kind == "dependent" else end.seen)[family] = seen
            if kind != "dependent":
                self._outer_hosts[family] = host_of(seen)

    def _farthest_listeners(self) -> dict[Family, list[str]]:
        """By family, where peers outside this network have answered this one's dials, the nearest first. Not where a
        peer merely says that it is: strangers can make this peer dial these addresses."""
        found: dict[Family, dict[Address, None]] = {}
        around = self._around()
        trip = self._endpoint.round_trip
        for peer in sorted(self._endpoint.connected(), key=lambda peer: trip(peer) or float("inf")):
            seen = self._endpoint.seen(peer)
            if seen is None or not seen.dialed or seen.relayed or seen.punched:
                continue
            for address in (seen.remote_address, *filter(is_direct, self._endpoint.first_hand(peer))):
                place = replace(parse_address(address), peer_id=peer)
                if not around.is_near(place.host):
                    found.setdefault(family_of(place.host), {})[place] = None
        listeners: dict[Family, list[str]] = {}
        for family, places in found.items():
            # Those of the widest scope: a peer in a provider's network, between two routers, sees another host than one
            # on the internet does.
            scopes = {place: scope_of(place.host) or 0 for place in places}
            farthest = [str(place) for place, scope in scopes.items() if scope == max(scopes.values())]
            listeners[family] = farthest[:_LISTENERS]
        return listeners
