"""What a peer knows of where it stands: the interfaces of this machine, what its user states, the port that its router
opened, where its contacts are, and where they see it."""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import socket
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace

import psutil

from swarmcli.network.addresses import Address, parse_address
from swarmcli.network.bounds import MAX_ADDRESSES
from swarmcli.network.endpoint import Endpoint
from swarmcli.network.identity import PeerID
from swarmcli.network.loop_thread import loop_time
from swarmcli.reach.verdict import (
    AskedContact,
    ContactSighting,
    Family,
    Network,
    ReachVerdict,
    Surroundings,
    families,
    family_of,
    host_of,
    judge,
    network_of,
)

logger = logging.getLogger(__name__)


_SIGHTINGS = 512  # contacts that are remembered …
_SIGHTING_LIFE = 1200.0  # … and seconds for which the word of a contact that has gone counts: two checks


class Evidence:
    """Owns what was seen, and judges it together with the results of dial-backs."""

    def __init__(self, endpoint: Endpoint, contacts: Callable[[], Iterable[PeerID]]) -> None:
        """`contacts`: further peers that can be asked, whose addresses are known."""
        self.around = Surroundings()
        self.stated: tuple[str, ...] = ()  # by the user, with IP addresses for host names …
        self._names: dict[str, tuple[str, ...]] = {}  # … which are here: address with a host name → IP addresses
        self.mapped: int | None = None  # the port that the router opened; IPv4 only, since no IPv6 is translated
        self._endpoint, self._contacts = endpoint, contacts
        # The oldest first, each with the time of the sighting.
        self._sightings: dict[PeerID, tuple[ContactSighting, float]] = {}

    async def begin(self) -> None:
        self.stated, self._names = await _resolved(self._endpoint.stated_addresses)
        self.around = look_around(self._endpoint.listener_addresses)

    @property
    def sightings(self) -> list[ContactSighting]:
        return [sighting for sighting, _ in self._sightings.values()]

    @property
    def beyond(self) -> list[ContactSighting]:
        """Contacts beyond this peer's own network."""
        return self.around.those_beyond(self.sightings)

    def look_again(self) -> Surroundings | None:
        """Looks at the interfaces. Returns what they were before, if that has changed; else None."""
        before = self.around
        try:
            around = look_around(self._endpoint.refresh_listener_addresses())
        except OSError as error:  # no descriptor is left, or an interface went while it was looked at
            logger.warning("this machine's interfaces cannot be looked at now: %s", error)
            return None
        if around == before:
            return None
        self.around = around
        return before

    def meet(self, peer: PeerID) -> ContactSighting | None:
        """Takes in where a connected contact is and sees this peer. None: its connection tells nothing."""
        seen = self._endpoint.seen(peer)
        if seen is None or seen.relayed or not (host := host_of(seen.remote_address)):
            return None
        if not seen.dialed and seen.punched:
            return None  # a punched connection tells nothing about others' dials
        observed = host_of(seen.observed_address) if seen.observed_address else None
        sighting = ContactSighting(host, observed, came_in=not seen.dialed)
        self._sightings.pop(peer, None)
        self._sightings[peer] = sighting, loop_time()
        if len(self._sightings) > _SIGHTINGS:
            # The oldest contact of the network that has the most goes: otherwise a crowd of identities in one network
            # could be all that is known, and asked.
            held = Counter(network_of(each.host) for each in self.sightings)
            del self._sightings[max(self._sightings, key=lambda each: held[network_of(self._sightings[each][0].host)])]
        return sighting

    def forget(self, left: Collection[Family]) -> None:
        """This machine has lost addresses of these families: what was seen of them holds no more."""
        for peer in [peer for peer, (seen, _) in self._sightings.items() if family_of(seen.host) in left]:
            del self._sightings[peer]

    def forget_the_gone(self) -> None:
        """Drops contacts that have been gone for _SIGHTING_LIFE."""
        since = loop_time() - _SIGHTING_LIFE
        for peer in [peer for peer, (_, at) in self._sightings.items() if at < since]:
            if not self._endpoint.is_connected(peer):
                del self._sightings[peer]

    def stated_in(self, family: Family) -> tuple[str, ...]:
        return tuple(address for address in self.stated if family_of(host_of(address)) == family)

    def families(self) -> list[Family]:
        found = families(self.around, self.sightings, self.stated)
        return [family for family in found if self.stated_in(family)] if self.stated else found

    def port(self, family: Family) -> int:
        """The port that others should dial: as the user states, else as the router maps it, else the listener's."""
        if stated := self.stated_in(family):
            return parse_address(stated[0]).port
        return (self.mapped if family != "IPv6" else None) or self._endpoint.listen_port

    def judge(self, family: Family, asks: Collection[AskedContact], *, unanswered: bool) -> ReachVerdict:
        verdict = judge(family, self.around, self.sightings, asks, self.stated_in(family), unanswered=unanswered)
        if family != "IPv6" and verdict.how == "dialed back" and parse_address(verdict.address).port == self.mapped:
            return replace(verdict, how="mapped")
        return verdict

    def candidates(self, family: Family, without: Collection[PeerID], most: int) -> list[tuple[PeerID, str]]:
        """Up to `most` contacts that may be asked, each with its network, all beyond this peer's own. Those that are
        connected in this family come first; otherwise the order is drawn by lot, so that a contact cannot count on
        being asked."""
        found: list[tuple[PeerID, str]] = []
        elsewhere: list[tuple[PeerID, str]] = []
        beyond = set(self.beyond)
        connected = self._endpoint.connected()
        for peer in connected:
            sighting, _ = self._sightings.get(peer, (None, 0.0))
            if peer in without or sighting is None or sighting not in beyond:
                continue
            if family_of(sighting.host) == family:
                found.append((peer, network_of(sighting.host)))
            elif (network := self._network_in(family, peer)) is not None:
                elsewhere.append((peer, network))
        passed_over = {*connected, *without}
        for peer in self._contacts():
            if peer not in passed_over and (network := self._network_in(family, peer)) is not None:
                elsewhere.append((peer, network))
        for each in (found, elsewhere):
            self._endpoint.random.shuffle(each)
        return [*found, *elsewhere][:most]

    def _network_in(self, family: Family, peer: PeerID) -> str | None:
        for host in map(host_of, self._endpoint.addresses_of(peer)):
            if host and family_of(host) == family and self.around.beyond(ContactSighting(host)):
                return network_of(host)
        return None

    def announced(self, verdicts: Sequence[ReachVerdict]) -> tuple[str, ...]:
        """The addresses that follow from verdicts, after the stated host names that lead there; one that cannot be
        resolved here may lead there too."""
        found = tuple(dict.fromkeys(address for verdict in verdicts for address in verdict.addresses))
        names = tuple(name for name, known in self._names.items() if not known or set(known).intersection(found))
        if found and names and not self.stated and all(verdict.how == "assumed" for verdict in verdicts):
            return names  # the user stated only names: these replace what the listener has found
        return (*(names if found else ()), *found)[:MAX_ADDRESSES]


def look_around(addresses: tuple[str, ...]) -> Surroundings:
    """The surroundings of a listener with these addresses. Takes a fraction of a millisecond."""
    hosts = {host for address in addresses if (host := host_of(address))}
    if addresses and addresses[0].startswith("memory://"):
        return Surroundings(addresses, frozenset(hosts))
    networks: list[Network] = []
    for entries in psutil.net_if_addrs().values():
        for entry in entries:
            if entry.family in (socket.AF_INET, socket.AF_INET6):
                host = entry.address.partition("%")[0]  # a link-local address names its interface
                hosts.add(host)
                with suppress(ValueError):  # what a system says about its own interfaces is not always complete
                    networks.append(_network(host, entry.netmask))
    return Surroundings(addresses, frozenset(hosts), tuple(dict.fromkeys(networks)))


def _network(host: str, netmask: str | None) -> Network:
    """The network of an interface. Raises ValueError."""
    address = ipaddress.ip_address(host)
    if netmask is None:
        return ipaddress.ip_network(address)
    if address.version == 4:
        return ipaddress.ip_network(f"{host}/{netmask}", strict=False)
    bits = int(ipaddress.IPv6Address(netmask.partition("/")[0])).bit_count()  # psutil writes ffff:ffff::
    return ipaddress.ip_network((address, bits), strict=False)


async def _resolved(addresses: Sequence[str]) -> tuple[tuple[str, ...], dict[str, tuple[str, ...]]]:
    """The stated addresses, with IP addresses for host names, which other peers do not resolve; and those with names,
    each with its IP addresses. A name that cannot be resolved now has none, and a warning is logged."""
    literals: dict[str, None] = {}
    names: dict[str, tuple[str, ...]] = {}
    for text in addresses:
        place = parse_address(text)
        if place.scheme != "tcp" or family_of(place.host) != "memory":
            literals[text] = None
            continue
        names[text] = ()
        try:
            entries = await asyncio.get_running_loop().getaddrinfo(place.host, place.port, type=socket.SOCK_STREAM)
            names[text] = tuple(str(Address("tcp", str(entry[4][0]), place.port)) for entry in entries)
        except OSError as error:
            logger.warning("%s is announced, but %s cannot be resolved: %s", text, place.host, error)
        literals.update(dict.fromkeys(names[text]))
    return tuple(literals), names
