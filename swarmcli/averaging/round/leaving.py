"""Members that are lost between a group's beginning and their first word in its round: nobody waits for them."""

from __future__ import annotations

import logging

from swarmcli.averaging.consensus.ballot_messages import VoteMessage
from swarmcli.averaging.group import Group
from swarmcli.averaging.round.messages import MAX_WORDS, Noted
from swarmcli.averaging.round.service import AllreduceService, tries
from swarmcli.errors import CallRefused, NetworkError
from swarmcli.network.identity import PeerID

TIMEOUT = 60.0  # seconds that the leader may take to begin its own part and hear of it

logger = logging.getLogger(__name__)


async def note_absence(service: AllreduceService, group: Group, member: PeerID, reason: str) -> None:
    """At the leader: a member could not be told that the group begins, so nobody need wait for it."""
    words = f"it did not learn that the round began: {reason}"[:MAX_WORDS]
    try:
        await service.take_vote(member, VoteMessage(group.group_id, None, words))
    except CallRefused as error:
        logger.debug("the round is over without %s: %s", member.short, error)


async def decline(service: AllreduceService, group: Group) -> None:
    """This member takes no part, so the others go on without it. Its vote is its own further on."""
    if service.endpoint.peer_id not in group:
        return  # whoever began it has made it up
    service.part(*tries(group))
    if group.leader == service.endpoint.peer_id:
        return  # whoever asks it for the outcome is told that it does not know, and follows the next in rank
    vote = VoteMessage(group.group_id, None, "it left before the round began")
    try:
        await service.endpoint.call(group.leader, service.method("vote"), vote, Noted, timeout=TIMEOUT)
    except NetworkError as error:
        logger.debug("the leader did not hear that this peer has left: %s", error)
