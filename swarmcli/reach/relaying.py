"""The relay: lends its reachability to peers that nobody can dial.

A client reserves, which it can only do over a connection that it dialed itself. Whoever wants to talk to it opens a
stream to the relay; the relay opens one to the client and passes on what comes, both ways, with back-pressure. What
passes is the TLS of the two ends (`circuits.py`): the relay sees sizes and times, and can delay or cut, nothing else.

    dialer ── relay.connect ──▶ relay ── relay.incoming ──▶ client

Everybody may ask, so everything has a budget.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import Counter
from collections.abc import Callable, Hashable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import NoReturn

from swarmcli.errors import CallRefused, CallTimeout, EndOfStream, NetworkError, PeerUnreachable, SwarmError
from swarmcli.network.budgets import allow_descriptors
from swarmcli.network.endpoint import Endpoint
from swarmcli.network.identity import PeerID
from swarmcli.network.loop_thread import loop_time
from swarmcli.network.prefix import Prefix, prefix_of_address
from swarmcli.network.streams.stream import Stream
from swarmcli.network.task_owner import TaskOwner
from swarmcli.network.token_bucket import Meter, TokenBucket
from swarmcli.reach import relay_messages as messages
from swarmcli.reach.relay_messages import Publish, RelayRecord

logger = logging.getLogger(__name__)

_DATA = messages.CircuitData()


@dataclass(frozen=True, slots=True)
class RelayBudgets:
    """A relay gives so much at most. Sizes in bytes, times in seconds. A network is a /24, or a /48 of IPv6."""

    reservations: int = 1024  # clients that can be reached through this relay …
    reservations_per_network: int = 32  # … of which so many may be in one network
    reservation_seconds: float = 300.0  # unless the client renews it
    circuits: int = 1024  # pairs of streams, also those that are just being opened; each takes two descriptors
    # That a peer dials, and as many that lead to it. Below `Limits.max_streams_per_peer`, for a relay has streams of
    # its own to its clients, and these should not wait for circuits.
    circuits_per_peer: int = 56
    circuits_per_network: int = 192  # at either end
    circuits_per_network_and_target: int = 24  # so that dialers of one network do not use up a client's
    connects_per_second: float = 8.0  # attempts by one network, and to one client, in the long run …
    connects_at_once: float = 96.0  # … and in a burst: sixteen peers that find each other, each with some streams
    # By one network to one client, so that no network uses up what a client's others need.
    connects_per_second_to_target: float = 1.0
    connects_at_once_to_target: float = 24.0
    # Bytes per second that are passed on in all, and not more than half of what its user lends of the link; None: any.
    rate: float | None = 32e6
    rate_per_peer: float | None = 16e6  # from or to one network, or one peer of a network that many honest ones share
    least: int = 1024  # bytes that any message counts for: what it costs the processor, when it is small or empty
    burst_seconds: float = 1.0  # of these rates, that pass at once after a pause
    opening: float = 8.0  # until the client has taken up its stream
    idle: float = 180.0  # without a byte, after which a circuit ends; the ends ping each other more often
    other_descriptors: int = 256  # that this process may need besides those of its relay
    half_open: float = 10.0  # that a circuit is given after one end has said its last word

    def burst(self, rate: float) -> float:
        """Bytes that pass at once at this rate."""
        return max(rate * self.burst_seconds, messages.PIECE)

    @classmethod
    def with_rate(cls, rate: float) -> RelayBudgets:
        """So many bytes per second in all, half of them for one peer. Raises ValueError."""
        if not rate > 0:
            raise ValueError(f"a relay passes on more than 0 bytes per second, got {rate}")
        return cls(rate=rate, rate_per_peer=rate / 2)


@dataclass(frozen=True, slots=True)
class AdvertisingTimes:
    """In seconds."""

    life: float = 900.0  # that a record lasts …
    again: float = 240.0  # … and between two of them
    not_yet: float = 5.0  # until a peer that could not be dialed, or reached nobody, looks again


@dataclass(frozen=True, slots=True)
class RelayStatistics:
    """A relay's work at one moment, and since its start."""

    reservations: int
    circuits: int
    bytes_passed: int  # since the start
    refusals: dict[str, int]  # code → count


class _Circuit:
    """One pair of streams. Ends when nothing passes for a while."""

    def __init__(self, ends: tuple[PeerID, PeerID], deadline: asyncio.Timeout, budgets: RelayBudgets) -> None:
        self.ends, self._deadline, self._budgets = ends, deadline, budgets
        self._moved_at = -math.inf
        self._halved = False
        self.moved()

    def moved(self) -> None:
        """Bytes have come. To the second is exact enough: setting a timer for each piece would cost more than that."""
        now = loop_time()
        if not self._halved and now - self._moved_at >= 1.0:
            self._moved_at = now
            self._deadline.reschedule(now + self._budgets.idle)

    def halved(self) -> None:
        """One end has said its last word."""
        if not self._halved:
            self._halved = True
            self._deadline.reschedule(loop_time() + self._budgets.half_open)


class Relay:
    """Serves reservations and circuits on an endpoint, from `start` to `close`."""

    def __init__(
        self, endpoint: Endpoint, budgets: RelayBudgets = RelayBudgets(), *, publish: Publish | None = None
    ) -> None:
        """`find` and `publish` read and write the records of relays in the hash table; None: it is found by those
        alone that are connected to it."""
        self._endpoint, self._budgets, self._publish = endpoint, budgets, publish
        self._tasks = TaskOwner()
        # client → when its reservation ends, in the loop's time, and the network that it reserved from
        self._clients: dict[PeerID, tuple[float, Prefix]] = {}
        self._used: Counter[Hashable] = Counter()  # of circuits, by whatever bounds them
        self._circuits = 0
        self._passed = 0
        self._refusals: Counter[str] = Counter()
        one = budgets.rate_per_peer
        self._pace = Meter(payer=None if one is None else (one, budgets.burst(one)))
        self._whole = math.inf  # bytes per second of all circuits, as they were when …
        self._whole_pace: TokenBucket | None = None  # … this was made for them; None: any
        client = budgets.connects_per_second, budgets.connects_at_once
        pair = budgets.connects_per_second_to_target, budgets.connects_at_once_to_target
        self._attempts = Meter(network=client, target=client, pair=pair)

    @property
    def load(self) -> float:
        """The share of its budgets that is in use, from 0 to 1."""
        return max(len(self._clients) / self._budgets.reservations, self._circuits / self._budgets.circuits)

    async def start(self) -> None:
        """Begins to serve, and to advertise it. Takes as many descriptors as the budgets need, or does with fewer.

        It answers also while this peer cannot be dialed, and refuses.
        """
        self._budgets = _affordable(self._budgets)
        self._endpoint.serve(messages.OFFER, messages.AskForOffer, self._offer)
        self._endpoint.serve(messages.RESERVE, messages.Reserve, self._reserve)
        self._endpoint.serve_stream(messages.CONNECT, messages.Connect, self._connect)
        if self._publish is not None:
            self._tasks.keep(self._endpoint.events, partial(advertise, self._record, self._publish))

    async def close(self) -> None:
        """Takes nothing new; circuits that stand go on until the endpoint closes. Idempotent."""
        self._endpoint.withdraw(messages.OFFER, messages.RESERVE, messages.CONNECT)
        await self._tasks.close()
        self._clients.clear()

    def _record(self) -> RelayRecord | None:
        self._expire()
        addresses = self._endpoint.direct_addresses
        return RelayRecord(addresses, round(min(1.0, self.load), 2)) if addresses else None

    def statistics(self) -> RelayStatistics:
        self._expire()
        return RelayStatistics(len(self._clients), self._circuits, self._passed, dict(self._refusals))

    # Reservations

    async def _offer(self, peer: PeerID, request: messages.AskForOffer) -> messages.RelayOffer:
        return messages.RelayOffer(isinstance(self._reservable(peer), Prefix), min(1.0, self.load))

    async def _reserve(self, peer: PeerID, request: messages.Reserve) -> messages.Reserved:
        if not request.wanted:
            self._clients.pop(peer, None)
            return messages.Reserved(0.0)
        network = self._reservable(peer)
        if isinstance(network, CallRefused):
            self._refuse(network.code, str(network))
        self._clients[peer] = loop_time() + self._budgets.reservation_seconds, network
        return messages.Reserved(self._budgets.reservation_seconds)

    def _reservable(self, peer: PeerID) -> Prefix | CallRefused:
        """The network that this peer may reserve from; or why not."""
        seen = self._endpoint.seen(peer)
        if self._endpoint.client_mode:
            return CallRefused("client", "this peer cannot be dialed itself")
        if seen is None or seen.relayed:
            return CallRefused("relayed", "a reservation needs a connection without a relay")
        network = prefix_of_address(seen.remote_address)
        if peer not in self._clients and not self._has_room(network):
            self._expire()
            if not self._has_room(network):
                return CallRefused("full", "no reservation is left, or none for your network")
        return network

    def _has_room(self, network: Prefix) -> bool:
        here = sum(other == network for _, other in self._clients.values())
        return len(self._clients) < self._budgets.reservations and here < self._budgets.reservations_per_network

    def _reachable(self, client: PeerID) -> bool:
        """Whether it has a reservation, and the connection over which it made it."""
        until, _ = self._clients.get(client, (0.0, None))
        seen = self._endpoint.seen(client)
        return until > loop_time() and seen is not None and not seen.relayed

    def _expire(self) -> None:
        self._clients = {client: told for client, told in self._clients.items() if self._reachable(client)}

    # Circuits

    async def _connect(self, source: PeerID, request: messages.Connect, near: Stream) -> None:
        near.narrow(messages.PIECE, messages.WINDOW)
        target = request.target
        keys = self._admitted(source, target, near)
        self._used.update(keys)
        self._circuits += 1
        try:
            async with asyncio.timeout(self._budgets.idle) as deadline:
                await self._join(_Circuit((source, target), deadline, self._budgets), near)
        except TimeoutError:
            self._refuse("idle", "nothing passed for too long")
        finally:
            self._circuits -= 1
            self._used -= Counter(keys)

    def _admitted(self, source: PeerID, target: PeerID, near: Stream) -> tuple[Hashable, ...]:
        """Returns the keys under which the circuit is counted. Raises CallRefused."""
        budgets, seen, there = self._budgets, self._endpoint.seen(source), self._endpoint.seen(target)
        if target in (self._endpoint.peer_id, source):
            self._refuse("loop", "the two ends of a circuit and its relay are three peers")
        if near.relayed or seen is None or seen.relayed:
            self._refuse("relayed", "a circuit does not lead through another one")
        network = prefix_of_address(seen.remote_address)
        now = loop_time()
        if not self._attempts.take(now, network=network):
            self._refuse("busy", "too many attempts from your network")
        if there is None or not self._reachable(target):
            self._refuse("unreserved", f"{target.short} has no reservation here")
        shared = (network, target)
        if not self._attempts.take(now, pair=shared):
            self._refuse("busy", "too many attempts from your network to reach this peer")
        # After the others: what they refuse is not taken from the client's.
        if not self._attempts.take(now, target=target):
            self._refuse("busy", "too many attempts to reach this peer")
        bounds: dict[Hashable, int] = {
            ("from", source): budgets.circuits_per_peer,
            ("to", target): budgets.circuits_per_peer,
            shared: budgets.circuits_per_network_and_target,
        }
        bounds.update(dict.fromkeys((network, prefix_of_address(there.remote_address)), budgets.circuits_per_network))
        if self._circuits >= budgets.circuits or any(self._used[key] >= bound for key, bound in bounds.items()):
            self._refuse("full", "no circuit is left for these two")
        return tuple(bounds)

    async def _join(self, circuit: _Circuit, near: Stream) -> None:
        """Opens the stream to the client, and passes everything on until both ends are done. Raises CallRefused."""
        source, target = circuit.ends
        try:
            async with self._endpoint.stream(
                target, messages.INCOMING, messages.Incoming(source), timeout=self._budgets.opening
            ) as far:
                far.narrow(messages.PIECE, messages.WINDOW)
                await self._splice(circuit, near, far)
        except (CallTimeout, PeerUnreachable) as error:
            self._refuse("unreachable", f"{target.short} did not come: {error}")
        except NetworkError as error:
            # Whose fault it was does not matter: `near` is told if it is still there, and `far` has been reset.
            self._refuse("broken", f"the circuit broke: {error}")

    async def _splice(self, circuit: _Circuit, near: Stream, far: Stream) -> None:
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._pass_on(circuit, near, far))
                group.create_task(self._pass_on(circuit, far, near))
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None  # the first cancelled the other way, or both say the same

    async def _pass_on(self, circuit: _Circuit, source: Stream, target: Stream) -> None:
        # One piece at a time: what a slow reader does not take stays where it came from, but for the windows.
        try:
            while True:
                _, payload = await source.receive(messages.CircuitData)
                circuit.moved()
                amount = max(payload.nbytes, self._budgets.least)
                for payer in self._payers(circuit.ends):
                    await self._pace.wait(amount, payer=payer)
                # After these: a circuit that waits for its own pace takes nothing from all.
                if (whole := self._pace_of_all()) is not None:
                    await whole.wait(amount)
                await target.send(_DATA, payload)
                self._passed += payload.nbytes
        except EndOfStream:  # `source` has said its last word, or `target` reads nothing more
            circuit.halved()
            await target.finish()

    def _payers(self, ends: tuple[PeerID, PeerID]) -> set[Hashable]:
        """Whose pace bounds a circuit now. Keys cost nothing, so those of one network have the rate of one peer."""
        networks = {peer: self._endpoint.prefix(peer) for peer in ends}
        return {peer if network is None or network.shared else network for peer, network in networks.items()}

    def _pace_of_all(self) -> TokenBucket | None:
        """It follows what the user lends of the link."""
        lent = self._endpoint.rates.lower
        rate = min(self._budgets.rate or math.inf, math.inf if lent is None else lent / 2)
        if rate != self._whole:
            self._whole = rate
            self._whole_pace = None if rate == math.inf else TokenBucket(rate, self._budgets.burst(rate))
        return self._whole_pace

    def _refuse(self, code: str, words: str) -> NoReturn:
        self._refusals[code] += 1
        raise CallRefused(code, words)


async def advertise(
    describe: Callable[[], RelayRecord | None], publish: Publish, times: AdvertisingTimes = AdvertisingTimes()
) -> None:
    """Keeps this relay's record in the hash table while `describe` gives one. Never returns.

    However many others are there: who reads draws some by lot, and the hash table keeps to bounds of its own.
    """
    pause = times.not_yet
    while True:
        record, stored = describe(), False
        if record is not None:
            with suppress(SwarmError):
                stored = await publish(record, times.life)
        # A network that keeps no more records is not asked every few seconds.
        pause = times.again if stored else times.not_yet if record is None else min(pause, times.again)
        await asyncio.sleep(pause)
        pause = times.not_yet if stored or record is None else 2 * pause


def _affordable(budgets: RelayBudgets) -> RelayBudgets:
    """Lowers budgets to what the descriptors allow that the system gives this process."""
    wanted = budgets.reservations + 2 * budgets.circuits + budgets.other_descriptors
    allowed = allow_descriptors(wanted)
    share = (allowed - budgets.other_descriptors) / (wanted - budgets.other_descriptors)
    if share >= 1:
        return budgets
    logger.info("this relay takes less: the system allows %d open files, of %d", allowed, wanted)
    return replace(
        budgets, reservations=max(1, int(share * budgets.reservations)), circuits=max(1, int(share * budgets.circuits))
    )
