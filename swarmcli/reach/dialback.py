"""Dial-backs: a contact dials this peer, which proves that it can be dialed.

    asker ── DialBackRequest(nonce, port) ──▶ contact
      ▲                                          │
      └────────── probe with the nonce ◀─────────┘

The contact dials the host at which it sees the asker, at the port that the asker names. If the asker wants a dial in
another family of addresses than that of their connection, the contact dials the host that the asker names: only on the
internet, at ports from 1024 on. The nonce comes on a new connection that the asker's listener accepts. Only the dialed
host learns what became of a dial, so nobody can scan with it, and budgets bound how many dials there are.
"""

from __future__ import annotations

import logging
from typing import Annotated

import msgspec

from swarmcli.errors import CallRefused, NetworkError
from swarmcli.network.addresses import Address, Scope, parse_address, scope_of
from swarmcli.network.endpoint import Endpoint
from swarmcli.network.identity import PeerID
from swarmcli.network.loop_thread import loop_time
from swarmcli.network.task_owner import TaskOwner
from swarmcli.network.token_bucket import Meter
from swarmcli.reach.budgets import BACK_LIMITS, BACK_UNDER_WAY, LEAST_PORT
from swarmcli.reach.verdict import family_of, network_of

logger = logging.getLogger(__name__)

DIAL_BACK = "reach.dialback"
NONCE_BYTES = 16

_DIAL = 5.0  # seconds that a dial for another peer may take

Nonce = Annotated[bytes, msgspec.Meta(min_length=NONCE_BYTES, max_length=NONCE_BYTES)]
AddressText = Annotated[str, msgspec.Meta(max_length=128)]


class DialBackRequest(msgspec.Struct, frozen=True, omit_defaults=True):
    """Dial me with this nonce: at the host where you see me, at this port, or at this address of another family."""

    nonce: Nonce
    port: Annotated[int, msgspec.Meta(ge=0, le=65535)]
    address: AddressText = ""


class DialBackReply(msgspec.Struct, frozen=True):
    """The contact will dial this address. Only the dialed peer learns what comes of it."""

    address: AddressText


class DialBackService:
    """Dials for others, within its budget."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        self._seen = Meter(**BACK_LIMITS)  # dials to hosts at which this peer sees the asker …
        # … and to hosts that askers name, which must not use up the budget of peers that are in the named network.
        self._named, self._namers = Meter(**BACK_LIMITS), Meter(**BACK_LIMITS)
        self._dials = TaskOwner()

    def start(self) -> None:
        self._endpoint.serve(DIAL_BACK, DialBackRequest, self.dial_back)

    async def close(self) -> None:
        self._endpoint.withdraw(DIAL_BACK)
        await self._dials.close()

    async def dial_back(self, peer: PeerID, request: DialBackRequest) -> DialBackReply:
        """Answers at once; the dial runs in a task of its own. Raises CallRefused."""
        seen = self._endpoint.seen(peer)
        if seen is None or seen.relayed:
            raise CallRefused("unseen", "this peer does not see where you are")
        place, now = parse_address(seen.remote_address), loop_time()
        address = _named(request.address) if request.address else with_port(seen.remote_address, request.port)
        if place.scheme == "tcp" and not parse_address(address).port:
            raise CallRefused("port", "a port to dial is missing")
        host = parse_address(address).host
        here, there = network_of(place.host), network_of(host)
        if request.address:
            if family_of(host) == family_of(place.host):
                raise CallRefused("family", "in the family of your connection only your own host is dialed")
            allowed = self._namers.take(now, peer=peer, network=here)
            allowed = allowed and self._named.take(now, peer=peer, network=there)
        else:
            allowed = self._seen.take(now, peer=peer, network=here)
        if not allowed or len(self._dials) >= BACK_UNDER_WAY:
            raise CallRefused("busy", "enough dials for now; ask again in some minutes")
        self._dials.spawn(self._dial(peer, address, request.nonce))
        return DialBackReply(address)

    async def _dial(self, peer: PeerID, address: str, nonce: bytes) -> None:
        try:
            await self._endpoint.probe(address, peer, nonce, timeout=_DIAL)
        except NetworkError as error:
            logger.debug("%s cannot be dialed back: %s", peer.short, error)


def _named(text: str) -> str:
    """An address that an asker names, if strangers may have it dialed. Raises CallRefused."""
    if scope_of(plain_host(text)) is not Scope.INTERNET:
        raise CallRefused("scope", "only hosts of the internet are dialed where they are named")
    place = parse_address(text)
    if place.port < LEAST_PORT:
        raise CallRefused("port", f"only ports from {LEAST_PORT} on are dialed where they are named")
    return str(Address(place.scheme, place.host, place.port))


def with_port(seen_at: str, port: int) -> str:
    """The address with this port instead: where somebody saw a peer, and the port at which that listens."""
    place = parse_address(seen_at)
    return str(Address(place.scheme, place.host, port))


def plain_host(address: str) -> str:
    """The host of an address that names an IP literal or a peer of a memory network; "" otherwise."""
    try:
        place = parse_address(address)
    except NetworkError:
        return ""
    named = place.scheme == "tcp" and family_of(place.host) == "memory"
    return "" if named else place.host
