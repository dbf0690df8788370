"""The other members of a group: calls to them, whether they are there, and whether they have begun the round.

A member may still be computing when the others begin: it answers questions at once, and the others wait for it. They do
not wait for a member whose connection has ended, that has left, or that knows nothing of the round.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

from swarmcli.averaging.consensus.messages import PresenceAnswer, PresenceQuestion
from swarmcli.averaging.group import Dialable, Group, meeting
from swarmcli.errors import NetworkError
from swarmcli.network import Endpoint, PeerID
from swarmcli.network.loop_thread import loop_time

A = TypeVar("A")


@dataclass(frozen=True, slots=True)
class ConsensusOptions:
    """How long members wait for each other until the outcome of a round is known. Times in seconds; `…trips` are round
    trips on top, of the slowest that is known."""

    at_once: float = 10.0  # for an answer that needs no waiting
    trips: float = 4.0  # on top of pauses between ballots and for stragglers: another one's ballot may end meanwhile

    # Whether a member is there
    alive: float = 3.0  # for a member to say that it is there
    alive_trips: float = 10.0
    questions: tuple[float, ...] = (1.0, 1.0, 2.0, 4.0, 8.0)  # between two questions; the last one repeats
    look_again: float = 0.25  # while there is no connection
    connecting: float = 5.0  # that a connection may still be on its way when the round begins
    most_unknown: int = 2  # answers in a row after which a member that knows of no round will not learn of it
    to_meet: float = 5.0  # for connections to all voters; those for the exchange are made in the same time

    # Comparing certificates
    compare: float = 2.0  # for all others to answer: the bound that docs/security.md states
    compare_trips: float = 4.0
    most_compare_trips: float = 2.0  # seconds of these at most: a peer's answers to pings are its own

    # One ballot
    for_all: float = 1.0  # for the last voters at ballot zero at most …
    for_all_share: float = 0.1  # … or this part of the time that the first ones took
    stragglers: float = 10.0  # for a connected member that still receives averages, once a majority has promised
    unreached: float = 1.0  # the same for members without a connection
    look: float = 1.0  # between two looks whether the awaited members still take part
    haste: float = 0.05  # for stragglers where the round is past its deadline
    refuses: float = 0.5  # in which a dialed port refuses; one that is cut off or frozen says nothing

    # Ballot after ballot
    first_pause: float = 0.25  # between two ballots of one proposer, doubled each time …
    longest_pause: float = 4.0  # … up to this
    search: float = 30.0  # that a member without a quorum goes on looking for one …
    search_deserted: float = 3.0  # … or, if so many are plainly gone that there is none, since its trouble began
    # … and so much for each hostile leader that may take its turn for nothing. In a guarded group the time counts from
    # the first leader that was lost, so that members do not search one after the other.
    per_liar: float = 8.0
    longest_search: float = 120.0  # for all ballots of a member that finds a quorum, but comes to no result with it

    # Leaders
    relays: int = 3  # that may be lost on the way to one leader, before this member follows another one
    looks: tuple[float, ...] = (2.0, 2.0, 2.0, 2.5, 4.0, 8.0)  # between two looks at the leader; the last one repeats
    turn: float = 6.0  # that a leader may be silent while a quorum waits for it …
    ballot: float = 13.0  # … longer by this after each message of a ballot: others may hold it up for so long …
    longest_turn: float = 30.0  # … and this in all
    turn_trips: float = 10.0
    grace: float = 10.0  # to agree on giving up once the deadline has passed: at most, and not more than the deadline
    grace_trips: float = 10.0


class GroupCalls:
    """Calls between the members of one group, by their indices."""

    def __init__(
        self,
        endpoint: Endpoint,
        method: Callable[[str], str],
        group: Group,
        options: ConsensusOptions = ConsensusOptions(),
    ) -> None:
        """`method` gives the full name of a method on the wire. Raises KeyError if this peer is not in the group."""
        self.group, self.endpoint, self.method, self.options = group, endpoint, method, options
        self.me = group.index_of(endpoint.peer_id)

    def __len__(self) -> int:
        return len(self.group)

    @property
    def others(self) -> Iterator[int]:
        return (index for index in range(len(self.group)) if index != self.me)

    @cached_property
    def ranks(self) -> dict[int, int]:
        """Member → its rank among those that may lead, the leader first: members that can be dialed directly come
        before those at relays, and members that cannot be dialed last."""
        members = self.group.members
        order = sorted(range(len(members)), key=lambda index: (index != 0, -members[index].dialable, index))
        return {index: rank for rank, index in enumerate(order)}

    @property
    def auxiliary(self) -> bool:
        """Whether this member is an auxiliary."""
        return self.group.members[self.me].auxiliary

    def peer(self, index: int) -> PeerID:
        return self.group.members[index].peer_id

    def over_relay(self, index: int) -> bool:
        """Whether a relay carries the messages between the two: if the relay is lost, both may still live."""
        members = self.group.members
        return meeting(members[self.me], members[index]) == Dialable.OVER_RELAY

    def is_connected(self, index: int) -> bool:
        return self.endpoint.is_connected(self.peer(index))

    async def ask(self, index: int, name: str, request: Any, answer_type: type[A], timeout: float = 1e7) -> A:
        """Raises NetworkError. The usual timeout (seconds) is no bound: the call ends with its connection, or with a
        deadline around it."""
        return await self.endpoint.call(self.peer(index), self.method(name), request, answer_type, timeout=timeout)

    async def presence(self, index: int, asks: int = 2) -> PresenceAnswer | None:
        """A member's word about itself, within a few seconds; None if it cannot be reached."""
        patience = self.options.alive + self.options.alive_trips * self.slowest_round_trip
        question = PresenceQuestion(self.group.group_id)
        try:
            return await self.ask(index, "presence", question, PresenceAnswer, patience)
        except NetworkError:
            # Two members that dial each other at the same moment keep one connection, and the question may have gone
            # over the other.
            return await self.presence(index, asks - 1) if asks > 1 and self.is_connected(index) else None

    @property
    def slowest_round_trip(self) -> float:
        """Seconds of the slowest known one."""
        known = (self.endpoint.round_trip(self.peer(index)) for index in self.others)
        return max((seconds for seconds in known if seconds is not None), default=0.0)


class Attendance:
    """Watches the members that have not begun."""

    def __init__(self, mates: GroupCalls, patience: float) -> None:
        """`patience`: seconds for a member that answers to begin."""
        self.strangers: set[int] = set()  # members that have left, or know nothing of the round
        self.begun = {index: asyncio.Event() for index in mates.others}  # to be set from outside
        self._mates, self._patience = mates, patience

    async def run(self, lost: Callable[[int, str], None]) -> None:
        """Ends when every other member has begun or is lost; `lost` hears once of each that nobody need wait for."""
        async with asyncio.TaskGroup() as tasks:
            for member in self.begun:
                tasks.create_task(self._watch(member, lost))

    async def _watch(self, member: int, lost: Callable[[int, str], None]) -> None:
        try:
            async with asyncio.timeout(self._patience):
                reason = await self._until_begun(member)
        except TimeoutError:
            reason = "it did not begin in time"
        if reason:
            lost(member, reason)

    async def _until_begun(self, member: int) -> str:
        """Returns "", or why it will not begin."""
        unknown, asked, gone, options = 0, 0, "", self._mates.options
        connecting, connected = loop_time() + options.connecting, False
        while not self.begun[member].is_set():
            connected = connected or self._mates.is_connected(member)
            pause = options.questions[min(asked, len(options.questions) - 1)] if connected else options.look_again
            gone = await self._wait(member, pause) or gone
            if self.begun[member].is_set():
                break
            if not connected and self._mates.is_connected(member):
                continue
            answer = await self._mates.presence(member)
            standing = "" if answer is None else answer.standing
            asked += connected
            if standing == "over":
                self.strangers.add(member)
                return "it has left"
            if standing == "" and (connected or loop_time() > connecting):
                return f"it was gone before it began: {gone or 'no connection to it'}"
            unknown = unknown + 1 if standing == "unknown" else 0
            if unknown == options.most_unknown:
                self.strangers.add(member)
                return "it knows nothing of the round"
        return ""

    async def _wait(self, member: int, seconds: float) -> str:
        """Waits until it has begun, or its connection has ended (returns why), or the time has passed."""
        lost = self._mates.endpoint.lost(self._mates.peer(member))
        never = lost.done()  # there was no connection to lose
        async with asyncio.TaskGroup() as tasks:
            begins = tasks.create_task(self.begun[member].wait())
            either: list[asyncio.Future[Any]] = [begins] if never else [begins, lost]
            await asyncio.wait(either, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
            reason = lost.result() if lost.done() and not never else ""
            begins.cancel()
            lost.cancel()
        return reason
