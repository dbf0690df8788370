"""Direct connections between two peers that nobody can dial: both dial each other at the same moment.

Each router lets in what looks like the answer to something that went out. So both ends take a fresh port, ask a
listener how it is seen from outside, tell each other over the connection that a relay carries, and dial each other
from these ports (`network/transports/tcp/local_port.py`). After it has said "go" the asker waits half a round trip, so
that both dial at the same moment. If a router gives each connection another outer port, this cannot work, and the relay
stays.

    asker  ── Ask ──────▶  asked          both take a port and see how it looks from outside
           ◀────── Ready ──
           ── Go ───────▶                 up to three times
           ═══ SYN ═╳═ SYN ═══

For the control connection of a pair the peer with the smaller id asks, and after a failure again, in growing intervals.
For each bulk connection the end that opens a stream asks, as long as the control connection is a punched one. The
address that the other end names may be anybody's: `punch_rules.py` says what is dialed.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Annotated

import msgspec

from swarmcli.backoff import Backoff
from swarmcli.errors import CallRefused, ConnectError, NetworkError
from swarmcli.events import Event, PeerConnected
from swarmcli.network.addresses import is_direct
from swarmcli.network.endpoint import Endpoint
from swarmcli.network.identity import PeerID
from swarmcli.network.loop_thread import loop_time, set_within
from swarmcli.network.task_owner import TaskOwner
from swarmcli.network.token_bucket import Meter
from swarmcli.network.transports.base import Connection, LocalPort, Purpose
from swarmcli.reach.budgets import ASK_LIMITS, BULK_LIMITS, CONTROL_LIMITS, NEAR_LIMITS, TRIES
from swarmcli.reach.outside import Outside, OwnEnd
from swarmcli.reach.punch_rules import Pair, behind_one_router, nearby, pairs_of
from swarmcli.reach.verdict import Surroundings, host_of

logger = logging.getLogger(__name__)

ASK = "reach.punch"  # calls: open ports for a connection with me …
GO = "reach.punch.go"  # … and dial me now

MAX_SEEN = 2  # one address for each family
MAX_NAMED = 4

AddressText = Annotated[str, msgspec.Meta(max_length=128)]
Number = Annotated[int, msgspec.Meta(ge=0, le=2**62)]


# How long the two ends wait for each other, and how many attempts there are at a time. Times in seconds.
_ASKING = 12.0  # for the other end to open its ports
_MEETING = 6.0  # from "go" to the end of the handshake
# For a SYN to cross the other end's. Systems send it again after 1 s (RFC 6298), so a shorter try sends a wrong address
# one packet. Two peers that are farther apart than this stay with their relay.
_CROSSING = 0.9
# For a dial inside this network, which takes milliseconds. One that fails takes all of it: the time of the answer must
# not tell a stranger whether a host is there, or a port open.
_NEARBY = 2.0
_SLACK = 2.0  # for a question and its answer on their way
_KEPT_FOR = 20.0  # that an asked end keeps its ports open
_KEPT = 64  # attempts of others at the same time …
_KEPT_PER_PEER = 16
_OWN_CONTROL = 4  # own attempts at control connections at the same time
_OWN_BULK = 12  # the same of bulk connections; fewer than _KEPT_PER_PEER
_BULK_PAUSE = 30.0  # for which relays carry a pair's bulk connections after one could not be made directly
_LOOK_ANYWAY = 30.0  # between two looks: when a direct connection is lost beside a relayed one, no event tells
_TOO_NEW = 0.25  # until a new connection's round trip is known


class PunchAsk(msgspec.Struct, frozen=True):
    """Let us make a direct connection for this purpose. `number` is the asker's, of this attempt."""

    number: Number
    purpose: Purpose


class Ready(msgspec.Struct, frozen=True):
    """The asked end has opened ports, one for each family. From outside they are `seen` there. The ports in `dependent`
    cannot be dialed, since each peer sees another one. In its own network the asked end listens at `near`."""

    seen: Annotated[tuple[AddressText, ...], msgspec.Meta(max_length=MAX_SEEN)]
    dependent: Annotated[tuple[AddressText, ...], msgspec.Meta(max_length=MAX_SEEN)] = ()
    near: Annotated[tuple[AddressText, ...], msgspec.Meta(max_length=MAX_NAMED)] = ()


class Go(msgspec.Struct, frozen=True):
    """Dial me there now, from the port that you have opened: half a round trip after this I do the same. With `near`
    instead: I am in your network and listen there; dial as usual."""

    number: Number
    seen: AddressText
    near: Annotated[tuple[AddressText, ...], msgspec.Meta(max_length=MAX_NAMED)] = ()


class Went(msgspec.Struct, frozen=True):
    """Whether the asked end has a connection now."""

    connected: bool


@dataclass
class _Kept:
    """An asked end keeps this until it is told to go."""

    end: OwnEnd
    purpose: Purpose
    expiry: asyncio.TimerHandle
    tries: int = 0


class Puncher:
    """Replaces relayed connections by direct ones wherever that is possible."""

    def __init__(self, endpoint: Endpoint, *, around: Callable[[], Surroundings]) -> None:
        """`around` says what this machine's interfaces are at the moment."""
        self.attempts = 0  # at control connections, so far
        self._endpoint = endpoint
        self._around = around
        self.outside = Outside(endpoint, around)
        # Each attempt doubles the pause, until the pair has needed none for ten minutes after it: a connection that is
        # lost soon is not made again and again.
        self._pauses = Backoff[PeerID](120.0, 3600.0, quiet=600.0)
        self._bulk_pauses = Backoff[PeerID](_BULK_PAUSE, _BULK_PAUSE)
        self._dials = {Purpose.CONTROL: Meter(**CONTROL_LIMITS), Purpose.BULK: Meter(**BULK_LIMITS)}
        self._asks = {Purpose.CONTROL: Meter(**ASK_LIMITS), Purpose.BULK: Meter(**BULK_LIMITS)}
        self._near_dials = Meter(**NEAR_LIMITS)
        self._bulk_turns = asyncio.Semaphore(_OWN_BULK)
        self._under_way: set[PeerID] = set()
        self._kept: dict[tuple[PeerID, int], _Kept] = {}
        self._next_number = 0
        self._event = asyncio.Event()
        self._tasks = TaskOwner()

    async def start(self) -> None:
        self._endpoint.serve(ASK, PunchAsk, self._asked)
        self._endpoint.serve(GO, Go, self._go)
        self._endpoint.punch_bulk = self.bulk
        self._tasks.hear(self._endpoint.events, self._on_event)
        self._tasks.keep(self._endpoint.events, self._keep)

    async def close(self) -> None:
        self._endpoint.punch_bulk = None
        self._endpoint.withdraw(ASK, GO)
        await self._tasks.close()
        for key in list(self._kept):
            self._drop(key)

    def forget(self) -> None:
        """This machine is in another network: nothing that was found out about routers holds any more."""
        self._pauses.clear()
        self.outside.forget()
        self._bulk_pauses.clear()
        self._event.set()

    # ---- when

    def _on_event(self, event: Event) -> None:
        if isinstance(event, PeerConnected) and not is_direct(event.address):
            self._event.set()

    async def _keep(self) -> None:
        self._event.clear()
        await set_within(self._event, self._begin_due())

    def _begin_due(self) -> float:
        """Begins the attempts that are due. Returns the seconds until the next one may be."""
        now, own = loop_time(), self._endpoint.peer_id
        soonest = now + _LOOK_ANYWAY
        for peer in sorted({*self._endpoint.connected()} - self._under_way):
            seen = self._endpoint.seen(peer)
            if seen is None or not seen.relayed:
                continue
            due = self._pauses.until(peer)
            if self._endpoint.round_trip(peer) is None:  # then it has not told either where it can be dialed
                due = max(due, now + _TOO_NEW)
            if due <= now and len(self._under_way) < _OWN_CONTROL and (own < peer or self._direct(peer)):
                self._under_way.add(peer)
                self._tasks.spawn(self._leave_relay(peer))
            else:
                soonest = min(soonest, max(due, now + _TOO_NEW))
        return soonest - now

    def _direct(self, peer: PeerID) -> tuple[str, ...]:
        return tuple(filter(is_direct, self._endpoint.addresses_of(peer)))

    async def _leave_relay(self, peer: PeerID) -> None:
        try:
            how = await self._connect(peer)
        except NetworkError as error:
            logger.info("the connection to %s stays with its relay: %s", peer.short, error)
        else:
            logger.info("the connection to %s has left its relay: %s", peer.short, how)
        finally:
            self._pauses.add(peer, loop_time())
            self._under_way.discard(peer)
            self._event.set()

    async def _connect(self, peer: PeerID) -> str:
        """Makes a direct control connection. Returns how, for the log. Raises NetworkError."""
        if direct := self._direct(peer):  # the peer can be dialed, and came by a relay because this one cannot
            try:
                await self._endpoint.dial_directly(peer, direct)
                return "dialed"
            except NetworkError:
                if self._endpoint.peer_id > peer:
                    raise
        self.attempts += 1
        connection = await self._punch(peer, Purpose.CONTROL)
        if connection is None:
            return "dialed in our network"
        self._endpoint.adopt(connection)
        return "both ends dialed at once"

    async def bulk(self, peer: PeerID) -> Connection:
        """One more connection to a peer whose control connection is punched.

        Raises NetworkError; then a relay has to carry it.
        """
        async with self._bulk_turns:
            if self._bulk_pauses.rests(peer, loop_time()):
                raise ConnectError(f"no direct connection to {peer.short} came about lately")
            try:
                connection = await self._punch(peer, Purpose.BULK)
            except NetworkError as error:
                if not (isinstance(error, CallRefused) and error.code == "busy"):
                    self._bulk_pauses.add(peer, loop_time())
                raise
        assert connection is not None
        return connection

    # ---- the end that asks

    async def _punch(self, peer: PeerID, purpose: Purpose) -> Connection | None:
        """A punched connection; None: an ordinary one has come about instead. Raises NetworkError."""
        number, self._next_number = self._next_number, self._next_number + 1
        with closing(OwnEnd()) as own:
            ready = await self._both_ready(own, peer, PunchAsk(number, purpose))
            if purpose is Purpose.CONTROL and await self._meet_nearby(peer, number, own, ready):
                return None
            pairs = self._allowed(peer, purpose, pairs_of(own.seen.values(), ready.seen))
            if not pairs:
                raise ConnectError("their routers show no ports at which the two ends could, or may, dial each other")
            for attempt in range(TRIES):
                family, mine, theirs = pairs[attempt % len(pairs)]
                connection = await self._try(peer, purpose, Go(number, mine), own.ports[family], theirs)
                if connection is not None:
                    return connection
        raise ConnectError(f"{TRIES} times the two ends did not meet")

    async def _both_ready(self, own: OwnEnd, peer: PeerID, ask: PunchAsk) -> Ready:
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self.outside.prepare(own))
                ready = group.create_task(self._endpoint.call(peer, ASK, ask, Ready, timeout=_ASKING))
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None
        return ready.result()

    async def _try(self, peer: PeerID, purpose: Purpose, go: Go, port: LocalPort, theirs: str) -> Connection | None:
        self._spend(peer, purpose, theirs)
        met: Connection | None = None
        try:
            async with asyncio.TaskGroup() as group:
                answer = group.create_task(self._say(peer, go))
                # "Go" takes half a round trip to the other end, which then dials at once.
                await asyncio.sleep((self._endpoint.round_trip(peer) or 0.0) / 2)
                met = await self._meet(port, theirs, peer, purpose, leads=True)
        except BaseException:  # a cancellation too: nobody else knows this connection
            if met is not None:
                met.abort("given up while it was made")
            raise
        if met is None and answer.result() is None:
            raise ConnectError(f"{peer.short} did not want another try")
        return met

    async def _say(self, peer: PeerID, go: Go) -> Went | None:
        """Tells the other end to go, and returns its answer. None: it refuses, or cannot be asked any more."""
        try:
            return await self._endpoint.call(peer, GO, go, Went, timeout=_MEETING + _SLACK)
        except NetworkError as error:
            logger.debug("%s did not go: %s", peer.short, error)
            return None

    async def _meet_nearby(self, peer: PeerID, number: int, own: OwnEnd, ready: Ready) -> bool:
        """If both ends are seen at one host, tries to connect them inside their network, dialed by either. Returns
        whether they are connected now."""
        pairs = pairs_of(own.anywhere, (*ready.seen, *ready.dependent))
        if not behind_one_router(pairs):
            return False
        _, mine, _ = pairs[0]
        if await self._dial_nearby(peer, ready.near):
            return True
        ours = self._near()
        went = await self._say(peer, Go(number, mine, ours)) if ours else None
        return went is not None and went.connected

    # ---- the end that is asked

    async def _asked(self, peer: PeerID, ask: PunchAsk) -> Ready:
        seen = self._endpoint.seen(peer)
        direct = seen is not None and seen.punched
        if ask.purpose is Purpose.PROBE or (ask.purpose is Purpose.BULK and not direct):
            raise CallRefused("purpose", "there is no direct connection that this one could stand beside")
        of_peer = sum(owner == peer for owner, _ in self._kept)
        key = peer, ask.number
        if key in self._kept or len(self._kept) >= _KEPT or of_peer >= _KEPT_PER_PEER:
            raise CallRefused("busy", "too many ports are open for others")
        if not self._asks[ask.purpose].take(loop_time(), peer=peer, network=""):
            raise CallRefused("budget", "ports were opened often enough for now")
        expiry = asyncio.get_running_loop().call_later(_KEPT_FOR, self._drop, key)
        kept = self._kept[key] = _Kept(OwnEnd(), ask.purpose, expiry)
        try:
            await self.outside.prepare(kept.end)
        except ConnectError as error:
            self._drop(key)
            raise CallRefused("unseen", str(error)) from error
        except BaseException:
            self._drop(key)
            raise
        return Ready(tuple(kept.end.seen.values()), tuple(kept.end.dependent.values()), self._near())

    async def _go(self, peer: PeerID, go: Go) -> Went:
        key = peer, go.number
        kept = self._kept.get(key)
        if kept is None or kept.tries > TRIES:
            raise CallRefused("unknown", "no port is open for this")
        kept.tries += 1  # TRIES by punching, and one dial inside the network
        own = kept.end.anywhere if go.near else kept.end.seen.values()
        pairs = self._allowed(peer, kept.purpose, pairs_of(own, (go.seen,)))
        if not pairs:
            raise CallRefused("address", "this end does not dial there")
        if go.near:
            return Went(behind_one_router(pairs) and await self._dial_nearby(peer, go.near))
        family, _, theirs = pairs[0]
        try:
            self._spend(peer, kept.purpose, theirs)
        except ConnectError as error:
            raise CallRefused("budget", str(error)) from error
        connection = await self._meet(kept.end.ports[family], theirs, peer, kept.purpose, leads=False)
        if connection is None:
            return Went(False)
        self._drop(key)
        self._endpoint.adopt(connection)
        return Went(True)

    def _drop(self, key: tuple[PeerID, int]) -> None:
        kept = self._kept.pop(key, None)
        if kept is not None:
            kept.expiry.cancel()
            kept.end.close()

    # ---- both

    def _allowed(self, peer: PeerID, purpose: Purpose, pairs: list[Pair]) -> list[Pair]:
        """The pairs that may be dialed: bulk connections lead only to the host where the control connection has proved
        that the peer is."""
        if purpose is Purpose.CONTROL:
            return pairs
        seen = self._endpoint.seen(peer)
        host = host_of(seen.remote_address) if seen is not None and seen.punched else ""
        return [pair for pair in pairs if host_of(pair[2]) == host]

    def _spend(self, peer: PeerID, purpose: Purpose, address: str) -> None:
        """Charges one dial to the peer that asked for it. Raises ConnectError if its budget, or that of the dialed
        host, is used up."""
        if not self._dials[purpose].take(loop_time(), peer=peer, network=host_of(address)):
            raise ConnectError(f"{address} was dialed often enough for now")

    async def _meet(
        self, port: LocalPort, address: str, peer: PeerID, purpose: Purpose, *, leads: bool
    ) -> Connection | None:
        try:
            crossing, timeout = _CROSSING, _MEETING
            return await port.meet(address, peer, purpose, leads=leads, crossing=crossing, timeout=timeout)
        except ConnectError as error:
            logger.debug("%s was not met: %s", peer.short, error)
            return None

    async def _dial_nearby(self, peer: PeerID, addresses: Sequence[str]) -> bool:
        """Whether the peer answers at one of these addresses inside this network. Only the peer says that it is there,
        so these dials are few, and every failure takes equally long, even if nothing was dialed."""
        if not addresses:
            return False
        end = loop_time() + _NEARBY
        found = nearby(addresses, self._around().is_near)
        if found and self._near_dials.take(loop_time(), peer=peer):
            try:
                async with asyncio.timeout_at(end):
                    await self._endpoint.dial_directly(peer, found)
                return True
            except (NetworkError, TimeoutError) as error:
                logger.debug("%s was not found in this network: %r", peer.short, error)
        await asyncio.sleep(end - loop_time())
        return False

    def _near(self) -> tuple[str, ...]:
        """Where this peer listens in its own network."""
        return self._endpoint.listener_addresses[:MAX_NAMED]
