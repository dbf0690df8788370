"""Checks of this computer's line, with `--network`: who can dial it, what its router does, how fast the line is.

They take part in the network of the run for a moment, without the run.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress

from swarmcli.cli.doctor.finding import Context, Finding
from swarmcli.dht import DHT
from swarmcli.errors import NetworkError
from swarmcli.network.addresses import Scope, parse_address
from swarmcli.network.endpoint import Endpoint
from swarmcli.network.identity import PeerID
from swarmcli.network.loop_thread import loop_time
from swarmcli.peer.linked import visitor_of
from swarmcli.reach.mapping import NOT_ASKED, Mapping, default_gateway
from swarmcli.reach.rates import measure
from swarmcli.reach.reach import Reach
from swarmcli.reach.verdict import ReachVerdict
from swarmcli.recipe.settings import LocalSettings
from swarmcli.words import format_duration, format_rate

MEASURED_PEERS, ASKED_PEERS = 3, 8
MEASURING_SECONDS = 20.0  # after which no further peer is measured: one takes up to 8 s, and all of it up to a minute
HELPED_SECONDS = 20.0  # for the router and relays, which answer within some seconds
SCOPES = {Scope.HOST: "from this computer", Scope.LAN: "from this network", Scope.INTERNET: "from the internet"}
HOW = {
    "assumed": "as far as is known",
    "dialed back": "contacts dialed it back",
    "dialed from outside": "others have dialed it",
    "mapped": "contacts dialed the port of its router",
    "stated": "as its user says",
    "asked in vain": "no contact's dial came in",
    "not checked": "no contact was asked",
}


def contacts_of(context: Context) -> list[str]:
    """The first contacts that a person has named, and those of the link; those of the recipe where there are none."""
    if context.link is not None:
        return [*context.peers, *context.link.addresses]
    return list(context.peers or (context.recipe.network.initial_peers if context.recipe is not None else ()))


def check_network(context: Context) -> Iterator[Finding]:
    """Takes part in the network of the run for up to a minute, and asks its peers."""
    if not context.network:
        text = "not checked; --network finds out in up to a minute whether others can dial this computer"
        yield Finding("reach", "SKIP", text)
        return
    contacts = contacts_of(context)
    if not contacts:
        text = 'only the peers of a run can tell who can dial this computer; type: swarm doctor "swarm://…" --network'
        yield Finding("reach", "SKIP", text)
        return
    if not context.reached:
        yield Finding("reach", "SKIP", "no contact of the run answers, so nobody can tell")
        return
    local = context.recipe.local if context.recipe is not None else LocalSettings()
    visitor = visitor_of(context.link or context.recipe)
    dht = DHT(
        start=False,
        identity=visitor.identity if visitor else None,
        initial_peers=contacts,
        port=local.port,
        port_mapping=local.port_mapping,
        host=local.host or "",
        client_mode=local.client_mode,
        announce_addresses=local.announce_addresses,
    )
    dht.membership = visitor.membership if visitor else None
    with dht:
        yield from dht.run_coroutine(_ask_peers(dht))


async def _router(mapping: Mapping | None, problem: str | None) -> Finding:
    """`problem`: why it has opened no port; None: it was not asked."""
    gateway = await asyncio.to_thread(default_gateway)
    name = gateway.host if gateway is not None else "none found"
    if mapping is not None:
        host = f"[{mapping.host}]" if ":" in mapping.host else mapping.host
        return Finding("router", "OK", f"{mapping.gateway or name}, opened {host}:{mapping.port} over {mapping.method}")
    if problem is None:
        return Finding("router", "OK", f"{name}, not asked for a port")
    return Finding("router", "OK", f"{name}, opens no port{f': {problem}' if problem else ''}")


async def _ask_peers(dht: DHT) -> list[Finding]:
    """Asks the peers of a running DHT, and measures the rates of their lines. It takes up to a minute."""
    reach, endpoint = dht.reach, dht.endpoint
    await _until_helped(reach)
    found = [Finding("reach", "OK", reach.sentence())]
    found += map(_family, reach.verdicts)
    asked = reach.mapping
    found.append(await _router(asked.current if asked else None, asked.problem if asked else None))
    return found + [each async for each in _measured(endpoint)]


async def _until_helped(reach: Reach) -> None:
    """If nobody can dial this peer, waits while its router and relays are asked and the port that the router opened is
    dialed back."""

    def refused() -> bool:
        return reach.mapping is None or (reach.mapping.current is None and reach.mapping.problem != NOT_ASKED)

    with suppress(TimeoutError):
        async with asyncio.timeout(HELPED_SECONDS):
            while not (reach.dialable or (refused() and _relays(reach.endpoint))):  # noqa: ASYNC110  no event
                await asyncio.sleep(0.2)


def _relays(endpoint: Endpoint) -> list[PeerID]:
    """The peers that carry this one's connections, the nearest first."""
    found = [parse_address(address).relay for address in endpoint.addresses]
    return [relay for relay in found if relay is not None]


def _family(verdict: ReachVerdict) -> Finding:
    """Says who can dial this computer at its addresses of a family."""
    can = {None: "not known whether others can dial it", True: "can be dialed", False: "cannot be dialed"}
    at = f", at {', '.join(verdict.addresses)}" if verdict.addresses else ""
    return Finding(verdict.family, "OK", f"{can[verdict.dialable]} {SCOPES[verdict.scope]}, {HOW[verdict.how]}{at}")


async def _measured(endpoint: Endpoint) -> AsyncIterator[Finding]:
    """Yields a finding for each peer that is asked, relays first, then the nearest. Measures rates with the first
    MEASURED_PEERS that lend their line, one at a time. At most ASKED_PEERS are asked, and some of them refuse."""
    relays = _relays(endpoint)
    near = sorted(endpoint.connected(), key=lambda peer: endpoint.round_trip(peer) or float("inf"))
    measured, end = 0, loop_time() + MEASURING_SECONDS
    for peer in list(dict.fromkeys((*relays, *near)))[:ASKED_PEERS]:
        seen, trip = endpoint.seen(peer), endpoint.round_trip(peer)
        told = ["over a relay" if seen is not None and seen.relayed else seen.remote_address if seen else ""]
        told += ["carries this computer's connections"] if peer in relays else []
        told += [] if trip is None else [format_duration(trip)]
        if measured < MEASURED_PEERS and loop_time() < end:
            try:
                rates = await measure(endpoint, peer)
                measured += 1
                told += [f"{format_rate(rates.down)} down"] if rates.down is not None else []
                told += [f"{format_rate(rates.up)} up"] if rates.up is not None else []
            except NetworkError as error:
                told.append(str(error))
        yield Finding("rates", "OK", f"{peer.short}: {', '.join(filter(None, told))}")
