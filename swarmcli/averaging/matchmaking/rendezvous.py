"""Answers other peers' requests to meet, on behalf of the search that is under way at this peer."""

from __future__ import annotations

from collections.abc import Callable

from swarmcli.averaging.group import Group
from swarmcli.averaging.matchmaking.candidates import Bucket, Candidate
from swarmcli.averaging.matchmaking.meeting import (
    MAX_GONE,
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
from swarmcli.averaging.matchmaking.post import method_name
from swarmcli.averaging.matchmaking.seeking import Seeker
from swarmcli.errors import CallRefused
from swarmcli.network.endpoint import Endpoint
from swarmcli.network.identity import PeerID

MAX_AWAY = 4  # groups that those who come too late are told of; they may be some rounds behind


class Rendezvous:
    """The matchmaking methods of one averager. `seeker` is the search under way, if there is one."""

    def __init__(self, endpoint: Endpoint, prefix: str, parted: Callable[[Group], None]) -> None:
        """`parted` is called with a group that has begun with this peer in it, which takes no part."""
        self._parted = parted
        self.seeker: Seeker | None = None
        self._away: dict[Bucket, Group] = {}  # the last groups that began with this peer, oldest first
        self._endpoint = endpoint
        self._prefix = prefix

    def start(self) -> None:
        """Raises ValueError if this endpoint serves an averager of the same prefix already."""
        self._endpoint.serve(method_name(self._prefix, "join"), Join, self._on_join)
        self._endpoint.serve(method_name(self._prefix, "invite"), Invitation, self._on_invitation)
        self._endpoint.serve(method_name(self._prefix, "beat"), Heartbeat, self._on_heartbeat)
        self._endpoint.serve(method_name(self._prefix, "push"), Progress, self._on_progress)
        self._endpoint.serve(method_name(self._prefix, "leave"), Leave, self._on_leave)
        self._endpoint.serve(method_name(self._prefix, "begin"), Begin, self._on_begin)

    def stop(self) -> None:
        methods = ("join", "invite", "beat", "push", "leave", "begin")
        self._endpoint.withdraw(*(method_name(self._prefix, method) for method in methods))

    def open(self, seeker: Seeker) -> Seeker:
        """From now on this search answers."""
        self.seeker = seeker
        self._away.pop(seeker.search.me.bucket, None)
        return seeker

    def close(self, group: Group | None) -> None:
        """The search has ended, with this group; those who come too late for it will be told."""
        if group is not None and self.seeker is not None:
            self._away[self.seeker.search.me.bucket] = group
        self.seeker = None
        while len(self._away) > MAX_AWAY:
            del self._away[next(iter(self._away))]

    async def _on_join(self, peer: PeerID, message: Join) -> Answer:
        if message.candidate.peer_id != peer:
            raise CallRefused("identity", "a peer may only speak for itself")
        if (group := self._away.get(message.candidate.bucket)) is not None:
            return Answer("begun", gone=_gone(group))
        return self._seeker(message.candidate).on_join(peer, message)

    async def _on_invitation(self, peer: PeerID, message: Invitation) -> Reply:
        if message.sender.peer_id != peer:
            raise CallRefused("identity", "a peer may only speak for itself")
        if (group := self._away.get(message.to.bucket)) is not None:
            return Reply("begun", gone=_gone(group))
        return self._seeker(message.to).on_invitation(message)

    async def _on_heartbeat(self, peer: PeerID, message: Heartbeat) -> Pulse:
        return self.seeker.on_heartbeat(peer, message) if self.seeker is not None else Pulse(together=False)

    async def _on_progress(self, peer: PeerID, message: Progress) -> Pulse:
        return self.seeker.on_progress(peer, message) if self.seeker is not None else Pulse(together=False)

    async def _on_leave(self, peer: PeerID, message: Leave) -> Done:
        if self.seeker is not None:
            self.seeker.on_leave(peer, message)
        return Done()

    async def _on_begin(self, peer: PeerID, message: Begin) -> Done:
        group = Group(message.group)
        if group.leader != peer:
            raise CallRefused("identity", "only its leader begins a group")
        if self.seeker is None or not self.seeker.on_begin(group, message.search, message.waited_in_vain):
            self._parted(group)
            raise CallRefused("parted", "this peer is not waiting for that group any more")
        return Done()

    def _seeker(self, candidate: Candidate) -> Seeker:
        """The search in the candidate's bucket. A declaration may be out of date, so the bucket is asked for here."""
        if self.seeker is None or self.seeker.search.me.bucket != candidate.bucket:
            raise CallRefused("idle", "this peer is not looking for such a group")
        return self.seeker


def _gone(group: Group) -> tuple[PeerID, ...]:
    return tuple(member.peer_id for member in group.members)[:MAX_GONE]
