"""The contacts of a node (Kademlia, section 2.2), and those that have stopped answering."""

from __future__ import annotations

import math
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Literal, TypeAlias, TypeVar

import msgspec

from swarmcli.backoff import Backoff
from swarmcli.dht.records import ID_BITS, node_id
from swarmcli.network.identity import PeerID
from swarmcli.network.prefix import Prefix, prefix_of_address
from swarmcli.network.wire.messages import Addresses
from swarmcli.recent import Recent

BUCKET_SIZE = 20  # contacts: Kademlia's k
MOST_LOST = 256  # lost contacts that are remembered, and as many that are banned
# Seconds
FIRST_PROBE = 2.0  # until a contact that did not answer is tried again: four times as long each time …
LONGEST_PROBE = 600.0  # … up to this
BAN = 300.0  # for which a node is not asked that has sent what no honest node sends

# A contact is new in the table; has left it; was not heard of for long, and a newcomer waits.
Change: TypeAlias = Literal["appeared", "lost", "doubtful"]


class Contact(msgspec.Struct, frozen=True):
    """A listening peer and where to dial it; also as it travels in messages."""

    peer_id: PeerID
    addresses: Addresses

    @property
    def node(self) -> int:
        """Its place among the ids."""
        return node_id(self.peer_id)


E = TypeVar("E")


def spread(nearest: Iterable[E], count: int, prefix: Callable[[E], Prefix | None]) -> list[E]:
    """The first `count`, in their order, but no two of one network prefix while there are others.

    An entry whose `prefix` is None (strangers may well share it) counts as like no other. So whoever has many addresses
    of one network near a key holds one of its replicas.
    """
    found: list[E] = []
    alike: list[E] = []
    taken: set[Prefix] = set()
    places: dict[int, int] = {}
    for each in nearest:
        places[id(each)] = len(places)
        where = prefix(each)
        if where is not None and where in taken:
            alike.append(each)
            continue
        found.append(each)
        if len(found) == count:
            break
        if where is not None:
            taken.add(where)
    if alike and len(found) < count:
        found = sorted([*found, *alike[: count - len(found)]], key=lambda each: places[id(each)])
    return found


def of_own_network(contact: Contact) -> Prefix | None:
    """The network prefix that a contact's addresses say it is in. None: one that strangers share, or none."""
    prefix = _prefix_of(contact.addresses[0]) if contact.addresses else None
    return None if prefix is None or prefix.shared else prefix


_prefix_of = lru_cache(maxsize=8192)(prefix_of_address)


@dataclass(slots=True)
class _Bucket:
    replacements: Recent[PeerID, Contact]
    contacts: OrderedDict[PeerID, Contact] = field(default_factory=OrderedDict)  # least recently seen first


_UNKNOWN = Prefix("name", "?")
_LOOK_AROUND = 4  # buckets, for contacts in other networks


class RoutingTable:
    """The contacts of a node, without I/O: the caller pings the doubtful ones and reports with `seen` and `failed`."""

    def __init__(
        self, own: PeerID, bucket_size: int = BUCKET_SIZE, prefix: Callable[[Contact], Prefix | None] = of_own_network
    ) -> None:
        """`prefix` says which network a contact is in; None: one that strangers share."""
        self._own = own
        self._prefix = prefix
        self._networks: dict[PeerID, Prefix | None] = {}  # of the contacts, as of when they or their addresses came
        self._own_node = node_id(own)
        self._bucket_size = bucket_size
        # By index. Made at the first use: few of the 256 are ever used.
        self._buckets = defaultdict[int, _Bucket](lambda: _Bucket(Recent(bucket_size)))
        self._occupied = 0  # one bit per bucket that has contacts
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def __contains__(self, peer: PeerID) -> bool:
        return peer != self._own and peer in self._bucket_of(peer).contacts

    def __iter__(self) -> Iterator[Contact]:
        for index in sorted(self._buckets):
            yield from self._buckets[index].contacts.values()

    def seen(self, contact: Contact) -> tuple[bool, Contact | None]:
        """A sign of life. Returns whether the contact is new in the table, and whom to ping if its bucket is full."""
        if contact.peer_id == self._own:
            return False, None
        index = self._index_of(contact.peer_id)
        bucket = self._buckets[index]
        if (known := bucket.contacts.get(contact.peer_id)) is not None:
            if known != contact:
                self._networks[contact.peer_id] = self._prefix(contact)
            bucket.contacts[contact.peer_id] = contact
            bucket.contacts.move_to_end(contact.peer_id)
            return False, None
        bucket.replacements.pop(contact.peer_id, None)
        if len(bucket.contacts) < self._bucket_size:
            bucket.contacts[contact.peer_id] = contact
            self._networks[contact.peer_id] = self._prefix(contact)
            self._occupied |= 1 << index
            self._count += 1
            return True, None
        bucket.replacements[contact.peer_id] = contact
        return False, next(iter(bucket.contacts.values()))

    def make_room(self, contact: Contact) -> Contact | None:
        """If a newcomer's bucket is full, and another network holds at least two more places there than the newcomer's,
        the contact of that network that was heard of last leaves. Returns it."""
        where = self._prefix(contact)
        if where is None or contact.peer_id == self._own:
            return None
        contacts = self._bucket_of(contact.peer_id).contacts
        if len(contacts) < self._bucket_size or contact.peer_id in contacts:
            return None
        held = Counter(network for peer in contacts if (network := self._networks[peer]) is not None)
        if not held:
            return None
        fullest, count = held.most_common(1)[0]
        if count <= held[where] + 1:
            return None
        displaced = contacts.pop(next(peer for peer in reversed(contacts) if self._networks[peer] == fullest))
        del self._networks[displaced.peer_id]
        self._count -= 1
        return displaced

    def failed(self, peer: PeerID) -> tuple[Contact | None, Contact | None]:
        """A contact did not answer. Returns the one that left the table and the one that took its place."""
        if peer == self._own:
            return None, None
        index = self._index_of(peer)
        bucket = self._buckets[index]
        bucket.replacements.pop(peer, None)
        lost = bucket.contacts.pop(peer, None)
        successor = None
        if lost is None:
            return None, None
        del self._networks[peer]
        if bucket.replacements:
            name, successor = bucket.replacements.popitem(last=True)
            bucket.contacts[name] = successor
            self._networks[name] = self._prefix(successor)
        else:
            self._count -= 1
        if not bucket.contacts:
            self._occupied &= ~(1 << index)
        return lost, successor

    def get(self, peer: PeerID) -> Contact | None:
        return None if peer == self._own else self._bucket_of(peer).contacts.get(peer)

    def nearest(self, target: int, count: int) -> list[Contact]:
        """The `count` contacts nearest to a target, nearest first."""
        found: list[Contact] = []
        for index in self._buckets_by_distance(target):
            contacts = self._buckets[index].contacts.values()
            found.extend(sorted(contacts, key=lambda contact: contact.node ^ target))
            if len(found) >= count:
                break
        return found[:count]

    def nearest_apart(self, target: int, count: int) -> list[Contact]:
        """The same, but no two of one network while there are others not much farther away: otherwise a peer that makes
        up many identities near a target would fill everybody's answers."""
        found = self.nearest(target, count)
        networks = [where for each in found if (where := self.network(each)) is not None]
        if len(set(networks)) == len(networks):
            return found
        return spread(self.nearest(target, _LOOK_AROUND * self._bucket_size), count, self.network)

    def network(self, contact: Contact) -> Prefix | None:
        """The network of a contact: as noted in this table, else what `prefix` says."""
        known = self._networks.get(contact.peer_id, _UNKNOWN)
        return self._prefix(contact) if known is _UNKNOWN else known

    def knows_around(self, target: int) -> bool:
        """Whether this table probably names everyone near a target: the bucket that it falls into has room left."""
        distance = target ^ self._own_node
        return not distance or len(self._buckets[distance.bit_length() - 1].contacts) < self._bucket_size

    def thin_buckets(self) -> list[int]:
        """Indices of buckets with room, between the node's nearest contact and the far end: worth a look."""
        start = (self._occupied & -self._occupied).bit_length() - 1 if self._occupied else ID_BITS
        full = {index for index, each in self._buckets.items() if len(each.contacts) >= self._bucket_size}
        return [index for index in range(start, ID_BITS) if index not in full]

    def id_in_bucket(self, index: int, noise: int) -> int:
        """An id that belongs into a bucket; `noise` chooses which."""
        return self._own_node ^ ((1 << index) | (noise & ((1 << index) - 1)))

    def _bucket_of(self, peer: PeerID) -> _Bucket:
        return self._buckets[self._index_of(peer)]

    def _index_of(self, peer: PeerID) -> int:
        return (node_id(peer) ^ self._own_node).bit_length() - 1

    def _buckets_by_distance(self, target: int) -> Iterator[int]:
        """Indices of occupied buckets such that everything in one is nearer to the target than everything in the next.

        A contact of bucket i differs from the own id in bit i and in none above it. If the target does so too, the
        contact shares one bit more with the target than the own id does, hence is nearer: these buckets come
        first, from the highest bit down; the others follow, from the lowest bit up.
        """
        difference = target ^ self._own_node
        nearer = self._occupied & difference
        while nearer:
            index = nearer.bit_length() - 1
            yield index
            nearer ^= 1 << index
        farther = self._occupied & ~difference
        while farther:
            lowest = farther & -farther
            yield lowest.bit_length() - 1
            farther ^= lowest


class Contacts:
    """The routing table, with a memory of the contacts that left it. Times are the loop's, handed in."""

    def __init__(
        self,
        own: PeerID,
        bucket_size: int,
        prefix: Callable[[Contact], Prefix | None] = of_own_network,
    ) -> None:
        self.table = RoutingTable(own, bucket_size, prefix)
        self.listeners: list[Callable[[Change, Contact], None]] = []
        self._own = own
        self._lost: Recent[PeerID, Contact] = Recent(MOST_LOST)
        # Until a lost contact is probed: it may only have been busy.
        self._probes = Backoff[PeerID](FIRST_PROBE, LONGEST_PROBE, growth=4.0, most=MOST_LOST)
        self._bans = Backoff[PeerID](BAN, BAN, most=MOST_LOST)

    def heard_from(self, contact: Contact, now: float) -> None:
        """A peer has called or answered. `contact` has the addresses that it named itself or answered at, never those
        that others name. Without any, it leaves the table: nobody can dial it."""
        if contact.peer_id == self._own or self.is_banned(contact.peer_id, now):
            return
        if not contact.addresses:
            self.withdrawn(contact.peer_id)
            return
        self._stop_probing(contact.peer_id)
        if (displaced := self.table.make_room(contact)) is not None:
            self._tell("lost", displaced)
        appeared, doubtful = self.table.seen(contact)
        if appeared:
            self._tell("appeared", contact)
        if doubtful is not None:
            self._tell("doubtful", doubtful)

    def gone(self, peer: PeerID, now: float) -> None:
        """It does not answer: it leaves the table, and is remembered for probes that come ever less often."""
        lost, successor = self.table.failed(peer)
        if lost is not None:
            self._lost[peer] = lost
            self._tell("lost", lost)
        if peer in self._lost:
            self._probes.add(peer, now)
        if successor is not None:
            self._tell("appeared", successor)

    def withdrawn(self, peer: PeerID) -> None:
        """It says that it cannot be dialed: it leaves the table, and nobody looks for it."""
        self._stop_probing(peer)
        lost, successor = self.table.failed(peer)
        if lost is not None:
            self._tell("lost", lost)
        if successor is not None:
            self._tell("appeared", successor)

    def ban(self, peer: PeerID, now: float) -> None:
        """It has sent what no honest node sends: it leaves the table and is not asked for a while."""
        self.gone(peer, now)
        self._stop_probing(peer)
        self._bans.add(peer, now)

    def is_banned(self, peer: PeerID, now: float) -> bool:
        return self._bans.rests(peer, now)

    def lost_contacts(self, now: float, count: int) -> list[Contact]:
        """At most `count` lost contacts whose next probe is due."""
        return [contact for peer, contact in self._lost.items() if not self._probes.rests(peer, now)][:count]

    def next_probe(self) -> float:
        """The loop time at which the next of them is due; infinity if none is lost."""
        return min(map(self._probes.until, self._lost), default=math.inf)

    def last_resort(self, count: int) -> list[Contact]:
        """Those lost most recently, for when the table is empty: then all of them may be there again."""
        return list(self._lost.values())[-count:]

    def _stop_probing(self, peer: PeerID) -> None:
        """The peer no longer counts as lost."""
        self._lost.pop(peer, None)
        self._probes.forget(peer)

    def _tell(self, change: Change, contact: Contact) -> None:
        for listener in self.listeners:
            listener(change, contact)
