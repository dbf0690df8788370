"""Dial-backs: a contact has this peer dialed, which proves that it can be dialed.

    asker ── DialBackRequest(nonce, port) ──▶ contact ── DialForRequest ──▶ a third peer
      ▲                                          │ (where there is none)        │
      └───────────── probe with the nonce ◀──────┴──────────────────────────────┘

The contact names no host that it was told: it dials the one at which it sees the asker, at the port that the asker
names. A third peer whom the asker does not know is better than the contact, for which the asker's router may have
opened a way; it dials hosts of the internet alone, never one of its own network, at ports from 1024 on. The nonce comes
on a new connection that the asker's listener accepted. Nobody is told what became of a dial, so nobody can look around
with it, and budgets bound how many there are.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Annotated, TypeAlias

import msgspec

from swarmcli.errors import CallRefused, NetworkError, ProtocolViolation
from swarmcli.network.addresses import Address, Scope, format_address, parse_address, scope_of
from swarmcli.network.endpoint import Endpoint
from swarmcli.network.identity import PeerID
from swarmcli.network.loop_thread import loop_time
from swarmcli.network.task_owner import TaskOwner
from swarmcli.network.token_bucket import Meter
from swarmcli.network.wire.codec import decode_header, encode
from swarmcli.reach.budgets import LEAST_PORT, DialLimits
from swarmcli.reach.verdict import family_of, host_of, network_of

logger = logging.getLogger(__name__)

DIAL_BACK = "reach.dialback"
DIAL_FOR = "reach.dialfor"

NONCE_BYTES = 16
MAX_KNOWN = 64  # peers that an asker names as known to it

Nonce = Annotated[bytes, msgspec.Meta(min_length=NONCE_BYTES, max_length=NONCE_BYTES)]
Port = Annotated[int, msgspec.Meta(ge=0, le=65535)]


class DialBackRequest(msgspec.Struct, frozen=True, omit_defaults=True):
    """Have me dialed at the host where you see me, at this port, with this nonce; best by none of the `known`, or by
    you `yourself`."""

    nonce: Nonce
    port: Port
    known: Annotated[tuple[PeerID, ...], msgspec.Meta(max_length=MAX_KNOWN)] = ()
    yourself: bool = False


class DialBackReply(msgspec.Struct, frozen=True):
    """It will be tried, there. What comes of it only the dialed peer hears."""

    address: Annotated[str, msgspec.Meta(max_length=128)]


class DialForRequest(msgspec.Struct, frozen=True):
    """Dial this peer there with its nonce."""

    peer: PeerID
    address: Annotated[str, msgspec.Meta(max_length=128)]
    nonce: Nonce


class DialForReply(msgspec.Struct, frozen=True):
    """It will be tried."""


class DialProof(msgspec.Struct, frozen=True, tag="proof"):
    """A probe that was asked for carries this."""

    nonce: Nonce


class DialWish(msgspec.Struct, frozen=True, tag="wish"):
    """A request on a probe: its connection shows the contact a host of another family than the control connection."""

    request: DialBackRequest


ProbeMessage: TypeAlias = DialProof | DialWish


@dataclass(frozen=True, slots=True)
class DialBackOptions:
    """How a contact has others dialed. Times in seconds."""

    call: float = 2.0  # for a third peer's yes
    dial: float = 5.0  # that a dial for somebody may take
    delegates: int = 2  # third peers that are asked before the contact dials by itself
    limits: DialLimits = DialLimits()


class DialBackService:
    """Dials for others, within its budget."""

    def __init__(self, endpoint: Endpoint, options: DialBackOptions = DialBackOptions()) -> None:
        self._endpoint, self._options = endpoint, options
        meter = options.limits.meter
        self._budget = meter()  # for those who ask for themselves …
        # … and for those whom others name: what is only named must not use up what its neighbours ask for themselves.
        self._callers, self._named = meter(), meter()
        self._dials, self._dials_for = TaskOwner(), TaskOwner()
        self.dials = 0  # made so far, for anybody

    def start(self) -> None:
        self._endpoint.serve(DIAL_BACK, DialBackRequest, self.dial_back)
        self._endpoint.serve(DIAL_FOR, DialForRequest, self.dial_for)

    async def close(self) -> None:
        self._endpoint.withdraw(DIAL_BACK, DIAL_FOR)
        await self._dials.close()
        await self._dials_for.close()

    async def dial_back(self, peer: PeerID, request: DialBackRequest) -> DialBackReply:
        """Answers at once; the dial is a task of its own. Raises CallRefused."""
        return DialBackReply(self._begin(peer, self._place_of(peer), request))

    async def dial_for(self, peer: PeerID, request: DialForRequest) -> DialForReply:
        """The same for a peer that another one names. Raises CallRefused."""
        caller = host_of(self._place_of(peer))
        host = plain_host(request.address)
        if scope_of(host) is not Scope.INTERNET or request.peer == self._endpoint.peer_id:
            raise CallRefused("scope", "only hosts of the internet are dialed for others")
        if parse_address(request.address).port < LEAST_PORT:
            raise CallRefused("port", f"only ports from {LEAST_PORT} on are dialed for others")
        self._spend(self._dials_for, peer, (self._callers, caller), (self._named, host))
        self._dials_for.spawn(self._dial(request.peer, request.address, request.nonce))
        return DialForReply()

    def _place_of(self, peer: PeerID) -> str:
        """Raises CallRefused for a peer that is seen over a relay alone."""
        seen = self._endpoint.seen(peer)
        if seen is None or seen.relayed:
            raise CallRefused("unseen", "this peer does not see where you are")
        return seen.remote_address

    def wished(self, peer: PeerID, remote_address: str, request: DialBackRequest) -> None:
        """A request that came on a probe. There is nobody to refuse it to."""
        try:
            self._begin(peer, remote_address, request)
        except CallRefused as refusal:
            logger.debug("no dial-back for %s: %s", peer.short, refusal)

    def _begin(self, peer: PeerID, remote_address: str, request: DialBackRequest) -> str:
        place = parse_address(remote_address)
        if place.scheme == "tcp" and not request.port:
            raise CallRefused("port", "a port to dial is missing")
        address = with_port(remote_address, request.port)
        self._spend(self._dials, peer, (self._budget, place.host))
        self._dials.spawn(self._carry_out(peer, address, request))
        return address

    def _spend(self, dials: TaskOwner, peer: PeerID, *counted: tuple[Meter, str]) -> None:
        """Raises CallRefused if no more dials are made for this peer, or for the network of a host, or at all."""
        busy = len(dials) >= self._options.limits.under_way
        if busy or not all(meter.take(loop_time(), peer=peer, network=network_of(host)) for meter, host in counted):
            raise CallRefused("busy", "enough dials for now; ask again in some minutes")

    async def _carry_out(self, peer: PeerID, address: str, request: DialBackRequest) -> None:
        for third in () if request.yourself else self._thirds(peer, address, {peer, *request.known}):
            try:
                wish = DialForRequest(peer, address, request.nonce)
                await self._endpoint.call(third, DIAL_FOR, wish, DialForReply, timeout=self._options.call)
                return
            except NetworkError:
                continue
        await self._dial(peer, address, request.nonce)

    def _thirds(self, peer: PeerID, address: str, known: set[PeerID]) -> list[PeerID]:
        """Some whom the asker does not know and who stand in another network than it does."""
        host = host_of(address)
        if scope_of(host) is not Scope.INTERNET:
            return []
        found = []
        for third in self._endpoint.connected():
            seen = self._endpoint.seen(third)
            if third not in known and seen is not None and not seen.relayed:
                place = host_of(seen.remote_address)
                if family_of(place) == family_of(host) and network_of(place) != network_of(host):
                    found.append(third)
        return self._endpoint.random.sample(found, min(self._options.delegates, len(found)))

    async def _dial(self, peer: PeerID, address: str, nonce: bytes) -> None:
        self.dials += 1
        try:
            await self._endpoint.probe(address, peer, encode(DialProof(nonce)), timeout=self._options.dial)
        except NetworkError as error:
            logger.debug("%s cannot be dialed back: %s", peer.short, error)


def read_probe(message: bytes) -> ProbeMessage | None:
    """Reads what came on a probe; None if it cannot be read."""
    try:
        found = decode_header(ProbeMessage, message)
    except ProtocolViolation:
        return None
    return found if isinstance(found, DialProof | DialWish) else None


def with_port(seen_at: str, port: int) -> str:
    """Where this peer listens, at the host where somebody saw it: it dialed from another port."""
    place = parse_address(seen_at)
    return format_address(Address(place.scheme, place.host, port))


def scope_or_host(host: str) -> Scope:
    return scope_of(host) or Scope.HOST


def plain_host(address: str) -> str:
    """The host of an address that names an IP literal or a peer of a memory network; "" otherwise."""
    try:
        place = parse_address(address)
    except NetworkError:
        return ""
    named = place.scheme == "tcp" and family_of(place.host) == "memory"
    return "" if named else place.host
