"""What the parts of a node share: its endpoint, its bounds, whom it knows and what it stores."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from swarmcli.dht.limits import DHTLimits
from swarmcli.dht.lookup import Lookup
from swarmcli.dht.records import Record, key_id
from swarmcli.dht.routing import Contact, Contacts
from swarmcli.dht.schema import RecordChecker, RecordValidator
from swarmcli.dht.storage import Storage, Verdict
from swarmcli.errors import ValidationError
from swarmcli.events import PeerRefused
from swarmcli.network.addresses import PeerInfo
from swarmcli.network.endpoint import Endpoint
from swarmcli.network.identity import PeerID

BREATH = 64  # records that are checked before other work on the loop gets its turn
_MOST_REPORTED = 1024


@dataclass(frozen=True, slots=True)
class NodeOptions:
    """How a node takes part. `parallel` is Kademlia's alpha, `bucket_size` its k."""

    num_replicas: int = 5
    bucket_size: int = 20
    parallel: int = 3
    cache_locally: bool = True
    limits: DHTLimits = field(default_factory=DHTLimits)

    def __post_init__(self) -> None:
        for name in ("num_replicas", "bucket_size", "parallel"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is at least 1, got {getattr(self, name)}")


class NodeCore:
    """State of one node, without a task of its own."""

    def __init__(self, endpoint: Endpoint, options: NodeOptions, validators: Iterable[RecordValidator] = ()) -> None:
        self.endpoint = endpoint
        self.options = options
        self.limits = options.limits
        self.contacts = Contacts(endpoint.peer_id, options.bucket_size, options.limits, self._learn)
        self.storage = Storage(options.limits)
        self.checker = RecordChecker(options.limits, validators)
        self.malformed: Counter[str] = Counter()  # by what was wrong; replies and requests that broke a rule
        self.instance = endpoint.random.getrandbits(62) + 1
        self._reported: set[tuple[PeerID, str]] = set()

    @property
    def addresses(self) -> tuple[str, ...]:
        """Where others may dial this node; none in client mode."""
        return () if self.endpoint.client_mode else tuple(self.endpoint.info.addresses)

    @property
    def own_contact(self) -> Contact | None:
        """This node as one of the network's replicas; None in client mode."""
        return None if self.endpoint.client_mode else Contact(self.endpoint.peer_id, self.addresses)

    def now(self) -> float:
        """Swarm time, in which records expire."""
        return self.endpoint.clock.now()

    def loop_time(self) -> float:
        """The loop's time, in which durations are measured."""
        return asyncio.get_running_loop().time()

    def nearest(self, target: int, count: int) -> list[Contact]:
        """The nearest nodes as far as this one knows, itself among them if it listens."""
        found = self.contacts.table.nearest(target, count)
        own = self.own_contact
        if own is not None:
            found = sorted([*found, own], key=lambda contact: contact.node ^ target)[:count]
        return found

    def parallel(self, lookups: Sequence[Lookup]) -> int:
        """How many to ask at once: all replicas where they are probably known, else Kademlia's alpha."""
        if all(self.contacts.table.knows_around(lookup.target) for lookup in lookups):
            return max(self.options.parallel, self.options.num_replicas)
        return self.options.parallel

    def breadth(self, lookups: Sequence[Lookup]) -> int:
        """How many contacts an answer should name: as many as there are replicas, which shows whoever is missing in
        a neighbourhood that is known, and elsewhere some more in place of those that are dead."""
        options = self.options
        if all(self.contacts.table.knows_around(lookup.target) for lookup in lookups):
            return options.num_replicas
        return options.num_replicas + options.parallel

    def new_lookup(self, target: int, width: int) -> Lookup:
        """A search that starts with everyone this node knows near the target; it has answered to itself already."""
        lookup = Lookup(target, width)
        lookup.offer(self.contacts.table.nearest(target, max(width, self.options.bucket_size)))
        if not len(self.contacts.table):
            lookup.offer(self.contacts.last_resort(self.options.bucket_size))
        own = self.own_contact
        if own is not None:
            lookup.offer([own])
            lookup.answered(own.peer_id)
        return lookup

    def accept(self, record: Record) -> Verdict:
        """Stores a record here if it passes every rule."""
        now = self.now()
        try:
            self.checker.check(record, now)
        except ValidationError:
            return Verdict.REFUSED
        return self.storage.put(record, now)

    async def checked(self, records: Sequence[Record], target: int, source: PeerID) -> list[Record]:
        """Those records from a peer that count; the others are counted by rule and reported once."""
        now = self.now()
        good: list[Record] = []
        for index, record in enumerate(records):
            if index % BREATH == BREATH - 1:
                await asyncio.sleep(0)
            try:
                if key_id(record.key) != target:
                    raise ValidationError("bounds: the record belongs to another key than was asked for")
                self.checker.check(record, now)
            except ValidationError as error:
                self.report(source, "record", f"sent a record that does not count: {error}")
            else:
                good.append(record)
        return good

    def impossible(self, peer: PeerID, reason: str) -> None:
        """Counts and reports a message that no honest node sends. `reason` is one of ours, never the peer's words."""
        self.malformed[reason] += 1
        self.report(peer, reason, f"sent an impossible message: {reason}")

    def report(self, peer: PeerID, rule: str, text: str) -> None:
        """Tells listeners, once per peer and rule, of something that was dropped."""
        if (peer, rule) in self._reported:
            return
        if len(self._reported) >= _MOST_REPORTED:
            self._reported.clear()
        self._reported.add((peer, rule))
        self.endpoint.events.emit(PeerRefused(peer.text, text, what="dht"))

    def _learn(self, contact: Contact) -> None:
        self.endpoint.learn(PeerInfo(contact.peer_id, contact.addresses))
