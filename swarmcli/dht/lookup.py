"""Iterative searches for the nodes nearest to an id (Kademlia, section 2.3).

`Lookup` is one search, a state machine without I/O. `traverse` drives several at once, so that one message to a peer
serves all that want to ask it.
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
        self.width = width
        self.finished = False  # set from outside when enough is known, and reset when one that answered has failed
        self._order: list[tuple[int, PeerID]] = []  # (distance, peer), nearest first
        self._contacts: dict[PeerID, Contact] = {}
        self._asked: dict[PeerID, Asked] = {}
        self._left = _MOST_ASKED

    def offer(self, contacts: Iterable[Contact]) -> None:
        """More candidates, for example from an answer. Known ones are ignored."""
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
        slow = Asked.SLOW in self._asked.values()
        if not fresh and not waiting and (answered >= self.width or not slow):
            self.finished = True
        return fresh[: max(0, parallel - waiting)]

    def wants(self, peer: PeerID) -> bool:
        """Whether this peer is to be asked anyway as things stand: then this lookup may share another one's message."""
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


T = TypeVar("T")

Ask: TypeAlias = Callable[[Contact, Sequence[Lookup]], Awaitable[Iterable[Contact]]]


async def traverse(lookups: Sequence[Lookup], ask: Ask, *, parallel: int, slow_after: float) -> None:
    """Runs the lookups to their ends.

    `ask` sends one message for the named lookups and returns the contacts from the answer. A NetworkError or
    DHTError from it counts as no answer. When a node takes longer than `slow_after` seconds, another one is asked
    beside it. Calls that are still under way when all lookups have ended are cancelled.
    """
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()
    calls: set[asyncio.Task[None]] = set()

    def advance() -> None:
        """Sends what is due now; sets the event when nothing is left to do."""
        if ended.is_set():
            return
        asked: dict[PeerID, tuple[Contact, list[Lookup]]] = {}
        for lookup in lookups:
            for contact in lookup.due(parallel):
                asked.setdefault(contact.peer_id, (contact, []))[1].append(lookup)
        if all(lookup.finished for lookup in lookups):
            ended.set()
            return
        for contact, asking in asked.values():
            due = set(map(id, asking))
            asking += [each for each in lookups if id(each) not in due and each.wants(contact.peer_id)]
            for lookup in asking:
                lookup.asking(contact.peer_id)
            task = group.create_task(call(contact, asking))
            calls.add(task)
            task.add_done_callback(calls.discard)

    async def call(contact: Contact, asking: Sequence[Lookup]) -> None:
        impatience = loop.call_later(slow_after, overdue, contact.peer_id, asking)
        try:
            found = list(await ask(contact, asking))
        except (NetworkError, DHTError):
            for lookup in asking:
                lookup.failed(contact.peer_id)
        else:
            for lookup in asking:
                lookup.answered(contact.peer_id)
                lookup.offer(found)
        finally:
            impatience.cancel()
        advance()

    def overdue(peer: PeerID, asking: Sequence[Lookup]) -> None:
        for lookup in asking:
            lookup.slow(peer)
        advance()

    async with asyncio.TaskGroup() as group:
        advance()
        await ended.wait()
        for task in calls:
            task.cancel()


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
