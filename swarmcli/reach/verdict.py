"""A peer concludes who can dial it: one verdict for each family of addresses. Pure logic, no I/O.

The evidence: where contacts are, and at which address they see this peer; whether a dial came in at the listener; and
what became of the dial-backs that were asked for. Nobody's word counts alone: a dial that came in proves itself, and
that none can come in is believed only if contacts in unlike networks were asked.
"""

from __future__ import annotations

import ipaddress
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Literal, TypeAlias

from swarmcli.errors import AddressError
from swarmcli.network.addresses import Family, Scope, parse_address, scope_of
from swarmcli.network.prefix import prefix_of

How = Literal["assumed", "dialed back", "dialed from outside", "mapped", "stated", "asked in vain", "not checked"]
Network: TypeAlias = ipaddress.IPv4Network | ipaddress.IPv6Network

_VOICE_BITS = 16, 32  # leading bits, of IPv4 and IPv6, of one network: hosts within it may belong together


@dataclass(frozen=True, slots=True)
class ReachVerdict:
    """Says who can dial this peer at its addresses of one family."""

    family: Family
    scope: Scope  # how far away those are that can dial it; if nobody can, those that would want to
    dialable: bool | None  # None: not known yet; until then this peer is in client mode
    addresses: tuple[str, ...]  # what is announced, the likeliest first; empty unless dialable
    how: How
    networks: int = 0  # unlike networks that were asked, or from which a dial came in

    @property
    def address(self) -> str:
        return self.addresses[0] if self.addresses else ""


@dataclass(frozen=True, slots=True)
class ContactSighting:
    """One contact: where it is, and at which host it sees this peer. `came_in`: it dialed this peer's listener, and
    so says nothing about `observed`."""

    host: str
    observed: str | None = None
    came_in: bool = False


@dataclass(frozen=True, slots=True)
class AskedContact:
    """One contact that said it would dial this peer at `address`, and whose time has passed or dial has come in."""

    network: str
    address: str
    proved: bool = False


@dataclass(frozen=True, slots=True)
class Surroundings:
    """Where this peer stands: what its listener found, and the interfaces of this machine."""

    addresses: tuple[str, ...] = ()  # of the listener
    hosts: frozenset[str] = frozenset()  # of all interfaces
    networks: tuple[Network, ...] = ()  # that these interfaces are in
    _near: dict[str, bool] = field(default_factory=dict, init=False, compare=False, repr=False)  # cache of `is_near`

    def of(self, family: Family) -> tuple[str, ...]:
        return tuple(address for address in self.addresses if family_of(host_of(address)) == family)

    def beyond(self, sighting: ContactSighting) -> bool:
        """Whether this contact is outside this machine's networks: it is on the internet, or sees this peer at an
        address that a router has translated. What a contact inside them says does not count: no router is between."""
        if self.is_near(sighting.host):
            return False
        return scope_of(sighting.host) is Scope.INTERNET or self._translated(sighting)

    def those_beyond(self, sightings: Iterable[ContactSighting]) -> list[ContactSighting]:
        """The contacts beyond. That a private network is behind a router is known only from what contacts say, so most
        of those in private networks have to say it: one liar must not make a client of a peer in a large network."""
        far = [sighting for sighting in sightings if not self.is_near(sighting.host)]
        private = [sighting for sighting in far if scope_of(sighting.host) is not Scope.INTERNET]
        translated = sum(map(self._translated, private))
        untranslated = sum(sighting.observed is not None for sighting in private) - translated
        believed = translated > untranslated
        return [each for each in far if self.beyond(each) and (believed or scope_of(each.host) is Scope.INTERNET)]

    def is_near(self, host: str) -> bool:
        """Whether a host is this machine, or in a network that one of its interfaces is in."""
        found = self._near.get(host)
        if found is None:
            address = _ip(host)
            found = self._is_own(host) or (address is not None and any(address in each for each in self.networks))
            if len(self._near) >= 4096:  # strangers come from anywhere
                self._near.clear()
            self._near[host] = found
        return found

    def _translated(self, sighting: ContactSighting) -> bool:
        return sighting.observed is not None and not self._is_own(sighting.observed)

    def _is_own(self, host: str) -> bool:
        return host in self.hosts or scope_of(host) is Scope.HOST


def judge(
    family: Family,
    around: Surroundings,
    sightings: Collection[ContactSighting],
    asks: Collection[AskedContact] = (),
    stated: tuple[str, ...] = (),
    *,
    unanswered: bool = False,
) -> ReachVerdict:
    """The verdict on one family. `sightings` are of all families: once a peer has contacts beyond its network, even in
    another family, it no longer takes its own addresses for granted. `stated`: the addresses of this family that the
    user announces. `unanswered`: the contacts were asked, and none said that it would dial."""
    own = stated or around.of(family)
    seen = [sighting for sighting in sightings if family_of(sighting.host) == family]
    all_beyond = around.those_beyond(sightings)
    beyond = [sighting for sighting in all_beyond if family_of(sighting.host) == family]
    if seen and not all_beyond and not any(ask.proved for ask in asks):
        asks = ()  # silences of contacts that are no longer believed to be beyond
    if not beyond and not asks:
        return _judge_within(family, around, own, seen, bool(all_beyond))

    came_in = {network_of(sighting.host) for sighting in beyond if sighting.came_in}
    proofs = came_in | {ask.network for ask in asks if ask.proved}
    silent = {ask.network for ask in asks if not ask.proved} - proofs
    asked = len(proofs | {ask.network for ask in asks})
    # From at least as many networks a dial came in as none came. A silence may be a lie or a loss, a dial that came in
    # is neither; but one network alone may have a way in that the others have not (a campus, a tunnel).
    if proofs and len(proofs) >= len(silent):
        addresses, how = _proven(own, len(beyond) < len(seen), asks, stated)
        return ReachVerdict(family, Scope.INTERNET, True, addresses, how, asked)
    if asks:
        return ReachVerdict(family, Scope.INTERNET, False, (), "asked in vain", asked)
    # A contact sees this peer at an address of its own, so no router translates. Without the assumption a run whose
    # only dialable peer goes would end, although this one could take its place: nobody is left who could check it.
    seen_at = {sighting.observed for sighting in beyond}
    here = {host for host in map(host_of, own) if host in seen_at and scope_of(host) is Scope.INTERNET}
    if unanswered and here:
        untranslated = tuple(address for address in own if host_of(address) in here)
        return ReachVerdict(family, Scope.INTERNET, True, untranslated, "assumed")
    return ReachVerdict(family, Scope.INTERNET, None, (), "not checked")


def _judge_within(
    family: Family,
    around: Surroundings,
    own: tuple[str, ...],
    seen: Collection[ContactSighting],
    beyond_elsewhere: bool,
) -> ReachVerdict:
    """The verdict if no contact of this family is beyond this peer's own network."""
    if beyond_elsewhere and not seen:
        return ReachVerdict(family, Scope.INTERNET, None, (), "not checked")
    # The scope is that of its own addresses: contacts nearby do not prove that others cannot dial it.
    scopes = [scope_of(host_of(address)) for address in own]
    scope = max((Scope.LAN if each is None else each for each in scopes), default=Scope.HOST)
    return ReachVerdict(family, scope, bool(own), own, "assumed")


def _proven(
    own: tuple[str, ...], neighbours: bool, asks: Collection[AskedContact], stated: tuple[str, ...]
) -> tuple[tuple[str, ...], How]:
    """Chooses what to announce once a dial from beyond has come in: the address that was proved from most networks, and
    after it this peer's own ones for contacts nearby (a router need not let them through to the outer address)."""
    votes = Counter({ask.address: 0 for ask in asks})
    for address in {(ask.network, ask.address) for ask in asks if ask.proved}:
        votes[address[1]] += 1
    proven = [address for address, count in votes.most_common() if count]
    nearby = own if neighbours else ()
    if proven:
        # Proved addresses of the internet that are this machine's own, or its user's, come before what contacts say.
        sure = [address for address in proven if address in own and scope_of(host_of(address)) is Scope.INTERNET]
        best = (max(sure or proven, key=lambda address: (votes[address], address in own)),)
        how: How = "stated" if best[0] in stated else "dialed back"
        return tuple(dict.fromkeys((*best, *nearby))), how
    # A dial came in, but nobody has said at which address. Announce the own or stated ones of the internet; if there
    # are none, what there is, until a dial-back names the outer address.
    outer = tuple(address for address in own if scope_of(host_of(address)) is Scope.INTERNET)
    return outer or own, "dialed from outside"


def in_words(verdicts: Sequence[ReachVerdict], dialable: bool | None, *, wished: bool, relays: int) -> str:
    """One sentence. `dialable`: whether others can dial this peer (None: not known yet); `wished`: its user wants
    nobody to; `relays`: how many carry its connections."""
    instead = "it takes part with those whom it can dial"
    if relays:
        instead = f"it takes part through {relays} {'relay' if relays == 1 else 'relays'}, and dials those it can"
    if wished:
        return f"this peer does not listen (client mode); {instead}"
    if dialable is None:
        return "this peer is finding out whether others can dial it"
    if not dialable and not any(verdict.dialable is False for verdict in verdicts):
        return f"nobody could be asked yet whether others can dial this peer; {instead}"
    if not dialable:
        return f"others cannot dial this peer: its router or firewall lets nobody in; {instead}"
    verdict = max((each for each in verdicts if each.dialable), key=lambda each: each.scope)
    if verdict.scope is Scope.HOST:
        return "peers on this machine can dial this peer"
    where = "peers in this network" if verdict.scope is Scope.LAN else "others"
    if verdict.how == "assumed" and verdict.scope is Scope.INTERNET:
        return f"this peer listens at {verdict.address}; nobody outside has tried yet"
    mapped = ", by a port that its router has opened for it" if verdict.how == "mapped" else ""
    return f"{where} can dial this peer at {verdict.address}{mapped}"


def family_of(host: str) -> Family:
    address = _ip(host)
    if address is None:
        return "memory"
    return "IPv4" if address.version == 4 else "IPv6"


def network_of(host: str) -> str:
    """The network that a host is in, as far as an outsider can tell: hosts of one network count as one."""
    return prefix_of(host, *_VOICE_BITS).network


def host_of(address: str) -> str:
    """The host in an address; "" if it cannot be read or names none."""
    try:
        return parse_address(address).host
    except AddressError:
        return ""


def families(around: Surroundings, sightings: Iterable[ContactSighting], stated: Iterable[str]) -> list[Family]:
    """The families in which this peer listens or has contacts, the most useful first."""
    hosts = [*map(host_of, (*around.addresses, *stated)), *(sighting.host for sighting in sightings)]
    found = {family_of(host) for host in hosts if host}
    order: tuple[Family, ...] = ("IPv4", "IPv6", "memory")
    return [family for family in order if family in found]


@lru_cache(maxsize=4096)
def _ip(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return None
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
        return address.ipv4_mapped
    return address
