"""The contacts of a node (Kademlia, section 2.2), and those that have stopped answering."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

import msgspec

from swarmcli.dht.limits import DHTLimits
from swarmcli.dht.records import ID_BITS, node_id
from swarmcli.network.identity import PeerID
from swarmcli.network.wire.messages import Addresses

# Of a contact: it is new in the table; it has left it; it was not heard of for long, and a newcomer waits.
Change: TypeAlias = Literal["appeared", "lost", "doubtful"]


class Contact(msgspec.Struct, frozen=True):
    """A listening peer and where to dial it; also as it travels in messages."""

    peer_id: PeerID
    addresses: Addresses

    @property
    def node(self) -> int:
        """Its place among the ids."""
        return node_id(self.peer_id)


@dataclass(slots=True)
class _Bucket:
    contacts: OrderedDict[PeerID, Contact] = field(default_factory=OrderedDict)  # least recently seen first
    replacements: OrderedDict[PeerID, Contact] = field(default_factory=OrderedDict)


class RoutingTable:
    """The contacts of a node, without I/O: the caller pings the doubtful ones and reports with `seen` and `failed`."""

    def __init__(self, own: PeerID, bucket_size: int = 20) -> None:
        self._own = own
        self._own_node = node_id(own)
        self._bucket_size = bucket_size
        self._buckets = [_Bucket() for _ in range(ID_BITS)]
        self._occupied = 0  # one bit per bucket that has contacts
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def __contains__(self, peer: PeerID) -> bool:
        return peer != self._own and peer in self._bucket_of(peer).contacts

    def __iter__(self) -> Iterator[Contact]:
        for bucket in self._buckets:
            yield from bucket.contacts.values()

    def seen(self, contact: Contact) -> tuple[bool, Contact | None]:
        """A sign of life. Returns whether the contact is new in the table, and whom to ping if its bucket is full."""
        if contact.peer_id == self._own:
            return False, None
        index = self._index_of(contact.peer_id)
        bucket = self._buckets[index]
        if contact.peer_id in bucket.contacts:
            bucket.contacts[contact.peer_id] = contact
            bucket.contacts.move_to_end(contact.peer_id)
            return False, None
        bucket.replacements.pop(contact.peer_id, None)
        if len(bucket.contacts) < self._bucket_size:
            bucket.contacts[contact.peer_id] = contact
            self._occupied |= 1 << index
            self._count += 1
            return True, None
        bucket.replacements[contact.peer_id] = contact
        if len(bucket.replacements) > self._bucket_size:
            bucket.replacements.popitem(last=False)
        return False, next(iter(bucket.contacts.values()))

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
        if bucket.replacements:
            name, successor = bucket.replacements.popitem(last=True)
            bucket.contacts[name] = successor
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

    def knows_around(self, target: int) -> bool:
        """Whether this table probably names everyone near a target: the bucket that it falls into has room left."""
        distance = target ^ self._own_node
        return not distance or len(self._buckets[distance.bit_length() - 1].contacts) < self._bucket_size

    def thin_buckets(self) -> list[int]:
        """Indices of buckets with room, between the node's nearest contact and the far end: worth a look."""
        start = (self._occupied & -self._occupied).bit_length() - 1 if self._occupied else ID_BITS
        return [i for i in range(start, ID_BITS) if len(self._buckets[i].contacts) < self._bucket_size]

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


_FIRST_PAUSE = 2.0  # seconds until a lost contact is probed: it may only have been busy. Grows with each failure
_LONGEST_PAUSE = 600.0
_BAN = 300.0  # seconds


@dataclass(slots=True)
class _Lost:
    contact: Contact
    next_probe: float  # loop time
    pause: float


class Contacts:
    """The routing table, with a memory of the contacts that left it. Times are the loop's, handed in."""

    def __init__(self, own: PeerID, bucket_size: int, limits: DHTLimits) -> None:
        self.table = RoutingTable(own, bucket_size)
        self.listeners: list[Callable[[Change, Contact], None]] = []
        self._own = own
        self._limits = limits
        self._lost: OrderedDict[PeerID, _Lost] = OrderedDict()
        self._banned: OrderedDict[PeerID, float] = OrderedDict()  # until when, in loop time

    def heard_from(self, contact: Contact, now: float) -> None:
        """A peer has called or answered, and this is where it has answered before or says that it is: never what others
        say. One that nobody can dial any more leaves the table."""
        if contact.peer_id == self._own or self.is_banned(contact.peer_id, now):
            return
        if not contact.addresses:
            self.withdrawn(contact.peer_id)
            return
        self._lost.pop(contact.peer_id, None)
        appeared, doubtful = self.table.seen(contact)
        if appeared:
            self._tell("appeared", contact)
        if doubtful is not None:
            self._tell("doubtful", doubtful)

    def gone(self, peer: PeerID, now: float) -> None:
        """It does not answer: it leaves the table, and is remembered for probes that come ever less often."""
        lost, successor = self.table.failed(peer)
        if lost is not None:
            self._lost[peer] = _Lost(lost, now + _FIRST_PAUSE, _FIRST_PAUSE)
            if len(self._lost) > self._limits.max_evicted:
                self._lost.popitem(last=False)
            self._tell("lost", lost)
        elif known := self._lost.get(peer):
            known.pause = min(4 * known.pause, _LONGEST_PAUSE)
            known.next_probe = now + known.pause
        if successor is not None:
            self._tell("appeared", successor)

    def withdrawn(self, peer: PeerID) -> None:
        """It says that it cannot be dialed: it leaves the table, and nobody looks for it."""
        self._lost.pop(peer, None)
        lost, successor = self.table.failed(peer)
        if lost is not None:
            self._tell("lost", lost)
        if successor is not None:
            self._tell("appeared", successor)

    def ban(self, peer: PeerID, now: float) -> None:
        """It has sent what no honest node sends: it leaves the table and is not asked for a while."""
        self.gone(peer, now)
        self._lost.pop(peer, None)
        self._banned[peer] = now + _BAN
        if len(self._banned) > self._limits.max_evicted:
            self._banned.popitem(last=False)

    def is_banned(self, peer: PeerID, now: float) -> bool:
        until = self._banned.get(peer)
        if until is not None and until <= now:
            del self._banned[peer]
        return peer in self._banned

    def lost_contacts(self, now: float, count: int) -> list[Contact]:
        """At most `count` lost contacts whose next probe is due."""
        due = [lost.contact for lost in self._lost.values() if lost.next_probe <= now]
        return due[:count]

    def next_probe(self) -> float:
        """The loop time at which the next of them is due; infinity if none is lost."""
        return min((lost.next_probe for lost in self._lost.values()), default=math.inf)

    def last_resort(self, count: int) -> list[Contact]:
        """Those lost most recently, for when the table is empty: then all of them may be there again."""
        return [lost.contact for lost in list(self._lost.values())[-count:]]

    def _tell(self, change: Change, contact: Contact) -> None:
        for listener in self.listeners:
            listener(change, contact)
