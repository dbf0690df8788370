"""Iterative searches for the nodes nearest to an id (Kademlia, section 2.3).

`Lookup` is one search, a state machine without I/O. `traverse` drives several at once, so that one message to a peer
serves all that want to ask it. `reference_lookup` is the slow, obvious version that tests compare `Lookup` with.
"""

from __future__ import annotations

import asyncio
from bisect import insort
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from enum import Enum
from typing import Any, TypeAlias, TypeVar

from swarmcli.dht.routing import Contact
from swarmcli.errors import DHTError, NetworkError
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


T = TypeVar("T")

Ask: TypeAlias = Callable[[Contact, Sequence[Lookup]], Awaitable[Iterable[Contact]]]


async def traverse(lookups: Sequence[Lookup], ask: Ask, *, parallel: int, slow_after: float) -> None:
    """Runs the lookups to their ends.

    `ask` sends one message for the named lookups and returns the contacts from the answer. A NetworkError or
    DHTError from it counts as no answer. Whoever takes longer than `slow_after` seconds is waited for no more than
    others: somebody else is asked too. DHTClient that are still under way when all lookups have ended are cancelled.
    """
    await _Traversal(lookups, ask, parallel, slow_after).run()


class _Traversal:
    def __init__(self, lookups: Sequence[Lookup], ask: Ask, parallel: int, slow_after: float) -> None:
        self._lookups = lookups
        self._ask = ask
        self._parallel = parallel
        self._slow_after = slow_after
        self._loop = asyncio.get_running_loop()
        self._client: set[asyncio.Task[None]] = set()
        self._ended = asyncio.Event()

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            self._group = group
            self._advance()
            await self._ended.wait()
            for call in self._client:
                call.cancel()

    def _advance(self) -> None:
        """Sends what is due now; sets the event when nothing is left to do."""
        if self._ended.is_set():
            return
        asked: dict[PeerID, tuple[Contact, list[Lookup]]] = {}
        for lookup in self._lookups:
            for contact in lookup.due(self._parallel):
                asked.setdefault(contact.peer_id, (contact, []))[1].append(lookup)
        if all(lookup.finished for lookup in self._lookups):
            self._ended.set()
            return
        for contact, reasons in asked.values():
            self._send(contact, reasons)

    def _send(self, contact: Contact, reasons: list[Lookup]) -> None:
        known = set(map(id, reasons))
        sharing = [lookup for lookup in self._lookups if id(lookup) not in known and lookup.wants(contact.peer_id)]
        everyone = reasons + sharing
        for lookup in everyone:
            lookup.asking(contact.peer_id)
        call = self._group.create_task(self._call(contact, everyone))
        self._client.add(call)
        call.add_done_callback(self._client.discard)

    async def _call(self, contact: Contact, lookups: Sequence[Lookup]) -> None:
        patience = self._loop.call_later(self._slow_after, self._grow_impatient, contact.peer_id, lookups)
        try:
            found = list(await self._ask(contact, lookups))
        except (NetworkError, DHTError):
            for lookup in lookups:
                lookup.failed(contact.peer_id)
        else:
            for lookup in lookups:
                lookup.answered(contact.peer_id)
                lookup.offer(found)
        finally:
            patience.cancel()
        self._advance()

    def _grow_impatient(self, peer: PeerID, lookups: Sequence[Lookup]) -> None:
        for lookup in lookups:
            lookup.slow(peer)
        self._advance()


async def gather_answers(
    questions: Sequence[Coroutine[Any, Any, T]], failures: tuple[type[Exception], ...]
) -> list[T | None]:
    """Awaits all side by side; None for those that ended with one of the expected failures."""

    async def ask(question: Coroutine[Any, Any, T]) -> T | None:
        try:
            return await question
        except failures:
            return None

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(ask(question)) for question in questions]
    return [task.result() for task in tasks]
