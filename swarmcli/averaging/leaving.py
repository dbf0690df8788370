"""Members that are lost between a group's beginning and their first word in its round: nobody waits for them."""

from __future__ import annotations

import logging

from swarmcli.averaging.group import Group
from swarmcli.averaging.messages import Noted, VoteMessage
from swarmcli.averaging.outcome import Aborted, Reject
from swarmcli.averaging.service import AllreduceService
from swarmcli.errors import CallRefused, NetworkError
from swarmcli.network.identity import PeerID

TIMEOUT = 60.0  # seconds that the leader may take to begin its own part and hear of it

logger = logging.getLogger(__name__)


async def note_absence(service: AllreduceService, group: Group, member: PeerID, reason: str) -> None:
    """At the leader: a member could not be told that the group begins, so nobody need wait for it."""
    try:
        await service.take_vote(member, group.group_id, Reject(f"it did not learn that the round began: {reason}"))
    except CallRefused as error:
        logger.debug("the round is over without %s: %s", member.short, error)


async def decline(service: AllreduceService, group: Group) -> None:
    """This member takes no part. Without its leader the round is given up; without another member it goes on.

    The leader may say so on its own: until it takes part, nobody can have accepted a result through it.
    """
    reason = "it left before the round began"
    if group.leader == service.endpoint.peer_id:
        service.remember(group.group_id, Aborted(f"the leader {group.leader.short}: {reason}", suspects=(0,)))
        return
    service.remember(group.group_id, None)
    vote = VoteMessage.of(group.group_id, Reject(reason))
    try:
        await service.endpoint.call(group.leader, service.method("vote"), vote, Noted, timeout=TIMEOUT)
    except NetworkError as error:
        logger.debug("the leader did not hear that this peer has left: %s", error)
