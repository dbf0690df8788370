"""Drives several lookups at once, so that one message to a peer serves all that want to ask it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from typing import Any, TypeAlias, TypeVar

from swarmcli.dht.lookup import Lookup
from swarmcli.dht.routing import Contact
from swarmcli.errors import DHTError, NetworkError
from swarmcli.network.identity import PeerID

T = TypeVar("T")

Ask: TypeAlias = Callable[[Contact, Sequence[Lookup]], Awaitable[Iterable[Contact]]]


async def traverse(lookups: Sequence[Lookup], ask: Ask, *, parallel: int, slow_after: float) -> None:
    """Runs the lookups to their ends.

    `ask` sends one message for the named lookups and returns the contacts from the answer. A NetworkError or
    DHTError from it counts as no answer. Whoever takes longer than `slow_after` seconds is waited for no more than
    others: somebody else is asked too. Calls that are still under way when all lookups have ended are cancelled.
    """
    await _Traversal(lookups, ask, parallel, slow_after).run()


class _Traversal:
    def __init__(self, lookups: Sequence[Lookup], ask: Ask, parallel: int, slow_after: float) -> None:
        self._lookups = lookups
        self._ask = ask
        self._parallel = parallel
        self._slow_after = slow_after
        self._loop = asyncio.get_running_loop()
        self._calls: set[asyncio.Task[None]] = set()
        self._ended = asyncio.Event()

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            self._group = group
            self._advance()
            await self._ended.wait()
            for call in self._calls:
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
        self._calls.add(call)
        call.add_done_callback(self._calls.discard)

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
