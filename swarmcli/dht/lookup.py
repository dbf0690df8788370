"""Iterative searches for the nodes nearest to an id (Kademlia, section 2.3).

`Lookup` is one search, a state machine without I/O. `traverse` drives several at once, so that one message to a peer
serves all that want to ask it.
"""

from __future__ import annotations

import asyncio
from bisect import insort
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import islice
from typing import Any, Literal, TypeAlias, TypeVar

from swarmcli.dht.routing import Contact, of_own_network, spread
from swarmcli.errors import CallRefused, DHTError, NetworkError, RemoteError, UnknownMethod
from swarmcli.network.identity import PeerID
from swarmcli.network.prefix import Prefix
from swarmcli.recent import Recent


@dataclass(frozen=True, slots=True)
class LookupBounds:
    """How far liars can lead a search."""

    credit: int = 4  # contacts on one peer's word that a search asks before any of them has answered …
    least_credit: int = 1  # … and on the word of one whose contacts were not there …
    most_credit: int = 8  # … and at a time, when those before have answered
    halved_after: float = 60.0  # seconds: after a crash of many nodes honest ones too name the dead for a while
    remembered: int = 1024  # peers that have named the dead
    asked: int = 160  # nodes, in one search: liars may invent ever nearer ones …
    asked_on_path: int = 40  # … and in one path of it
    path_ends: int = 3  # nearest candidates of a path that have to have answered before the paths are put together


class Hearsay:
    """Debts of those who named contacts that did not answer, over all searches of a node. Times are the loop's."""

    def __init__(self, bounds: LookupBounds = LookupBounds()) -> None:
        self.bounds = bounds
        self._debts: Recent[PeerID, tuple[float, float]] = Recent(bounds.remembered)  # how many, as of when
        self._now = 0.0

    def missed(self, namers: Iterable[PeerID | None], now: float) -> None:
        """A contact that these have named is not there. None: this node itself knew it."""
        self._now = now
        for namer in namers:
            if namer is not None:
                self._debts[namer] = self._debt(namer) + 1, now

    def credit(self, namer: PeerID) -> int:
        """How many of its contacts a search asks before any of them has answered."""
        return max(self.bounds.least_credit, self.bounds.credit - int(self._debt(namer)))

    def at(self, now: float) -> Hearsay:
        """As of now: debts are forgotten in time."""
        self._now = now
        return self

    def _debt(self, namer: PeerID) -> float:
        debt, since = self._debts.get(namer, (0.0, self._now))
        return debt * 0.5 ** ((self._now - since) / self.bounds.halved_after)


class Asked(Enum):
    """How far the search is with one candidate."""

    NOT_YET = 0
    WAITING = 1  # asked, no answer so far
    SLOW = 2  # asked, and others are asked in its stead; its answer still counts
    ANSWERED = 3
    FAILED = 4


@dataclass(slots=True, eq=False)
class _LookupCandidate:
    contact: Contact
    path: int
    namer: PeerID | None  # who has named it; None: this node itself knows it
    asked: Asked = Asked.NOT_YET
    prefix: Prefix | Literal["unknown"] | None = "unknown"


class Lookup:
    """Finds the `width` nearest nodes that answer, no two of them in one network prefix as long as there are others.

    With several `paths` (S/Kademlia, section 4.4) it begins as that many searches, of which each asks only nodes that
    its own answers have named, so that a liar leads astray one path. Their ends are then put together: every candidate
    nearer than the last of the result has been asked. Whoever names contacts that do not answer loses its credit: what
    else it has named is left out, unless somebody else names it too.
    """

    def __init__(
        self,
        target: int,
        width: int,
        *,
        paths: int = 1,
        prefix: Callable[[Contact], Prefix | None] = of_own_network,
        hearsay: Hearsay | None = None,
    ) -> None:
        self.target = target
        self.width = width
        self.finished = False  # set from outside when enough is known, and reset when one that answered has failed
        self.asked = 0
        self._paths = paths  # 1 as soon as they are put together
        self._prefix = prefix
        self._hearsay = hearsay or Hearsay()
        self._bounds = self._hearsay.bounds
        self._order: list[tuple[int, PeerID]] = []  # (distance, peer), nearest first
        self._found: dict[PeerID, _LookupCandidate] = {}
        self._credit: dict[PeerID, int] = {}
        self._asked_on = [0] * paths

    def offer(self, contacts: Iterable[Contact], namer: PeerID | None = None) -> None:
        """More candidates, from an answer of `namer` or (None) from what this node knows itself. Known ones stay with
        the path and the namer that they came from, unless that one has lost its credit."""
        source = self._found.get(namer) if namer is not None else None
        for contact in contacts:
            peer = contact.peer_id
            known = self._found.get(peer)
            if known is None:
                path = source.path if source is not None else len(self._found) % len(self._asked_on)
                self._found[peer] = _LookupCandidate(contact, path, namer)
                insort(self._order, (contact.node ^ self.target, peer))
            elif known.asked is Asked.NOT_YET and known.namer not in (None, namer) and not self._has_credit(known):
                known.namer, known.contact, known.prefix = namer, contact, "unknown"

    def due(self, parallel: int) -> list[Contact]:
        """The contacts to ask now, so that at most `parallel` answers are waited for; updates `finished`."""
        if self.finished:
            return []
        if self._paths > 1:
            due = self._due_on_paths(max(1, parallel // self._paths))
            if due or any(self._found[peer].asked is Asked.WAITING for _, peer in self._order):
                return due
            self._paths = 1
        window = self._window()
        waiting = sum(each.asked is Asked.WAITING for each in window)
        may_ask = self.asked < self._bounds.asked
        fresh = [each.contact for each in window if may_ask and each.asked is Asked.NOT_YET]
        answered = sum(each.asked is Asked.ANSWERED for each in window)
        slow = any(each.asked is Asked.SLOW for each in self._found.values())
        if not fresh and not waiting and (answered >= self.width or not slow):
            self.finished = True
        return fresh[: max(0, parallel - waiting)]

    def wants(self, peer: PeerID) -> bool:
        """Whether this peer is to be asked anyway as things stand: then this lookup may share another one's message."""
        if self.finished or self.asked >= self._bounds.asked:
            return False
        known = self._found.get(peer)
        if known is None or known.asked is not Asked.NOT_YET:
            return False
        return known in (self._window() if self._paths == 1 else self._path_window(known.path))

    def asking(self, peer: PeerID) -> None:
        """The question is on its way."""
        known = self._found[peer]
        self.asked += 1
        self._asked_on[known.path] += 1
        known.asked = Asked.WAITING
        self._credited(known, -1)

    def slow(self, peer: PeerID) -> None:
        if (known := self._found.get(peer)) is not None and known.asked is Asked.WAITING:
            known.asked = Asked.SLOW

    def answered(self, peer: PeerID) -> None:
        known = self._found[peer]
        self._credited(known, 2)
        known.asked, known.prefix = Asked.ANSWERED, "unknown"  # now it is connected, and seen where it is

    def failed(self, peer: PeerID, *, exists: bool = False) -> None:
        """No answer; `exists`: a refusal, which shows that whoever named this peer has not invented it."""
        known = self._found[peer]
        if exists and known.asked in (Asked.WAITING, Asked.SLOW):
            self._credited(known, 1)
        known.asked = Asked.FAILED

    def namer(self, peer: PeerID) -> PeerID | None:
        return self._found[peer].namer

    def nearest(self) -> list[Contact]:
        """The nearest that answered, at most `width`, nearest first."""
        answered = (each for each in self._by_distance() if each.asked is Asked.ANSWERED)
        return [each.contact for each in spread(answered, self.width, self._prefix_of)]

    def _window(self) -> list[_LookupCandidate]:
        """The candidates that may still turn out to be the result. Slow ones do not take a place."""
        return spread((each for each in self._by_distance() if self._counts(each)), self.width, self._prefix_of)

    def _due_on_paths(self, parallel: int) -> list[Contact]:
        due: list[Contact] = []
        for path in range(self._paths):
            window = self._path_window(path)
            waiting = sum(each.asked is Asked.WAITING for each in window)
            fresh = [each.contact for each in window if each.asked is Asked.NOT_YET]
            if self._asked_on[path] < self._bounds.asked_on_path:
                due += fresh[: max(0, parallel - waiting)]
        return due

    def _path_window(self, path: int) -> list[_LookupCandidate]:
        on_path = (each for each in self._by_distance() if each.path == path and self._counts(each))
        return list(islice(on_path, self._bounds.path_ends))

    def _by_distance(self) -> Iterator[_LookupCandidate]:
        return (self._found[peer] for _, peer in self._order)

    def _counts(self, each: _LookupCandidate) -> bool:
        if each.asked is Asked.NOT_YET:
            return self._has_credit(each)
        return each.asked is Asked.WAITING or each.asked is Asked.ANSWERED

    def _has_credit(self, each: _LookupCandidate) -> bool:
        return each.namer is None or self._credit_of(each.namer) > 0

    def _credit_of(self, namer: PeerID) -> int:
        return self._credit.setdefault(namer, self._hearsay.credit(namer))

    def _credited(self, each: _LookupCandidate, change: int) -> None:
        if each.namer is not None:
            self._credit[each.namer] = min(self._bounds.most_credit, self._credit_of(each.namer) + change)

    def _prefix_of(self, each: _LookupCandidate) -> Prefix | None:
        if each.prefix == "unknown":
            each.prefix = self._prefix(each.contact)
        return each.prefix


T = TypeVar("T")

# Only a peer that is there can have caused these.
_ANSWERS = (CallRefused, RemoteError, UnknownMethod, DHTError)

Ask: TypeAlias = Callable[[Contact, Sequence[Lookup]], Awaitable[Iterable[Contact]]]


async def traverse(
    lookups: Sequence[Lookup], ask: Ask, *, parallel: int, slow_after: float, hearsay: Hearsay | None = None
) -> None:
    """Runs the lookups to their ends.

    `ask` sends one message for the named lookups and returns the contacts from the answer. A NetworkError or
    DHTError from it counts as no answer; `hearsay` is told who had named a contact that is not there. When a node
    takes longer than `slow_after` seconds, another one is asked beside it. Calls that are still under way when all
    lookups have ended are cancelled.
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
        except (NetworkError, DHTError) as error:
            exists = isinstance(error, _ANSWERS)
            for lookup in asking:
                lookup.failed(contact.peer_id, exists=exists)
            if hearsay is not None and not exists:
                hearsay.missed({lookup.namer(contact.peer_id) for lookup in asking}, loop.time())
        else:
            for lookup in asking:
                lookup.answered(contact.peer_id)
                lookup.offer(found, contact.peer_id)
        finally:
            impatience.cancel()
        advance()

    def overdue(peer: PeerID, asking: Sequence[Lookup]) -> None:
        for lookup in asking:
            lookup.slow(peer)
        advance()

    async with asyncio.TaskGroup() as group:
        advance()
        try:
            await ended.wait()
        finally:
            ended.set()  # also if it is cancelled: a call that is overdue in the same moment has nobody asked beside it
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
