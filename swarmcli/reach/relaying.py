"""The relay: lends its reachability to peers that nobody can dial.

A client reserves over a connection that no relay carries. Whoever wants to talk to it asks the relay, which asks the
client; both get a token, dial the relay anew and say it (`circuits.py`). The relay joins the two sockets and passes on
what comes, with back-pressure. What passes is the TLS of the two ends: the relay sees sizes and times, and can delay or
cut, nothing else.

Everybody may ask, so everything has a budget.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
from collections import Counter
from collections.abc import Callable, Hashable, Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import NoReturn, cast

from swarmcli.errors import CallRefused, NetworkError, SwarmError
from swarmcli.network.budgets import allow_descriptors
from swarmcli.network.endpoint import Endpoint, Stream
from swarmcli.network.identity import PeerID
from swarmcli.network.loop_thread import loop_time
from swarmcli.network.prefix import Prefix, prefix_of_address
from swarmcli.network.task_owner import TaskOwner
from swarmcli.network.token_bucket import Meter, TokenBucket
from swarmcli.network.transports.tcp.handshake import TOKEN_BYTES, GreetingKind, Message, Refused
from swarmcli.reach import relay_messages as messages
from swarmcli.reach.relay_messages import Publish, RelayRecord
from swarmcli.version import build

logger = logging.getLogger(__name__)

_PIECE = 128 << 10  # bytes that are passed on at a time, at most: other work on this loop waits for as long
_WINDOW = 256 << 10  # bytes of a circuit that wait here in one direction, besides one piece
_JOINED = Message(GreetingKind.JOINED, b"").encode()


@dataclass(frozen=True, slots=True)
class RelayBudgets:
    """A relay gives so much at most. Sizes in bytes, times in seconds. A network is a /24, or a /48 of IPv6."""

    reservations: int = 1024  # clients that can be reached through this relay …
    reservations_per_network: int = 32  # … of which so many may be in one network
    reservation_seconds: float = 300.0  # unless the client renews it
    circuits: int = 1024  # pairs of sockets, also those that are just being opened
    circuits_per_peer: int = 56  # that a peer dials, and as many that lead to it
    circuits_per_network: int = 192  # at either end
    circuits_per_network_and_target: int = 24  # so that dialers of one network do not use up a client's
    connects_per_second: float = 8.0  # attempts by one network, and to one client, in the long run …
    connects_at_once: float = 96.0  # … and in a burst: sixteen peers that find each other, each with some streams
    # By one network to one client, so that no network uses up what a client's others need.
    connects_per_second_to_target: float = 1.0
    connects_at_once_to_target: float = 24.0
    # Bytes per second that are passed on in all, but at most half of what the user's limits allow; None: no bound.
    rate: float | None = 32e6
    rate_per_peer: float | None = 16e6  # from or to one network, or one peer of a network that many honest ones share
    least: int = 1024  # bytes that any piece counts as at least, since a small one costs processor time too
    burst_seconds: float = 1.0  # of these rates, that pass at once after a pause
    opening: float = 8.0  # until both ends have dialed
    idle: float = 180.0  # without a byte, after which a circuit ends; the ends ping each other more often
    other_descriptors: int = 256  # that this process may need besides those of its relay
    half_open: float = 10.0  # for which a circuit goes on after one end has sent its last byte

    def burst(self, rate: float) -> float:
        """Bytes that pass at once at this rate."""
        return max(rate * self.burst_seconds, _PIECE)

    @classmethod
    def with_rate(cls, rate: float) -> RelayBudgets:
        """So many bytes per second in all, half of them for one peer. Raises ValueError."""
        if not rate > 0:
            raise ValueError(f"a relay passes on more than 0 bytes per second, got {rate}")
        return cls(rate=rate, rate_per_peer=rate / 2)


# In seconds.
_LIFE = 900.0  # that a record lasts …
_AGAIN = 240.0  # … and between two of them
_NOT_YET = 5.0  # until a peer that could not be dialed, or reached nobody, looks again


@dataclass(frozen=True, slots=True)
class RelayStatistics:
    """A relay's work at one moment, and since its start."""

    reservations: int
    circuits: int
    bytes_passed: int  # since the start
    refusals: dict[str, int]  # code → count


class _End(asyncio.BufferedProtocol):
    """The socket of one end of a circuit. What comes from it goes to the other one at once."""

    other: _End

    def __init__(self, circuit: _Circuit) -> None:
        self.socket: asyncio.Transport | None = None  # before it has dialed, and after it is closed
        self.spoken = False  # it has sent its last byte
        self._circuit = circuit
        self._waits_for: set[Hashable] = {"the other end"}  # nothing is read until this is empty

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.socket = cast(asyncio.Transport, transport)
        self.socket.pause_reading()
        self.socket.set_write_buffer_limits(_WINDOW)
        self._circuit.come()

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._circuit.memory

    def buffer_updated(self, nbytes: int) -> None:
        assert self.other.socket is not None
        self.other.socket.write(bytes(self._circuit.memory[:nbytes]))
        self._circuit.passed(self, nbytes)

    def eof_received(self) -> bool:
        self.spoken = True
        if self.other.socket is not None:
            self.other.socket.write_eof()
        self._circuit.halved()
        return True

    def connection_lost(self, exc: Exception | None) -> None:
        self.socket = None
        self._circuit.lost()

    def pause_writing(self) -> None:
        self.other.wait_for("room")

    def resume_writing(self) -> None:
        self.other.go_on("room")

    def wait_for(self, what: Hashable) -> None:
        self._waits_for.add(what)
        if self.socket is not None:
            self.socket.pause_reading()

    def go_on(self, what: Hashable) -> None:
        self._waits_for.discard(what)
        if not self._waits_for and self.socket is not None and not self.socket.is_closing():
            self.socket.resume_reading()


class _Circuit:
    """Two sockets whose bytes are passed on. It ends if nothing passes for a while, and with either of the two."""

    def __init__(self, relay: Relay, ends: tuple[PeerID, PeerID], keys: tuple[Hashable, ...]) -> None:
        self.ends, self.keys, self.memory = ends, keys, relay.memory
        self.near, self.far = _End(self), _End(self)
        self.near.other, self.far.other = self.far, self.near
        self._payers = relay.payers(ends)  # fixed now: an end that hangs up stays in the network that it came from
        self._relay, self._budgets = relay, relay.budgets
        self._over = False
        self._moved_at = loop_time()
        self._deadline = asyncio.get_running_loop().call_later(self._budgets.opening, self.end, "unreachable")

    def come(self) -> None:
        """One of the two has dialed."""
        ends = self.near, self.far
        if not all(end.socket is not None for end in ends):
            return
        self.moved(self._budgets.idle)
        for end in ends:
            cast(asyncio.Transport, end.socket).write(_JOINED)
            end.go_on("the other end")

    def passed(self, source: _End, nbytes: int) -> None:
        """Counts, and lets the source wait for its pace."""
        now = loop_time()
        if now - self._moved_at >= 1.0 and not (self.near.spoken or self.far.spoken):
            self.moved(self._budgets.idle)  # to the second is exact enough: a timer for each piece would cost more
            if not self._relay.may_go_on(self.ends):
                return self.end("no member")
        seconds = self._relay.count(self._payers, nbytes)
        if seconds > 0:
            source.wait_for("its pace")
            asyncio.get_running_loop().call_later(seconds, source.go_on, "its pace")
        for way in self._relay.ways:
            way.charge(nbytes)
            if not way.is_open:
                source.wait_for(way)
                way.when_open((source, way), partial(source.go_on, way))

    def moved(self, seconds: float) -> None:
        self._moved_at = loop_time()
        self._deadline.cancel()
        self._deadline = asyncio.get_running_loop().call_later(seconds, self.end, "idle")

    def halved(self) -> None:
        """One end has sent its last byte. After both have, what has arrived still goes out, if it is read."""
        self.moved(self._budgets.half_open)
        if self.near.spoken and self.far.spoken:
            for end in (self.near, self.far):
                if end.socket is not None:
                    end.socket.close()

    def lost(self) -> None:
        """A socket is closed. The circuit counts, and has its deadline, as long as it holds anything."""
        if not (self.near.spoken and self.far.spoken) or self.near.socket is self.far.socket is None:
            self.end()

    def end(self, code: str = "") -> None:
        """Idempotent."""
        if self._over:
            return
        self._over = True
        self._deadline.cancel()
        for end in (self.near, self.far):
            if end.socket is not None:
                end.socket.abort()
            for way in self._relay.ways:
                way.forget((end, way))
        self._relay.ended(self, code)


class Relay:
    """Serves reservations and circuits on an endpoint, from `start` to `close`."""

    def __init__(
        self, endpoint: Endpoint, budgets: RelayBudgets = RelayBudgets(), *, publish: Publish | None = None
    ) -> None:
        """`publish` writes the relay's record into the hash table; None: only peers connected to it find it."""
        self.memory = memoryview(bytearray(_PIECE))  # filled and emptied within one callback
        self.ways = endpoint.rates.download, endpoint.rates.upload
        self.budgets = budgets
        self._endpoint, self._publish = endpoint, publish
        self._tasks = TaskOwner()
        # client → when its reservation ends, in the loop's time, and the network that it reserved from
        self._clients: dict[PeerID, tuple[float, Prefix]] = {}
        self._used: Counter[Hashable] = Counter()  # of circuits, by whatever bounds them
        self._circuits: set[_Circuit] = set()
        self._tokens: dict[bytes, _End] = {}  # given out, and not used yet
        self._passed = 0
        self._refusals: Counter[str] = Counter()
        one = budgets.rate_per_peer
        self._pace = Meter(payer=None if one is None else (one, budgets.burst(one)))
        self._whole = math.inf  # bytes per second of all circuits together, for which …
        self._whole_pace: TokenBucket | None = None  # … this was made; None: no bound
        client = budgets.connects_per_second, budgets.connects_at_once
        pair = budgets.connects_per_second_to_target, budgets.connects_at_once_to_target
        self._attempts = Meter(network=client, target=client, pair=pair)

    async def start(self) -> None:
        """Begins to serve, and to advertise the relay. Lowers the budgets if the system gives too few descriptors.

        While this peer cannot be dialed, it answers with refusals.
        """
        self.budgets = _affordable(self.budgets)
        self._endpoint.serve(messages.OFFER, messages.AskForOffer, self._offer)
        self._endpoint.serve(messages.RESERVE, messages.Reserve, self._reserve)
        self._endpoint.serve(messages.JOIN, messages.JoinRequest, self._join)
        self._endpoint.serve_stream(messages.OLD_CONNECT, messages.OldConnect, _tell_the_version)
        self._endpoint.transport.on_join(self._said)
        if self._publish is not None:
            self._tasks.keep(self._endpoint.events, partial(advertise, self._record, self._publish))

    async def close(self) -> None:
        """Takes nothing new; circuits that stand go on until the endpoint closes. Idempotent."""
        self._endpoint.withdraw(messages.OFFER, messages.RESERVE, messages.JOIN, messages.OLD_CONNECT)
        self._endpoint.transport.on_join(None)
        await self._tasks.close()
        self._clients.clear()

    def _record(self) -> RelayRecord | None:
        addresses = self._endpoint.direct_addresses
        return RelayRecord(addresses) if addresses else None

    def statistics(self) -> RelayStatistics:
        self._expire()
        return RelayStatistics(len(self._clients), len(self._circuits), self._passed, dict(self._refusals))

    # Reservations

    async def _offer(self, peer: PeerID, request: messages.AskForOffer) -> messages.RelayOffer:
        full = len(self._circuits) >= self.budgets.circuits
        return messages.RelayOffer(isinstance(self._reservable(peer), Prefix) and not full)

    async def _reserve(self, peer: PeerID, request: messages.Reserve) -> messages.Reserved:
        if not request.wanted:
            self._clients.pop(peer, None)
            return messages.Reserved(0.0)
        network = self._reservable(peer)
        if isinstance(network, CallRefused):
            self._refuse(network.code, str(network))
        self._clients[peer] = loop_time() + self.budgets.reservation_seconds, network
        return messages.Reserved(self.budgets.reservation_seconds)

    def _reservable(self, peer: PeerID) -> Prefix | CallRefused:
        """The network from which this peer may reserve; or the refusal."""
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
        return len(self._clients) < self.budgets.reservations and here < self.budgets.reservations_per_network

    def _reachable(self, client: PeerID) -> bool:
        """Whether it has a reservation, and a connection that no relay carries."""
        until, _ = self._clients.get(client, (0.0, None))
        seen = self._endpoint.seen(client)
        return until > loop_time() and seen is not None and not seen.relayed

    def _expire(self) -> None:
        self._clients = {client: told for client, told in self._clients.items() if self._reachable(client)}

    # Circuits

    async def _join(self, source: PeerID, request: messages.JoinRequest) -> messages.Joining:
        target = request.target
        circuit = _Circuit(self, (source, target), self._admitted(source, target))
        self._circuits.add(circuit)
        self._used.update(circuit.keys)
        near, far = os.urandom(TOKEN_BYTES), os.urandom(TOKEN_BYTES)
        self._tokens[near], self._tokens[far] = circuit.near, circuit.far
        try:
            come = messages.Come(source, far)
            await self._endpoint.call(target, messages.COME, come, messages.Coming, timeout=self.budgets.opening)
        except NetworkError as error:
            circuit.end()
            self._refuse("unreachable", f"{target.short} does not come: {error}")
        except asyncio.CancelledError:
            circuit.end()
            raise
        return messages.Joining(near)

    def _said(self, token: bytes) -> _End:
        """Somebody has dialed with a token. Raises Refused."""
        end = self._tokens.pop(token, None)
        if end is None:
            raise Refused("unknown token", "this relay has given no such token, or it came too late")
        return end

    def ended(self, circuit: _Circuit, code: str) -> None:
        """Called by a circuit that is over. `code`: why, unless its ends have closed it."""
        self._circuits.discard(circuit)
        self._used -= Counter(circuit.keys)
        self._tokens = {token: end for token, end in self._tokens.items() if end not in (circuit.near, circuit.far)}
        if code:
            self._refusals[code] += 1

    def payers(self, ends: tuple[PeerID, PeerID]) -> set[Hashable]:
        """Who is charged for a circuit's bytes. Identities cost nothing, so one network has the rate of one peer."""
        networks = {peer: self._endpoint.prefix(peer) for peer in ends}
        return {peer if network is None or network.shared else network for peer, network in networks.items()}

    def may_go_on(self, ends: tuple[PeerID, PeerID]) -> bool:
        """Whether both ends of a circuit are still members; always in an open run."""
        membership = self._endpoint.membership
        return membership is None or not any(map(membership.objection, ends))

    def count(self, payers: Iterable[Hashable], nbytes: int) -> float:
        """Counts bytes that have passed on a circuit. Returns the seconds until more may pass."""
        now, amount = loop_time(), max(nbytes, self.budgets.least)
        self._passed += nbytes
        self._endpoint.passed_on(nbytes)
        seconds = [self._pace.owe(now, amount, payer=payer) for payer in payers]
        if (whole := self._pace_of_all()) is not None:
            seconds.append(whole.take(amount, now))
        return max(seconds, default=0.0)

    def _admitted(self, source: PeerID, target: PeerID) -> tuple[Hashable, ...]:
        """Returns the keys under which the circuit is counted. Raises CallRefused."""
        budgets, seen, there = self.budgets, self._endpoint.seen(source), self._endpoint.seen(target)
        if target in (self._endpoint.peer_id, source):
            self._refuse("loop", "the two ends of a circuit and its relay are three peers")
        if seen is None or seen.relayed:
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
        # Last: attempts that the other bounds refuse must not use up the client's.
        if not self._attempts.take(now, target=target):
            self._refuse("busy", "too many attempts to reach this peer")
        bounds: dict[Hashable, int] = {
            ("from", source): budgets.circuits_per_peer,
            ("to", target): budgets.circuits_per_peer,
            shared: budgets.circuits_per_network_and_target,
        }
        bounds.update(dict.fromkeys((network, prefix_of_address(there.remote_address)), budgets.circuits_per_network))
        if len(self._circuits) >= budgets.circuits or any(self._used[key] >= bound for key, bound in bounds.items()):
            self._refuse("full", "no circuit is left for these two")
        return tuple(bounds)

    def _pace_of_all(self) -> TokenBucket | None:
        """The bucket of all circuits together, by the user's present limits; None: no bound."""
        lent = self._endpoint.rates.lower
        rate = min(self.budgets.rate or math.inf, math.inf if lent is None else lent / 2)
        if rate != self._whole:
            self._whole = rate
            self._whole_pace = None if rate == math.inf else TokenBucket(rate, self.budgets.burst(rate))
        return self._whole_pace

    def _refuse(self, code: str, words: str) -> NoReturn:
        self._refusals[code] += 1
        raise CallRefused(code, words)


async def _tell_the_version(peer: PeerID, request: messages.OldConnect, stream: Stream) -> None:
    raise CallRefused("version", f"this relay is of swarm {build()}: use that version, or a later one")


async def advertise(describe: Callable[[], RelayRecord | None], publish: Publish) -> None:
    """Keeps this relay's record in the hash table while `describe` gives one. Never returns.

    Even if there are many others: readers draw some by lot, and the hash table has bounds of its own.
    """
    pause = _NOT_YET
    while True:
        record, stored = describe(), False
        if record is not None:
            with suppress(SwarmError):
                stored = await publish(record, _LIFE)
        # A network that keeps no more records is not asked every few seconds.
        pause = _AGAIN if stored else _NOT_YET if record is None else min(pause, _AGAIN)
        await asyncio.sleep(pause)
        pause = _NOT_YET if stored or record is None else 2 * pause


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
