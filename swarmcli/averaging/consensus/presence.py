"""The other members of a group: how to talk to them, who of them is there, and who has begun the round.

A member may still be computing when the others begin: it answers at once when it is asked, and is waited for. One
whose connection has ended, that has left, or that knows nothing of the round, is not.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from functools import cached_property
from typing import Any, TypeVar

from swarmcli.averaging.consensus.messages import PresenceAnswer, PresenceQuestion
from swarmcli.averaging.group import Dialable, Group, meeting
from swarmcli.errors import NetworkError
from swarmcli.network import Endpoint, PeerID

A = TypeVar("A")

UNBOUNDED = 1e7  # seconds, for a call that ends with its connection or with a deadline around it
AT_ONCE = 10.0  # seconds for what is answered at once

_LOOKS_ALIVE = 3.0  # seconds for a member to say that it is there, and so many round trips on top:
_ALIVE_TRIPS = 10.0
PAUSES = (1.0, 1.0, 2.0, 4.0, 8.0)  # seconds between two questions; the last one repeats
_LOOK_AGAIN = 0.25  # seconds, while there is no connection
_CONNECTING = 5.0  # seconds that a connection may still be on its way when the round begins
_DOUBTS = 2  # answers in a row after which a member that does not know of the round will not come to know of it


class Mates:
    """Calls between the members of one group, by their indices."""

    def __init__(self, endpoint: Endpoint, method: Callable[[str], str], group: Group) -> None:
        """`method` gives the full name of a method on the wire. Raises KeyError if this peer is not in the group."""
        self.group, self.endpoint, self.method = group, endpoint, method
        self.me = group.index_of(endpoint.peer_id)

    def __len__(self) -> int:
        return len(self.group)

    @property
    def others(self) -> Iterator[int]:
        return (index for index in range(len(self.group)) if index != self.me)

    @cached_property
    def ranks(self) -> dict[int, int]:
        """Member → its rank among those that may lead, the leader first: whoever can be dialed directly comes before
        those at relays, and whoever cannot be dialed last."""
        members = self.group.members
        order = sorted(range(len(members)), key=lambda index: (index != 0, -members[index].dialable, index))
        return {index: rank for rank, index in enumerate(order)}

    @property
    def auxiliary(self) -> bool:
        """Whether this member is one."""
        return self.group.members[self.me].auxiliary

    def peer(self, index: int) -> PeerID:
        return self.group.members[index].peer_id

    def over_relay(self, index: int) -> bool:
        """Whether a third peer carries what is said between the two: when that is lost, neither of them need be."""
        members = self.group.members
        return meeting(members[self.me], members[index]) == Dialable.OVER_RELAY

    def is_connected(self, index: int) -> bool:
        return self.endpoint.is_connected(self.peer(index))

    async def ask(self, index: int, name: str, request: Any, answer_type: type[A], timeout: float = UNBOUNDED) -> A:
        """Raises NetworkError; with the usual timeout only when the connection has ended or there is none."""
        return await self.endpoint.call(self.peer(index), self.method(name), request, answer_type, timeout=timeout)

    async def presence(self, index: int, asks: int = 2) -> PresenceAnswer | None:
        """What a member says of itself, within a few seconds; None if it cannot be reached."""
        patience = _LOOKS_ALIVE + _ALIVE_TRIPS * self.slowest_round_trip
        question = PresenceQuestion(self.group.group_id)
        try:
            return await self.ask(index, "presence", question, PresenceAnswer, patience)
        except NetworkError:
            # Two that dial each other at the same moment keep one connection, and this may have gone over the other.
            return await self.presence(index, asks - 1) if asks > 1 and self.is_connected(index) else None

    @property
    def slowest_round_trip(self) -> float:
        """Seconds, of those that are known."""
        known = (self.endpoint.round_trip(self.peer(index)) for index in self.others)
        return max((seconds for seconds in known if seconds is not None), default=0.0)


class Attendance:
    """Watches the members that have not begun."""

    def __init__(self, mates: Mates, patience: float) -> None:
        """`patience`: seconds for a member that answers to begin."""
        self.strangers: set[int] = set()  # members that have left, or know nothing of the round
        self.begun = {index: asyncio.Event() for index in mates.others}  # to be set from outside
        self._mates, self._patience = mates, patience

    async def run(self, lost: Callable[[int, str], None]) -> None:
        """Ends when every other member has begun or is lost; `lost` hears of each that need not be waited for, once."""
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
        doubts, asked, gone, loop = 0, 0, "", asyncio.get_running_loop()
        connecting, connected = loop.time() + _CONNECTING, False
        while not self.begun[member].is_set():
            connected = connected or self._mates.is_connected(member)
            pause = PAUSES[min(asked, len(PAUSES) - 1)] if connected else _LOOK_AGAIN
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
            if standing == "" and (connected or loop.time() > connecting):
                return f"it was gone before it began: {gone or 'no connection to it'}"
            doubts = doubts + 1 if standing == "unknown" else 0
            if doubts == _DOUBTS:
                self.strangers.add(member)
                return "it knows nothing of the round"
        return ""

    async def _wait(self, member: int, seconds: float) -> str:
        """Until it has begun, or its connection has ended (returns why), or the time has passed."""
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
