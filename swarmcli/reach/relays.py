"""The client's side of relays: finds some, reserves at the nearest, renews, and takes others when they go.

From `start` to `close` it holds two reservations and announces `relay://…` addresses, the nearest relay's first.
`Reach` closes it while it is proven that others can dial this peer.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from dataclasses import dataclass

from swarmcli.backoff import Backoff
from swarmcli.errors import CallRefused, NetworkError, SwarmError, UnknownMethod
from swarmcli.events import Event, PeerConnected, PeerDisconnected
from swarmcli.network.addresses import Address
from swarmcli.network.endpoint import Endpoint
from swarmcli.network.identity import PeerID
from swarmcli.network.loop_thread import loop_time, set_within
from swarmcli.network.prefix import Prefix, in_turns, prefix_of_address
from swarmcli.network.task_owner import TaskOwner
from swarmcli.reach.circuits import RelayTransport
from swarmcli.reach.relay_messages import OFFER, RESERVE, AskForOffer, Find, RelayOffer, Reserve, Reserved
from swarmcli.recent import Recent

logger = logging.getLogger(__name__)


# How a client looks for relays and holds them. Times in seconds.
_WANTED = 2  # reservations: while one relay is lost and replaced, the other one is there
_MEASURED = 8  # candidates that are asked in one search, besides the contacts that are connected anyway
_ASKING = 3.0  # for a candidate's answer
_GIVING_BACK = 1.0  # at the end
_SHORTEST = 30.0  # a reservation that ends sooner is not worth its renewals
_RENEWALS = 3  # that are tried while a reservation lasts
_FIRST_PAUSE = 2.0  # between searches while relays are missing: at first …
_LONGEST_PAUSE = 60.0  # … and at most
_AVOIDED = 60.0  # for which a peer that refused, or is no relay, is not asked again; longer each time …
_LONGEST_AVOIDED = 600.0  # … up to this
_SETTLED = 1.0  # after the last of several connections that came about, before contacts are looked at again
_AFTER_A_SEARCH = 10.0  # at least, before new contacts make a peer that holds one relay search again


@dataclass(frozen=True, slots=True)
class HeldRelay:
    """A relay at which this peer has a reservation."""

    peer: PeerID
    round_trip: float  # seconds, when it was chosen
    renew_at: float  # the loop's time
    until: float


@dataclass(frozen=True, slots=True)
class _RelayCandidate:
    peer: PeerID
    round_trip: float
    network: Prefix


class Relays:
    """Holds reservations for an endpoint, from `start` to `close`; it may be started again."""

    def __init__(self, endpoint: Endpoint, transport: RelayTransport, *, find: Find) -> None:
        """`find()` reads the records of relays. Some of these peers are asked, and those that are connected."""
        self._endpoint, self._transport, self._find = endpoint, transport, find
        self._held: dict[PeerID, HeldRelay] = {}
        # Relays that were held are asked again: perhaps they were lost because this machine slept or moved.
        self._former: Recent[PeerID, None] = Recent(2 * _WANTED)
        # Peers that refused, did not answer, or know no such method are not asked again for a while.
        self._avoided = Backoff[PeerID](_AVOIDED, _LONGEST_AVOIDED)
        self._announced: tuple[str, ...] = ()
        self._news = asyncio.Event()
        self._tasks = TaskOwner()
        self._search_at = 0.0  # the loop's time of the next search, while relays are missing …
        self._searched_at = float("-inf")  # … and of the last one
        self._pause = _FIRST_PAUSE

    @property
    def held(self) -> tuple[HeldRelay, ...]:
        """The nearest first."""
        return tuple(sorted(self._held.values(), key=lambda relay: relay.round_trip))

    async def start(self) -> None:
        """Begins to search. Idempotent."""
        if not len(self._tasks):
            self._search_at = 0.0
            self._tasks.hear(self._endpoint.events, self._on_event)
            self._tasks.keep(self._endpoint.events, self._hold)

    async def close(self) -> None:
        """Stops announcing relays, and gives the reservations back, within a second. Idempotent."""
        await self._tasks.close()
        relays, self._held = list(self._held), {}
        self._transport.relays.clear()
        if relays:
            self._announce()
            await asyncio.wait([asyncio.create_task(self._give_back(relay)) for relay in relays])

    def look_again(self) -> None:
        """Something has changed: a relay is gone, or one could be there."""
        self._search_at = 0.0
        self._news.set()

    def _on_event(self, event: Event) -> None:
        if isinstance(event, PeerDisconnected) and PeerID.parse(event.peer) in self._held:
            logger.info("relay %s is gone: %s", event.peer[:8], event.reason)
            self.look_again()
        elif isinstance(event, PeerConnected) and len(self._held) < _WANTED:
            self._avoided.forget(PeerID.parse(event.peer))  # it may have been avoided because it did not answer
            # Each search makes connections itself, which must not cause the next one.
            soonest = self._searched_at + (_AFTER_A_SEARCH if self._held else _SETTLED)
            settled = loop_time() + _SETTLED
            self._search_at = min(self._search_at, max(soonest, settled))
            self._news.set()

    # Inside

    async def _hold(self) -> None:
        """Renews what is held, and searches for what is missing. Returns when there is something to do again."""
        self._news.clear()
        for relay in self.held:
            if not self._connected(relay.peer) or (loop_time() >= relay.renew_at and not await self._renew(relay)):
                self._held.pop(relay.peer, None)
                self._transport.relays.discard(relay.peer)
                self._former[relay.peer] = None
        self._announce()  # before the search: nobody should dial over a relay that is gone
        if len(self._held) < _WANTED and loop_time() >= self._search_at:
            await self._search()
            self._searched_at = loop_time()
            found = len(self._held) >= _WANTED
            self._pause = _FIRST_PAUSE if found else min(2 * self._pause, _LONGEST_PAUSE)
            self._search_at = loop_time() + self._pause
        self._announce()
        due = [relay.renew_at for relay in self._held.values()]
        if len(self._held) < _WANTED:
            due.append(self._search_at)
        await set_within(self._news, max(0.0, min(due) - loop_time()))

    async def _give_back(self, relay: PeerID) -> None:
        if self._connected(relay):
            with suppress(NetworkError):
                await self._endpoint.call(relay, RESERVE, Reserve(wanted=False), Reserved, timeout=_GIVING_BACK)

    def _connected(self, peer: PeerID) -> bool:
        seen = self._endpoint.seen(peer)
        return seen is not None and not seen.relayed

    async def _renew(self, relay: HeldRelay) -> bool:
        """Renews a reservation. Returns whether it still holds: if the relay cannot be reached, another try follows
        before it ends."""
        now = loop_time()
        try:
            await self._reserve(relay.peer, relay.round_trip)
        except (CallRefused, UnknownMethod):
            self._avoided.add(relay.peer, now)
            return False
        except NetworkError:
            pause = (relay.until - relay.renew_at) / _RENEWALS
            self._held[relay.peer] = HeldRelay(relay.peer, relay.round_trip, now + pause, relay.until)
            return now + pause < relay.until
        return True

    async def _reserve(self, peer: PeerID, round_trip: float) -> None:
        """Raises NetworkError."""
        self._transport.relays.add(peer)  # before the call: once it has granted, the relay may bring somebody at once
        try:
            answer = await self._endpoint.call(peer, RESERVE, Reserve(), Reserved, timeout=_ASKING)
            if answer.seconds < _SHORTEST:
                raise CallRefused("brief", f"a reservation of {answer.seconds:g} s is none")
        except BaseException:
            if peer not in self._held:
                self._transport.relays.discard(peer)
            raise
        now = loop_time()
        round_trip = self._endpoint.ping_time(peer) or round_trip
        self._held[peer] = HeldRelay(peer, round_trip, now + answer.seconds / _RENEWALS, now + answer.seconds)

    async def _search(self) -> None:
        """Asks candidates, and reserves at the nearest ones that have room."""
        candidates = await self._candidates()
        while candidates and len(self._held) < _WANTED:
            best = self._best(candidates)
            candidates.remove(best)
            try:
                await self._reserve(best.peer, best.round_trip)
                logger.info("relay %s, %.0f ms away", best.peer.short, 1000 * best.round_trip)
            except NetworkError as error:
                logger.debug("relay %s gives no reservation: %s", best.peer.short, error)
                self._avoided.add(best.peer, loop_time())

    def _best(self, candidates: list[_RelayCandidate]) -> _RelayCandidate:
        """The nearest if no relay is held; otherwise one by lot, if possible in a network of which none is held.

        Another network does not fail with the first. By lot, because whoever puts relays near a client has the nearest
        ones: it should hardly ever be both relays of a client.
        """
        taken = {prefix_of_address(seen.remote_address) for peer in self._held if (seen := self._endpoint.seen(peer))}
        elsewhere = [candidate for candidate in candidates if candidate.network not in taken]
        if not self._held:
            return min(candidates, key=lambda each: each.round_trip)
        return in_turns(elsewhere or candidates, lambda each: each.network, self._endpoint.random)[0]

    async def _candidates(self) -> list[_RelayCandidate]:
        """Asks the connected contacts, and some of the relays that advertise themselves; returns those that would
        relay."""
        now, own = loop_time(), self._endpoint.peer_id

        def may_be_asked(peer: PeerID) -> bool:
            return peer != own and peer not in self._held and not self._avoided.rests(peer, now)

        near = [peer for peer in self._endpoint.connected() if may_be_asked(peer) and self._connected(peer)]
        prefix = self._endpoint.prefix
        near = in_turns(near, lambda peer: prefix(peer) or Prefix("name", peer.text), self._endpoint.random)
        near = near[: 2 * _MEASURED]
        near += [peer for peer in self._former if may_be_asked(peer) and peer not in near]
        asked = [asyncio.create_task(self._ask(peer)) for peer in near]
        try:
            with suppress(TimeoutError, SwarmError):
                async with asyncio.timeout(_ASKING):
                    records = await self._find()
                    far = {peer: prefix_of_address(records[peer].addresses[0]) for peer in records}
                    new = [peer for peer in far if may_be_asked(peer) and peer not in near]
                    for peer in in_turns(new, far.__getitem__, self._endpoint.random)[:_MEASURED]:
                        self._endpoint.learn(peer, records[peer].addresses)
                        asked.append(asyncio.create_task(self._ask(peer)))
            return [each for each in await asyncio.gather(*asked) if each is not None]
        except asyncio.CancelledError:
            for task in asked:
                task.cancel()
            await asyncio.gather(*asked, return_exceptions=True)
            raise

    async def _ask(self, peer: PeerID) -> _RelayCandidate | None:
        try:
            offer = await self._endpoint.call(peer, OFFER, AskForOffer(), RelayOffer, timeout=_ASKING)
            if self._endpoint.ping_time(peer) is None:  # a new connection: its first pong comes before a second answer
                offer = await self._endpoint.call(peer, OFFER, AskForOffer(), RelayOffer, timeout=_ASKING)
        except NetworkError:
            self._avoided.add(peer, loop_time())
            return None
        seen, round_trip = self._endpoint.seen(peer), self._endpoint.ping_time(peer)
        if not offer.room or seen is None or seen.relayed or round_trip is None:
            self._avoided.add(peer, loop_time())
            return None
        return _RelayCandidate(peer, round_trip, prefix_of_address(seen.remote_address))

    def _announce(self) -> None:
        own = self._endpoint.peer_id
        addresses = tuple(str(Address("relay", "", 0, own, relay.peer)) for relay in self.held)
        if addresses != self._announced:
            self._announced = addresses
            self._endpoint.announce(relayed=addresses)
