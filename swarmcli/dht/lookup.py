"""One iterative search for the nodes nearest to an id, as a state machine without I/O (Kademlia, section 2.3).

The driver in `traversal` asks whom `due` names and reports back; `reference_lookup` is the slow, obvious version
that tests compare it with.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Iterable
from enum import Enum

from swarmcli.dht.routing import Contact
from swarmcli.errors import NetworkError
from swarmcli.network.identity import PeerID


class Asked(Enum):
    """How far the search is with one candidate."""

    NOT_YET = 0
    WAITING = 1  # asked, no answer so far
    SLOW = 2  # asked, and others are asked in its stead; its answer still counts
    ANSWERED = 3
    FAILED = 4


_MOST_ASKED = 160  # liars who invent ever nearer nodes lead a search no further than this


class Lookup:
    """Finds the `width` nearest nodes that answer. Every candidate nearer than the last of them has been asked."""

    def __init__(self, target: int, width: int) -> None:
        self.target = target
        self.finished = False
        self.width = width
        self._order: list[tuple[int, PeerID]] = []  # (distance, peer), nearest first
        self._contacts: dict[PeerID, Contact] = {}
        self._asked: dict[PeerID, Asked] = {}
        self._left = _MOST_ASKED

    def offer(self, contacts: Iterable[Contact]) -> None:
        """More candidates, for example from somebody's answer. Known ones are ignored."""
        for contact in contacts:
            if contact.peer_id not in self._contacts:
                self._contacts[contact.peer_id] = contact
                self._asked[contact.peer_id] = Asked.NOT_YET
                insort(self._order, (contact.node ^ self.target, contact.peer_id))

    def due(self, parallel: int) -> list[Contact]:
        """Whom to ask now, so that at most `parallel` answers are waited for; updates `finished`."""
        if self.finished:
            return []
        window = self._window()
        waiting = sum(self._asked[peer] is Asked.WAITING for peer in window)
        fresh = [self._contacts[peer] for peer in window if self._asked[peer] is Asked.NOT_YET]
        answered = sum(self._asked[peer] is Asked.ANSWERED for peer in window)
        if self._left <= 0:
            fresh = []
        if not fresh and not waiting and (answered >= self.width or not self._pending_slow()):
            self.finished = True
        return fresh[: max(0, parallel - waiting)]

    def wants(self, peer: PeerID) -> bool:
        """Whether this peer will be asked anyway as things stand: then it may as well share somebody's message."""
        if self.finished or self._left <= 0:
            return False
        return self._asked.get(peer) is Asked.NOT_YET and peer in self._window()

    def asking(self, peer: PeerID) -> None:
        """The question is on its way."""
        self._left -= 1
        self._asked[peer] = Asked.WAITING

    def slow(self, peer: PeerID) -> None:
        if self._asked.get(peer) is Asked.WAITING:
            self._asked[peer] = Asked.SLOW

    def answered(self, peer: PeerID) -> None:
        self._asked[peer] = Asked.ANSWERED

    def failed(self, peer: PeerID) -> None:
        self._asked[peer] = Asked.FAILED

    def reopen(self) -> None:
        """The search goes on, because somebody who had answered has failed since."""
        self.finished = False

    def stop(self) -> None:
        """Enough is known; nobody else is asked."""
        self.finished = True

    def nearest(self) -> list[Contact]:
        """The nearest that answered, at most `width`, nearest first."""
        found = [self._contacts[peer] for _, peer in self._order if self._asked[peer] is Asked.ANSWERED]
        return found[: self.width]

    def _window(self) -> list[PeerID]:
        """The `width` nearest candidates that may still turn out to be the result. Slow ones do not take a place."""
        window: list[PeerID] = []
        for _, peer in self._order:
            if self._asked[peer] not in (Asked.FAILED, Asked.SLOW):
                window.append(peer)
                if len(window) == self.width:
                    break
        return window

    def _pending_slow(self) -> bool:
        return any(state is Asked.SLOW for state in self._asked.values())


def reference_lookup(
    target: int, width: int, start: Iterable[Contact], ask: Callable[[Contact], Iterable[Contact]]
) -> list[Contact]:
    """Asks one after the other, always the nearest not asked yet, until the nearest `width` have all answered.

    `ask` raises NetworkError for a peer that does not answer. Slow and obvious: the measure for `Lookup`.
    """
    candidates = {contact.peer_id: contact for contact in start}
    answered: set[PeerID] = set()
    dead: set[PeerID] = set()
    while True:
        alive = (contact for contact in candidates.values() if contact.peer_id not in dead)
        nearest = sorted(alive, key=lambda contact: contact.node ^ target)[:width]
        unasked = [contact for contact in nearest if contact.peer_id not in answered]
        if not unasked:
            return nearest
        try:
            found = ask(unasked[0])
        except NetworkError:
            dead.add(unasked[0].peer_id)
            continue
        answered.add(unasked[0].peer_id)
        candidates.update({other.peer_id: other for other in found})
