"""Searches for the nodes nearest to an id (Kademlia, section 2.3), on disjoint paths (S/Kademlia, section 4.4)."""

from __future__ import annotations

import asyncio
from bisect import insort
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from itertools import islice
from typing import Any, Literal, TypeAlias, TypeVar

from swarmcli.dht.routing import Contact, of_own_network, spread
from swarmcli.errors import CallRefused, DHTError, NetworkError, RemoteError, UnknownMethod
from swarmcli.network.identity import PeerID
from swarmcli.network.prefix import Prefix

# How far liars can lead a search.
MOST_ASKED = 160  # nodes: liars may invent ever nearer ones …
MOST_ON_PATH = 40  # … and in one path of it
PATH_ENDS = 3  # nearest candidates of a path that have to have answered before the paths are put together
# Contacts named by one peer: so many more may fail than answer, because tables hold dead ones for a while. Beyond it,
# those that only this peer has named are not asked any more.
MOST_MISSED = 3

Ask: TypeAlias = Callable[[Contact], Awaitable[Iterable[Contact]]]
T = TypeVar("T")

# Only a peer that exists can have caused these.
_ANSWERS = (CallRefused, RemoteError, UnknownMethod, DHTError)


class Asked(Enum):
    """How far the search is with one candidate."""

    NOT_YET = 0
    WAITING = 1  # asked, no answer so far
    SLOW = 2  # asked, and others are asked in its stead; its answer still counts
    ANSWERED = 3
    FAILED = 4


@dataclass(slots=True, eq=False)
class _Candidate:
    contact: Contact
    path: int
    namers: set[PeerID | None] = field(default_factory=set)  # who has named it; None: this node itself knows it
    asked: Asked = Asked.NOT_YET
    prefix: Prefix | Literal["unknown"] | None = "unknown"


async def search(
    target: int,
    known: Iterable[Contact],
    ask: Ask,
    *,
    width: int,
    own: Contact | None = None,
    paths: int = 1,
    parallel: int,
    slow_after: float,
    prefix: Callable[[Contact], Prefix | None] = of_own_network,
    enough: Callable[[], bool] = lambda: False,
) -> list[Contact]:
    """The `width` nodes nearest to the target that answer, nearest first; no two of them in one network as long as
    there are others. Fewer if `enough` says so after an answer.

    It begins with the contacts that are `known`; `own`, this node, counts as one that has answered. With several
    `paths` it begins as that many searches. They share out the known contacts, and each asks only nodes that its own
    answers have named, so a liar misleads one path. Then the paths are put together: at the end every candidate nearer
    than the last of the result has been asked.

    A NetworkError or DHTError from `ask` counts as no answer. When a node takes longer than `slow_after` seconds,
    another one is asked beside it. Calls that are still under way at the end are cancelled.
    """
    found = _Search(target, width, paths, parallel, prefix)
    if own is not None:
        found.offer([own])
        found.candidates[own.peer_id].asked = Asked.ANSWERED
    found.offer(known)
    loop, ended = asyncio.get_running_loop(), asyncio.Event()

    def advance() -> None:
        """Sends what is due now; sets the event when nothing is left to do."""
        if ended.is_set():
            return
        if enough() or (due := found.due()) is None:
            ended.set()
            return
        for each in due:
            found.asking(each)
            calls.append(group.create_task(call(each)))

    async def call(each: _Candidate) -> None:
        impatience = loop.call_later(slow_after, overdue, each)
        try:
            named = list(await ask(each.contact))
        except (NetworkError, DHTError) as error:
            found.failed(each, exists=isinstance(error, _ANSWERS))
        else:
            found.answered(each)
            found.offer(named, each)
        finally:
            impatience.cancel()
        advance()

    def overdue(each: _Candidate) -> None:
        each.asked = Asked.SLOW
        advance()

    calls: list[asyncio.Task[None]] = []
    async with asyncio.TaskGroup() as group:
        advance()
        try:
            await ended.wait()
        finally:
            ended.set()  # on cancellation too: a call that is overdue in the same moment must not start another
            for task in calls:
                task.cancel()
    return found.nearest()


class _Search:
    """One search: it knows what it has heard, and whom it asks next; without I/O."""

    def __init__(
        self, target: int, width: int, paths: int, parallel: int, prefix: Callable[[Contact], Prefix | None]
    ) -> None:
        self.candidates: dict[PeerID, _Candidate] = {}
        self._target, self._width, self._parallel, self._prefix = target, width, parallel, prefix
        self._paths = paths  # 1 as soon as they are put together
        self._order: list[tuple[int, PeerID]] = []  # (distance, peer), nearest first
        self._missed: Counter[PeerID | None] = Counter()  # namer → contacts without an answer, less those with one
        self._asked_on = [0] * paths

    def offer(self, contacts: Iterable[Contact], namer: _Candidate | None = None) -> None:
        """More candidates, from an answer of `namer` or (None) from what this node knows itself. Known ones stay with
        the path that they came from."""
        name = None if namer is None else namer.contact.peer_id
        for contact in contacts:
            peer = contact.peer_id
            known = self.candidates.get(peer)
            if known is None:
                path = namer.path if namer is not None else len(self.candidates) % len(self._asked_on)
                known = self.candidates[peer] = _Candidate(contact, path)
                insort(self._order, (contact.node ^ self._target, peer))
            elif known.asked is Asked.NOT_YET and not self._is_believed(known):
                known.contact, known.prefix = contact, "unknown"
            if known.asked is Asked.NOT_YET:
                known.namers.add(name)

    def due(self) -> list[_Candidate] | None:
        """Returns whom to ask now. None: the search is at its end."""
        if self._paths > 1:
            due = [each for path in range(self._paths) for each in self._due_on(path)]
            if due or any(each.asked is Asked.WAITING for each in self.candidates.values()):
                return due
            self._paths = 1
        window = spread((each for each in self._by_distance() if self._counts(each)), self._width, self._prefix_of)
        waiting = sum(each.asked is Asked.WAITING for each in window)
        may_ask = sum(self._asked_on) < MOST_ASKED
        fresh = [each for each in window if may_ask and each.asked is Asked.NOT_YET]
        if not fresh and not waiting:
            slow = any(each.asked is Asked.SLOW for each in self.candidates.values())
            if not slow or sum(each.asked is Asked.ANSWERED for each in window) >= self._width:
                return None
        return fresh[: max(0, self._parallel - waiting)]

    def _due_on(self, path: int) -> list[_Candidate]:
        on_path = (each for each in self._by_distance() if each.path == path and self._counts(each))
        window = list(islice(on_path, PATH_ENDS))
        waiting = sum(each.asked is Asked.WAITING for each in window)
        if self._asked_on[path] >= MOST_ON_PATH:
            return []
        fresh = [each for each in window if each.asked is Asked.NOT_YET]
        return fresh[: max(0, max(1, self._parallel // self._paths) - waiting)]

    def asking(self, each: _Candidate) -> None:
        """The question is sent. Until an answer comes, it counts against the candidate's namers."""
        self._asked_on[each.path] += 1
        each.asked = Asked.WAITING
        self._missed.update(each.namers)

    def answered(self, each: _Candidate) -> None:
        each.asked, each.prefix = Asked.ANSWERED, "unknown"  # now it is connected, and seen where it is
        self._missed.subtract((*each.namers, *each.namers))  # once to undo `asking`, once for a contact that exists

    def failed(self, each: _Candidate, *, exists: bool) -> None:
        """No answer; `exists`: a refusal, which shows that whoever named this peer has not invented it."""
        each.asked = Asked.FAILED
        if exists:
            self._missed.subtract(each.namers)

    def nearest(self) -> list[Contact]:
        answered = (each for each in self._by_distance() if each.asked is Asked.ANSWERED)
        return [each.contact for each in spread(answered, self._width, self._prefix_of)]

    def _by_distance(self) -> Iterator[_Candidate]:
        return (self.candidates[peer] for _, peer in self._order)

    def _counts(self, each: _Candidate) -> bool:
        """Whether it may still belong to the result. A slow one takes no place in the window."""
        if each.asked is Asked.NOT_YET:
            return self._is_believed(each)
        return each.asked is Asked.WAITING or each.asked is Asked.ANSWERED

    def _is_believed(self, each: _Candidate) -> bool:
        return any(namer is None or self._missed[namer] <= MOST_MISSED for namer in each.namers)

    def _prefix_of(self, each: _Candidate) -> Prefix | None:
        if each.prefix == "unknown":
            each.prefix = self._prefix(each.contact)
        return each.prefix


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
