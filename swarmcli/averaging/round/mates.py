"""The other members of a group: calls to them, and how long to wait for one that has not begun."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from swarmcli.averaging.group import Dialable, Group
from swarmcli.averaging.round.messages import RoundWord
from swarmcli.errors import NetworkError, UnknownMethod
from swarmcli.network import Endpoint, PeerID, Stream
from swarmcli.network.loop_thread import loop_time

ANSWER, ANSWER_TRIPS = 2.0, 10.0  # seconds, plus this many round trips, for a question that is answered at once
# Seconds before each question whether a member has begun; the last one repeats.
QUESTIONS = (0.5, 0.5, 1.0, 1.0, 1.0, 1.0, 2.0, 4.0, 8.0)
CONNECTING = 5.0  # seconds for a member that cannot be dialed directly to connect
MOST_UNKNOWN = 2  # answers in a row that know of no such round, after which the member will not learn of it

A = TypeVar("A")


class GroupMates:
    """Calls between the members of one group, by their indices."""

    def __init__(
        self, endpoint: Endpoint, method: Callable[[str], str], group: Group, round_id: bytes | None = None
    ) -> None:
        """`method` returns the full name of a method on the wire. `round_id`: of the round to which the phase of
        `group` belongs; None: the group's own. Raises KeyError if this peer is not in the group."""
        self.group, self.endpoint, self.method = group, endpoint, method
        self._round_id = group.group_id if round_id is None else round_id
        self.me = group.index_of(endpoint.peer_id)

    def __len__(self) -> int:
        return len(self.group)

    @property
    def others(self) -> Iterator[int]:
        return (index for index in range(len(self.group)) if index != self.me)

    @property
    def auxiliary(self) -> bool:
        """Whether this member is an auxiliary."""
        return self.group.members[self.me].auxiliary

    def peer(self, index: int) -> PeerID:
        return self.group.members[index].peer_id

    def is_connected(self, index: int) -> bool:
        return self.endpoint.is_connected(self.peer(index))

    def lost_with(self, index: int, stream: Stream) -> bool:
        """Whether this member lost a mate with its stream. A mate that gives a slow stream up resets it alone: the
        connection on which the two call each other stands."""
        return stream.broke and not self.is_connected(index)

    @property
    def slowest_round_trip(self) -> float:
        """Seconds of the slowest known round trip to another member; 0: none is known."""
        known = (self.endpoint.round_trip(self.peer(index)) for index in self.others)
        return max((seconds for seconds in known if seconds is not None), default=0.0)

    async def ask(self, index: int, name: str, request: Any, answer_type: type[A]) -> A:
        """Asks a member something that it answers at once. Raises NetworkError."""
        timeout = ANSWER + ANSWER_TRIPS * self.slowest_round_trip
        return await self.endpoint.call(self.peer(index), self.method(name), request, answer_type, timeout=timeout)

    async def state(self, index: int) -> RoundWord | None:
        """A member's word about itself, within a few seconds; None if it cannot be reached. The standing is "unknown"
        if it serves no rounds at all."""
        try:
            return await self.ask(index, "outcome", RoundWord(self._round_id, "running"), RoundWord)
        except UnknownMethod:
            return RoundWord(self._round_id, "unknown")
        except NetworkError:
            return None

    async def until_gone(self, index: int, begun: dict[int, float]) -> str:
        """Returns why nobody need wait for a member to begin: it is out of reach, has left, or knows nothing of the
        round. Does not return while the member computes, or once it takes part: then its streams tell the rest. `begun`
        gets the loop time when the member first gave no answer, or said that it takes part: from then on it is as slow
        as its streams."""
        began, unknown, asked, noted = loop_time(), 0, 0, math.inf
        comes = self.group.members[index].dialable != Dialable.DIRECTLY and not self.is_connected(index)
        while True:
            await asyncio.sleep(QUESTIONS[min(asked, len(QUESTIONS) - 1)])
            asked += 1
            when, word = loop_time(), await self.state(index)
            standing = None if word is None else word.standing
            if standing in (None, "running"):
                noted = begun.setdefault(index, when)
            elif begun.get(index) == noted:
                begun.pop(index, None)
            comes = comes and not self.is_connected(index) and loop_time() < began + CONNECTING
            unknown = unknown + 1 if standing == "unknown" else 0
            if standing == "running":
                await asyncio.Event().wait()
            if standing == "over":
                return "it has left"
            if standing is None and not self.is_connected(index) and not comes:
                return "it was gone before it began"
            if unknown == MOST_UNKNOWN:
                return "it knows nothing of the round"
