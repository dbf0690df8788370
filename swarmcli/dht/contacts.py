"""Whom this node knows, who has stopped answering, and who wants to hear of either."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from swarmcli.dht.limits import DHTLimits
from swarmcli.dht.routing import Contact, RoutingTable
from swarmcli.network.identity import PeerID

_FIRST_PAUSE = 2.0  # seconds until a lost contact is probed: it may only have been busy. Grows with each failure
_LONGEST_PAUSE = 600.0
_BAN = 300.0  # seconds


class ContactListener(Protocol):
    """Somebody who acts on changes in the routing table."""

    def contact_appeared(self, contact: Contact) -> None: ...

    def contact_lost(self, contact: Contact) -> None: ...

    def contact_doubtful(self, contact: Contact) -> None: ...


@dataclass(slots=True)
class _Lost:
    contact: Contact
    next_probe: float  # loop time
    pause: float


class Contacts:
    """The routing table with a memory for those who left it. Times are the loop's, handed in."""

    def __init__(self, own: PeerID, bucket_size: int, limits: DHTLimits, learn: Callable[[Contact], None]) -> None:
        """`learn` takes every first-hand address to the endpoint's address book."""
        self.table = RoutingTable(own, bucket_size)
        self.listeners: list[ContactListener] = []
        self._own = own
        self._limits = limits
        self._learn = learn
        self._lost: OrderedDict[PeerID, _Lost] = OrderedDict()
        self._banned: OrderedDict[PeerID, float] = OrderedDict()  # until when, in loop time

    def heard_from(self, contact: Contact, now: float) -> None:
        """A listening peer has called or answered, and this is where it says it is."""
        if contact.peer_id == self._own or not contact.addresses or self.is_banned(contact.peer_id, now):
            return
        if self.table.get(contact.peer_id) != contact:
            self._learn(contact)
        self._lost.pop(contact.peer_id, None)
        appeared, questionable = self.table.seen(contact)
        if appeared:
            self._tell_appeared(contact)
        if questionable is not None:
            for listener in self.listeners:
                listener.contact_doubtful(questionable)

    def gone(self, peer: PeerID, now: float) -> None:
        """It does not answer: out of the table, and remembered for probes."""
        lost, successor = self.table.failed(peer)
        if lost is None:
            self._postpone(peer, now)
            return
        self._lost[peer] = _Lost(lost, now + _FIRST_PAUSE, _FIRST_PAUSE)
        if len(self._lost) > self._limits.max_evicted:
            self._lost.popitem(last=False)
        for listener in self.listeners:
            listener.contact_lost(lost)
        if successor is not None:
            self._tell_appeared(successor)

    def ban(self, peer: PeerID, now: float) -> None:
        """It has sent what no honest node sends: out of the table and nobody to ask for a while."""
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

    def _postpone(self, peer: PeerID, now: float) -> None:
        lost = self._lost.get(peer)
        if lost is not None:
            lost.pause = min(4 * lost.pause, _LONGEST_PAUSE)
            lost.next_probe = now + lost.pause

    def _tell_appeared(self, contact: Contact) -> None:
        for listener in self.listeners:
            listener.contact_appeared(contact)
