"""What all parts of a node share: the nodes that it knows, what it stores, and the calls to other nodes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import TypeVar

import msgspec

from swarmcli import errors
from swarmcli.dht import messages
from swarmcli.dht.bounds import DHTLimits
from swarmcli.dht.lookup import Ask, search
from swarmcli.dht.messages import FindReply, FindRequest, Question
from swarmcli.dht.records import LARGE_VALUE, Record, id_to_bytes, key_id
from swarmcli.dht.routing import BUCKET_SIZE, Contact, Contacts, of_own_network, spread
from swarmcli.dht.schema import RecordChecker, RecordValidator
from swarmcli.dht.storage import OWN, RecordWriter, Storage, StoreVerdict
from swarmcli.events import PeerRefused
from swarmcli.network.addresses import Scope, is_direct, readable
from swarmcli.network.endpoint import Endpoint
from swarmcli.network.identity import PeerID
from swarmcli.network.loop_thread import loop_time
from swarmcli.network.prefix import Prefix
from swarmcli.recent import Recent

Reply = TypeVar("Reply", bound=msgspec.Struct)
T = TypeVar("T")

# Seconds
CALL_TIMEOUT = 4.0  # of one call, dialing included …
SHORTEST_TIMEOUT = 2.0  # … to a near node; a busy machine is not a dead one
SLOW_AFTER = 0.5  # a search asks another node too when an answer takes longer
SLOW_LINK = 64 << 10  # bytes per second: records that arrive more slowly count as not answered
JITTER = 0.25  # periods differ by up to this fraction, so that nodes started together do not act together
PARALLEL = 3  # nodes that a search asks at a time: Kademlia's alpha
PATHS = 3  # of a search whose target's neighbourhood is not known, one for each node that it asks at a time …
SMALL_NETWORK = 3  # … but one path while the table holds fewer than this many buckets full of contacts: some 80 nodes
_BREATH = 64  # records that are checked before other work on the loop gets its turn
_GONE = Prefix("name", "gone")  # of a peer whose connection ended before its request was answered


async def breathing(things: Iterable[T]) -> AsyncIterator[T]:
    """All of them, with a turn for other work on the loop now and then."""
    for number, each in enumerate(things, 1):
        if number % _BREATH == 0:
            await asyncio.sleep(0)
        yield each


class NodeCore:
    """State of one node, without a task of its own.

    `ping`, `find`, `store` and `sync` ask another node. They raise NetworkError when there is no answer and
    ValidationError when the answer is impossible. By then the contact has left the routing table, unless it refused or
    its handler failed.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        limits: DHTLimits,
        validators: Iterable[RecordValidator] = (),
        *,
        num_replicas: int = 5,
    ) -> None:
        if num_replicas < 1:
            raise ValueError(f"num_replicas is at least 1, got {num_replicas}")
        self.endpoint = endpoint
        self.peer_id = endpoint.peer_id
        self.limits = limits
        self.num_replicas = num_replicas
        self.contacts = Contacts(endpoint.peer_id, BUCKET_SIZE, self.prefix)
        self.storage = Storage(limits)
        self.checker = RecordChecker(limits, validators)
        self.rests = False  # see DHTNode.rest
        self.instance = endpoint.random.getrandbits(62) + 1
        self._reported: Recent[tuple[PeerID, str], None] = Recent(1024)

    @property
    def addresses(self) -> tuple[str, ...]:
        """Where others may ask this node; none if it only asks."""
        return () if self.only_asks else self.endpoint.direct_addresses

    @property
    def only_asks(self) -> bool:
        """Whether this node keeps nothing for others: in client mode, or while it rests."""
        return self.endpoint.client_mode or self.rests

    @property
    def listening(self) -> bool:
        """Whether others may take this node into their routing tables."""
        return bool(self.addresses)

    @property
    def cut_off(self) -> bool:
        """Whether this node only asks and knows no node that can be asked. Such nodes keep records for the peers that
        they are connected with; otherwise these would vanish with the last node of the table."""
        return self.only_asks and not len(self.contacts.table)

    def now(self) -> float:
        """Swarm time, in which records expire."""
        return self.endpoint.clock.now()

    def jittered(self, seconds: float) -> float:
        return seconds * (1 + JITTER * self.endpoint.random.random())

    # Searching

    def nearest(self, target: int, count: int) -> list[Contact]:
        """The nearest nodes as far as this one knows, in unlike networks, itself among them if it listens: whoever
        looks for replicas of this target finds these."""
        found = self.contacts.table.nearest_apart(target, max(count, BUCKET_SIZE))
        if not self.only_asks:
            own = Contact(self.peer_id, self.addresses)
            found = sorted([*found, own], key=lambda contact: contact.node ^ target)
        return spread(found, count, self.contacts.table.network)

    def prefix(self, contact: Contact) -> Prefix | None:
        """The network prefix of a contact: as seen on its connection, else of its address. None: strangers share it, so
        being there together means nothing."""
        seen = self.endpoint.prefix(contact.peer_id)
        return of_own_network(contact) if seen is None else None if seen.shared else seen

    async def search(
        self,
        target: int,
        ask: Ask,
        *,
        width: int | None = None,
        at_once: bool = True,
        enough: Callable[[], bool] = lambda: False,
    ) -> list[Contact]:
        """The `width` nodes nearest to the target that answer; None: as many as there are replicas. Begins with those
        that this node knows near the target. With `at_once`, all replicas are asked side by side if the table probably
        names them. `enough`: see lookup.search."""
        table, width = self.contacts.table, width or self.num_replicas
        around = table.knows_around(target)
        known = table.nearest_apart(target, max(width, BUCKET_SIZE))
        if not len(table):
            known += self.contacts.last_resort(BUCKET_SIZE)
        if self.cut_off:
            known += [Contact(peer, ()) for peer in self.endpoint.connected()]
        # In a small network this node knows most of the others itself: no liar can hide them.
        small = len(table) < SMALL_NETWORK * BUCKET_SIZE
        return await search(
            target,
            known,
            ask,
            width=width,
            own=None if self.only_asks else Contact(self.peer_id, self.addresses),
            paths=1 if small or around else PATHS,
            parallel=max(PARALLEL, self.num_replicas) if at_once and around else PARALLEL,
            slow_after=max(SLOW_AFTER, 2 * self._nearest_trip),
            prefix=table.network,
            enough=enough,
        )

    @property
    def _nearest_trip(self) -> float:
        """Seconds to the nearest connected peer and back. If even that takes long, this node's own line is slow, and a
        late answer is no reason to ask others as well. 0: nobody is connected."""
        return min(filter(None, map(self.endpoint.round_trip, self.endpoint.connected())), default=0.0)

    def breadth(self, target: int) -> int:
        """How many contacts an answer should name. In a known neighbourhood as many as there are replicas, which is
        enough to show a node that is missing here; elsewhere some more, because some will be dead."""
        around = self.contacts.table.knows_around(target)
        return self.num_replicas + (0 if around else PARALLEL)

    async def explore(self, target: int, width: int | None = None) -> list[Contact]:
        """The `width` nodes near the target (None: as many as a bucket holds) hear of this node, and it of them."""
        count = width or BUCKET_SIZE

        async def ask(contact: Contact) -> Sequence[Contact]:
            return await self.find_nodes(contact, target, count)

        return await self.search(target, ask, width=count)

    # Judging records

    def writer(self, peer: PeerID) -> RecordWriter:
        """The writer that is charged for what this connected peer hands over."""
        return RecordWriter(peer, self.endpoint.prefix(peer) or _GONE)

    def accept(self, record: Record, writer: RecordWriter = OWN) -> StoreVerdict:
        """Stores a record here if it passes every rule, and if there is room for one more of this writer's."""
        now = self.now()
        try:
            self.checker.check(record, now)
        except errors.ValidationError:
            return StoreVerdict.REFUSED
        return self.storage.put(record, now, writer)

    async def checked(self, records: Sequence[Record], target: int, source: PeerID) -> list[Record]:
        """Returns those records from a peer that pass every rule. Reports the first that does not."""
        now = self.now()
        good: list[Record] = []
        async for record in breathing(records):
            if record.size > LARGE_VALUE:
                await asyncio.sleep(0)
            try:
                if key_id(record.key) != target:
                    raise errors.ValidationError("bounds: the record belongs to another key than was asked for")
                self.checker.check(record, now)
            except errors.ValidationError as error:
                self.report(source, "record", f"sent a record that does not count: {error}")
            else:
                good.append(record)
        return good

    def report(self, peer: PeerID, rule: str, text: str) -> None:
        """Tells listeners, once per peer and rule, of something that was dropped."""
        if (peer, rule) in self._reported:
            return
        self._reported[peer, rule] = None
        self.endpoint.events.emit(PeerRefused(peer.text, text, what="dht"))

    def heard_from(self, peer: PeerID, listening: bool) -> Contact:
        """A peer has called or answered. Returns its contact, with the addresses that it names itself and those where
        it has answered. Those that others name are left out: they would be passed on as if it had named them."""
        known = filter(is_direct, self.endpoint.own_word(peer)) if listening else ()
        contact = Contact(peer, tuple(known))
        self.contacts.heard_from(contact, loop_time())
        return contact

    # Asking other nodes

    async def ping(self, peer: PeerID) -> Contact | None:
        """The contact as it describes itself; None for a peer in client mode."""
        request = messages.PingRequest(self.listening)
        reply = await self._call(peer, messages.PING, request, messages.PingReply)
        contact = self.heard_from(peer, reply.listening)
        return contact if contact.addresses else None

    async def find(
        self, contact: Contact, question: Question, *, contacts: int, values: bool, room: int = 0
    ) -> tuple[FindReply, Sequence[Contact]]:
        """One message with one question; also the neighbours that the answer names."""
        request = FindRequest(self.listening, (question,), contacts, values, room)
        reply = await self._ask(contact, messages.FIND, request, FindReply)
        if len(reply.answers) != (1 if values else 0):
            raise self.impossible(contact.peer_id, "as many answers as questions were expected")
        return reply, self._neighbours(contact, reply.neighbours, contacts)

    async def find_nodes(self, contact: Contact, target: int, count: int) -> Sequence[Contact]:
        """The nodes that this contact knows near the target."""
        _, neighbours = await self.find(contact, Question(id_to_bytes(target)), contacts=count, values=False)
        return neighbours

    async def store(
        self, contact: Contact, records: Sequence[Record], *, contacts: int = 0
    ) -> tuple[Sequence[messages.Outcome], Sequence[Contact]]:
        """One outcome per record, and neighbours of their key. The caller keeps within the bounds of a message."""
        request = messages.StoreRequest(self.listening, tuple(records), contacts)
        reply = await self._ask(contact, messages.STORE, request, messages.StoreReply)
        if len(reply.outcomes) != len(records):
            raise self.impossible(contact.peer_id, "as many outcomes as records were expected")
        return reply.outcomes, self._neighbours(contact, reply.neighbours, contacts)

    async def sync(self, contact: Contact, digests: Sequence[tuple[bytes, int]]) -> set[bytes]:
        """Those of these keys under which the contact does not hold the same as this node."""
        request = messages.SyncRequest(self.listening, tuple(digests))
        return set((await self._ask(contact, messages.SYNC, request, messages.SyncReply)).wanted)

    def impossible(self, peer: PeerID, reason: str) -> errors.ValidationError:
        """Reports an impossible answer and bans the contact; the caller raises what is returned. `reason` is a text of
        ours, never the peer's words."""
        self.contacts.ban(peer, loop_time())
        self.report(peer, reason, f"sent an impossible message: {reason}")
        return errors.ValidationError(reason)

    def _neighbours(self, contact: Contact, neighbours: Sequence[Contact], most: int) -> Sequence[Contact]:
        if len(neighbours) > most:
            raise self.impossible(contact.peer_id, "more neighbours than were asked for")
        if any(not neighbour.addresses for neighbour in neighbours):
            raise self.impossible(contact.peer_id, "a neighbour without an address")
        return list(self._credible(contact, neighbours))

    def _credible(self, source: Contact, neighbours: Sequence[Contact]) -> Iterator[Contact]:
        """The neighbours with those addresses that this source may name; without those that then have none, and without
        this peer itself."""
        horizon = self.endpoint.horizon(source.peer_id)
        for each in neighbours:
            addresses = tuple(filter(is_direct, readable(each.addresses, each.peer_id, horizon)))
            if addresses and each.peer_id != self.peer_id:
                yield Contact(each.peer_id, addresses)

    async def _ask(self, contact: Contact, method: str, request: msgspec.Struct, reply: type[Reply]) -> Reply:
        """Like `_call`; a contact that only others have named enters the table once it has answered."""
        peer = contact.peer_id
        if self.contacts.is_banned(peer, loop_time()):
            raise errors.ValidationError("the peer has sent impossible messages")
        if not self.endpoint.is_connected(peer):
            self.endpoint.learn(peer, contact.addresses, horizon=Scope.HOST)  # judged when it arrived
        answer = await self._call(peer, method, request, reply)
        self.heard_from(peer, listening=True)
        return answer

    async def _call(self, peer: PeerID, method: str, request: msgspec.Struct, reply: type[Reply]) -> Reply:
        call = partial(self.endpoint.call, peer, method, request, reply, timeout=self._timeout(peer, request))
        try:
            try:
                return await call()
            except errors.ProtocolViolation:
                raise
            except errors.ConnectionLost:
                # Once more on a new connection: asking or storing twice is the same as once, and a connection may
                # end because the peer gave it up for another.
                return await call()
        except (errors.CallRefused, errors.RemoteError):
            raise
        except errors.UnknownMethod:  # it is no node of the hash table any more: nobody can dial it
            self.contacts.withdrawn(peer)
            raise
        except errors.ProtocolViolation:
            self.contacts.ban(peer, loop_time())
            raise
        except errors.NetworkError:
            self.contacts.gone(peer, loop_time())
            raise

    def _timeout(self, peer: PeerID, request: msgspec.Struct) -> float:
        """Ten measured round trips, within bounds, and the time that records to store take over a slow link."""
        longest = max(CALL_TIMEOUT, 10 * self._nearest_trip)
        measured = self.endpoint.round_trip(peer)
        patience = longest if measured is None else min(longest, max(SHORTEST_TIMEOUT, 10 * measured))
        if isinstance(request, messages.StoreRequest):
            patience += sum(record.size for record in request.records) / SLOW_LINK
        return patience
