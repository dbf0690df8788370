"""Does what `swarm netcheck` asks: takes part in the network of a run for a moment, without the run, and looks
around."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Sequence
from contextlib import aclosing, suppress
from dataclasses import asdict, dataclass
from typing import Any

from swarmcli.dht import DHT
from swarmcli.errors import NetworkError
from swarmcli.network.addresses import Scope, parse_address, scope_of
from swarmcli.network.endpoint import Endpoint
from swarmcli.network.identity import PeerID
from swarmcli.network.loop_thread import loop_time
from swarmcli.network.transports.tcp.interfaces import announced_addresses
from swarmcli.reach.evidence import Translation, find_translation
from swarmcli.reach.mapping import NOT_ASKED, Mapping, PortMapping, default_gateway
from swarmcli.reach.rates import Rates, measure
from swarmcli.reach.reach import Reach
from swarmcli.reach.verdict import Family, ReachVerdict, family_of, host_of

MEASURED_PEERS = 3
MEASURING_SECONDS = 20.0  # after which no further peer is measured: one takes up to 8 s, and all of it up to a minute
ASK = "name a recipe or a link, and its peers say for sure"


@dataclass(frozen=True, slots=True, kw_only=True)
class FamilyReport:
    """One family of addresses: who can dial this computer there, and as what others see it."""

    family: str  # "IPv4" or "IPv6"
    dialable: bool | None = None  # None: not known
    scope: str = ""  # "host", "lan" or "internet": from how far away, or how far away the peers are that cannot
    how: str = ""  # how that was found out, in words
    addresses: tuple[str, ...] = ()  # at which others can dial it
    seen: str | None = None  # where a contact sees it
    # "none"; "independent": everyone sees the same port of the router, so holes can be punched; "dependent": everyone
    # sees another one, so they cannot. None: not known, since it takes two contacts.
    translation: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class MappingReport:
    """The port that the router opened, or why it did not."""

    gateway: str = ""
    method: str = ""
    address: str = ""  # host and port, as the router claims
    problem: str = ""
    asked: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkReport:
    """Another peer. Rates are bytes per second, times seconds; None: not known, and `problem` may say why."""

    peer: str
    address: str = ""
    relayed: bool = False  # it is reached over a third one
    relays: bool = False  # it carries this peer's connections
    round_trip: float | None = None
    down: float | None = None
    up: float | None = None
    problem: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class NetReport:
    sentence: str  # what it all means for taking part
    listening: tuple[str, ...] = ()  # this computer's own addresses
    families: tuple[FamilyReport, ...] = ()
    mapping: MappingReport = MappingReport()
    peers: tuple[LinkReport, ...] = ()
    clock_offset: float | None = None  # seconds by which the swarm's clock is ahead of this computer's; None: not known

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


async def look_around(*, port: int = 0, port_mapping: bool = True) -> NetReport:
    """Finds out what it can without any other peer: addresses, and whether the router opens a port."""
    with socket.create_server(("", port)) as listener:
        port = listener.getsockname()[1]
        listening = announced_addresses("::" if socket.has_dualstack_ipv6() else "0.0.0.0", port)
        mapping = await _try_mapping(port) if port_mapping else await _gateway_alone()
    families = tuple(
        FamilyReport(family=family, scope=scope.name.lower(), how="only a peer can tell")
        for family in ("IPv4", "IPv6")
        if (scope := widest(listening, family)) is not None
    )
    sentence = alone_in_words(widest(listening), mapping)
    return NetReport(sentence=sentence, listening=listening, families=families, mapping=mapping)


async def _try_mapping(port: int) -> MappingReport:
    """Asks for a port, and gives it back at once."""
    asked = PortMapping(port)
    try:
        async with aclosing(asked.leases()) as leases:
            await anext(leases)
        return mapping_report(asked.current, asked.problem, (await _gateway_alone()).gateway)
    finally:
        await asked.withdraw()


async def _gateway_alone() -> MappingReport:
    gateway = await asyncio.to_thread(default_gateway)
    return MappingReport(gateway="" if gateway is None else gateway.host, asked=False)


def mapping_report(mapping: Mapping | None, problem: str, gateway: str) -> MappingReport:
    if mapping is None:
        return MappingReport(gateway=gateway, problem=problem)
    host = f"[{mapping.host}]" if ":" in mapping.host else mapping.host
    return MappingReport(gateway=mapping.gateway, method=mapping.method, address=f"{host}:{mapping.port}")


def widest(addresses: tuple[str, ...], family: str | None = None) -> Scope | None:
    """The widest scope of these addresses, of one family if it is named; None: there are none."""
    hosts = [parse_address(address).host for address in addresses]
    scopes = [scope_of(host) for host in hosts if family is None or (":" in host) == (family == "IPv6")]
    return max((scope for scope in scopes if scope is not None), default=None)


def alone_in_words(scope: Scope | None, mapping: MappingReport) -> str:
    """Says what it can without having asked any peer."""
    if scope is None or scope is Scope.HOST:
        return "this computer is connected to no network, so it can take part with peers on itself alone"
    if scope is Scope.INTERNET:
        return (
            f"this computer has an address of the internet, so others can dial it unless a firewall stops them; {ASK}"
        )
    if mapping.address:
        outer = scope_of(mapping.address.rpartition(":")[0].strip("[]"))
        if outer is not Scope.INTERNET:
            return f"this computer is behind two routers, so it will probably take part through relays; {ASK}"
        return f"this computer's router opens ports for it, so others can probably dial it; {ASK}"
    refused = "opens no port for it" if mapping.asked else "was not asked for a port"
    return f"this computer is behind a router that {refused}, so it will probably take part through relays; {ASK}"


async def ask_peers(dht: DHT) -> NetReport:
    """Asks the peers of a running DHT, and measures their links. It takes up to a minute."""
    reach, endpoint = dht.reach, dht.endpoint
    await _until_helped(reach)
    families = [await _family(reach, verdict) for verdict in reach.verdicts]
    mapping, asked = await _gateway_alone(), reach.mapping
    if asked is not None:
        mapping = mapping_report(asked.current, asked.problem, mapping.gateway)
    return NetReport(
        sentence=reach.sentence(),
        listening=endpoint.listener_addresses,
        families=tuple(families),
        mapping=mapping,
        peers=tuple(await _measure_all(endpoint, endpoint.connected(), _relays(endpoint))),
        clock_offset=dht.clock.offset,
    )


async def _until_helped(reach: Reach) -> None:
    """Where nobody can dial this peer, its router and relays are asked meanwhile, and what the router opened is dialed
    back; each takes some seconds."""
    with suppress(TimeoutError):
        async with asyncio.timeout(20.0):
            while not (reach.dialable or (_is_refused(reach) and _relays(reach.endpoint))):  # noqa: ASYNC110  no event
                await asyncio.sleep(0.2)


def _is_refused(reach: Reach) -> bool:
    """Whether no router opens anything, or none is asked."""
    return reach.mapping is None or (reach.mapping.current is None and reach.mapping.problem != NOT_ASKED)


def _relays(endpoint: Endpoint) -> list[PeerID]:
    """The peers that carry this one's connections, the nearest first."""
    found = [parse_address(address).relay for address in endpoint.addresses]
    return [relay for relay in found if relay is not None]


async def _family(reach: Reach, verdict: ReachVerdict) -> FamilyReport:
    seen, translation = await _translation(reach, verdict.family)
    return FamilyReport(
        family=verdict.family,
        dialable=verdict.dialable,
        scope=verdict.scope.name.lower(),
        how=verdict.how,
        addresses=verdict.addresses,
        seen=seen,
        translation=translation,
    )


async def _translation(reach: Reach, family: Family) -> tuple[str | None, Translation | None]:
    """Where contacts see a port of this computer, and whether all see the same one."""
    listeners = _listeners(reach, family)
    if not listeners:
        return None, None
    try:
        port = reach.endpoint.local_port(family)
    except OSError:  # this computer does not have the family
        return None, None
    try:
        return await find_translation(port, listeners, reach.evidence.around.hosts)
    finally:
        port.close()


def _listeners(reach: Reach, family: Family) -> list[str]:
    """Where peers listen that this one has dialed itself: each answers once more. One in this computer's own network
    does not see what the router makes of its port, so it is asked only where there is no other."""
    found: dict[str, bool] = {}
    for peer in reach.endpoint.connected():
        seen = reach.endpoint.seen(peer)
        if seen is not None and seen.dialed and not seen.relayed and not seen.punched:
            host = host_of(seen.remote_address)
            if family_of(host) == family:
                found[f"{seen.remote_address}/{peer.text}"] = reach.evidence.around.is_near(host)
    return [address for address, near in found.items() if not near] or list(found)


async def _measure_all(endpoint: Endpoint, connected: Sequence[PeerID], relays: Sequence[PeerID]) -> list[LinkReport]:
    """Relays first, then the nearest peers; rates with the first MEASURED_PEERS that lend their link, one at a
    time. No more than eight are asked, and some of them refuse."""
    near = sorted(connected, key=lambda peer: endpoint.round_trip(peer) or float("inf"))
    found: list[LinkReport] = []
    measured, end = 0, loop_time() + MEASURING_SECONDS
    for peer in list(dict.fromkeys((*relays, *near)))[:8]:
        rates, problem = Rates(None, None), ""
        if measured < MEASURED_PEERS and loop_time() < end:
            try:
                rates = await measure(endpoint, peer)
                measured += 1
            except NetworkError as error:
                problem = str(error)
        found.append(_peer(endpoint, peer, rates, problem, peer in relays))
    return found


def _peer(endpoint: Endpoint, peer: PeerID, rates: Rates, problem: str, relays: bool) -> LinkReport:
    seen = endpoint.seen(peer)
    return LinkReport(
        peer=peer.short,
        address="" if seen is None else seen.remote_address,
        relayed=seen is not None and seen.relayed,
        relays=relays,
        round_trip=endpoint.round_trip(peer),
        down=rates.down,
        up=rates.up,
        problem=problem,
    )
