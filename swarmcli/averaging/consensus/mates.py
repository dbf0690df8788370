"""The other members of a group, as one of them can talk to them."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from typing import Any, Protocol, TypeVar

from swarmcli.averaging.consensus.ballot_messages import PresenceAnswer, PresenceQuestion
from swarmcli.averaging.group import Group
from swarmcli.errors import NetworkError
from swarmcli.network import Endpoint, PeerID

A = TypeVar("A")

UNBOUNDED = 1e7  # seconds, for a call that ends with its connection or with a deadline around it
AT_ONCE = 10.0  # seconds for what is answered at once

_LOOKS_ALIVE = 3.0  # seconds for a member to say that it is there, and so many round trips on top:
_ALIVE_TRIPS = 10.0


class Post(Protocol):
    """What members need of the service that their rounds run in."""

    endpoint: Endpoint

    def method(self, name: str) -> str: ...


class Mates:
    """Calls between the members of one group, by their indices."""

    def __init__(self, post: Post, group: Group) -> None:
        """Raises KeyError if this peer is not in the group."""
        self.group, self.endpoint = group, post.endpoint
        self.me = group.index_of(post.endpoint.peer_id)
        self.post = post

    def __len__(self) -> int:
        return len(self.group)

    @property
    def others(self) -> Iterator[int]:
        return (index for index in range(len(self.group)) if index != self.me)

    @cached_property
    def ranks(self) -> dict[int, int]:
        """Member → its rank among those that may lead, the leader first: whoever cannot be dialed comes last."""
        members = self.group.members
        order = sorted(range(len(members)), key=lambda index: (index != 0, not members[index].listening, index))
        return {index: rank for rank, index in enumerate(order)}

    @property
    def auxiliaries(self) -> frozenset[int]:
        return frozenset(index for index, member in enumerate(self.group.members) if member.auxiliary)

    @property
    def auxiliary(self) -> bool:
        """Whether this member is one."""
        return self.group.members[self.me].auxiliary

    def learn_addresses(self) -> None:
        for member in self.group.members:
            if member.addresses:
                self.endpoint.learn(member.peer_id, member.addresses)

    def peer(self, index: int) -> PeerID:
        return self.group.members[index].peer_id

    def is_connected(self, index: int) -> bool:
        return self.endpoint.is_connected(self.peer(index))

    async def ask(self, index: int, name: str, request: Any, answer_type: type[A], timeout: float = UNBOUNDED) -> A:
        """Raises NetworkError; with the usual timeout only when the connection has ended or there is none."""
        return await self.endpoint.call(self.peer(index), self.post.method(name), request, answer_type, timeout=timeout)

    async def presence(self, index: int) -> PresenceAnswer | None:
        """What a member says of itself, within a few seconds; None if it cannot be reached."""
        patience = _LOOKS_ALIVE + _ALIVE_TRIPS * self.slowest_round_trip
        question = PresenceQuestion(self.group.group_id)
        try:
            return await self.ask(index, "presence", question, PresenceAnswer, patience)
        except NetworkError:
            if not self.is_connected(index):
                return None
        try:  # two that dial each other at the same moment keep one connection: this went over the other one
            return await self.ask(index, "presence", question, PresenceAnswer, patience)
        except NetworkError:
            return None

    @property
    def slowest_round_trip(self) -> float:
        """Seconds, of those that are known."""
        known = (self.endpoint.round_trip(self.peer(index)) for index in self.others)
        return max((seconds for seconds in known if seconds is not None), default=0.0)
