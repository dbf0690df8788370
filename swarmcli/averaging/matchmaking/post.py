"""Carries the messages of matchmaking between the averagers of one prefix."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, TypeAlias, TypeVar

from swarmcli.averaging.group import Group
from swarmcli.averaging.matchmaking.candidates import Candidate
from swarmcli.averaging.matchmaking.meeting import (
    Answer,
    Begin,
    Done,
    Heartbeat,
    Invitation,
    Join,
    Leave,
    Progress,
    Pulse,
    Reply,
)
from swarmcli.errors import NetworkError
from swarmcli.network.endpoint import Endpoint
from swarmcli.network.identity import PeerID
from swarmcli.network.tasks import TaskOwner

logger = logging.getLogger(__name__)

R = TypeVar("R")
Unheard: TypeAlias = Callable[[Group, PeerID, str], None]


def method_name(prefix: str, what: str) -> str:
    """Averagers of several prefixes share an endpoint, so the methods carry the prefix."""
    return f"matchmaking/{what}/{prefix}"


class Post:
    """Typed calls to the same averager at other peers. All but `tell…` raise NetworkError and its kinds."""

    def __init__(self, endpoint: Endpoint, prefix: str, tasks: TaskOwner, *, timeout: float, unheard: Unheard) -> None:
        """`unheard` is called when a follower could not be told that its group begins."""
        self.endpoint = endpoint
        self.prefix = prefix
        self.timeout = timeout
        self._tasks = tasks
        self._unheard = unheard

    def learn(self, candidate: Candidate) -> None:
        """Takes up where a candidate can be dialed."""
        self.endpoint.learn(candidate.peer_id, candidate.addresses)

    async def join(self, peer: PeerID, message: Join) -> Answer:
        return await self._call(peer, "join", message, Answer)

    async def invite(self, peer: PeerID, message: Invitation) -> Reply:
        return await self._call(peer, "invite", message, Reply)

    async def beat(self, peer: PeerID, message: Heartbeat, timeout: float) -> Pulse:
        return await self._call(peer, "beat", message, Pulse, timeout)

    async def push(self, peer: PeerID, message: Progress) -> Pulse:
        return await self._call(peer, "push", message, Pulse)

    def tell_leaving(self, peer: PeerID, message: Leave) -> None:
        self._tasks.spawn(self._tell_leaving(peer, message))

    def tell_begin(self, peer: PeerID, search: bytes, group: Group, waited_in_vain: bool) -> None:
        self._tasks.spawn(self._tell_begin(peer, group, Begin(search, group.body, waited_in_vain)))

    async def _call(self, peer: PeerID, what: str, message: Any, answer: type[R], timeout: float | None = None) -> R:
        timeout = timeout or self.timeout
        return await self.endpoint.call(peer, method_name(self.prefix, what), message, answer, timeout=timeout)

    async def _tell_leaving(self, peer: PeerID, message: Leave) -> None:
        try:
            await self._call(peer, "leave", message, Done)
        except NetworkError as error:
            logger.debug("%s did not hear that this peer has left its group: %s", peer.short, error)

    async def _tell_begin(self, peer: PeerID, group: Group, message: Begin) -> None:
        try:
            await self._call(peer, "begin", message, Done)
        except NetworkError as error:
            logger.debug("%s did not hear that its group begins: %s", peer.short, error)
            self._unheard(group, peer, str(error))
