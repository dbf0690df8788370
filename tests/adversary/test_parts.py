"""Lies about what travels in a round: what each may achieve at most."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from swarmcli.averaging import RoundResult
from swarmcli.averaging.config import AllreduceOptions
from swarmcli.events import PeerBanned
from tests.adversary.company import liar_of
from tests.adversary.lies import LIES, parts
from tests.averaging.averagers import Averagers, Peer, all_outcomes
from tests.simulation import simulated
from tests.suites import soak

NAMES = [name for name, each in LIES.items() if each.tell.__module__ == parts.__name__]
# These lies change messages on their way, after they were signed for audits: they are to be found without them.
OPTIONS = AllreduceOptions(part_size_bytes=1024, sender_timeout=5.0, audit=0)


async def round_beside(honest: list[Peer], liar: Peer) -> list[RoundResult]:
    """What an honest round gives beside the liar. No honest peer loses it, and none has other bits than another."""
    lied = liar.begin(timeout=120)
    outcomes = await all_outcomes([peer.begin(timeout=120) for peer in honest])
    lied.cancel()
    await asyncio.gather(lied, return_exceptions=True)
    results = [outcome for outcome in outcomes if isinstance(outcome, RoundResult)]
    assert len(results) == len(honest), outcomes
    assert len({tuple(peer.values) for peer in honest}) == 1
    return results


# What else holds: of the liar's id, what it told, and the results of the first round and of the second.
Check = Callable[[Peer, list[str], list[RoundResult], list[RoundResult]], None]


def is_in_no_group(liar: Peer, told: list[str], first: list[RoundResult], second: list[RoundResult]) -> None:
    assert all(liar.peer_id not in {member.peer_id for member in result.group.members} for result in second)


def is_left_out_by_name(liar: Peer, told: list[str], first: list[RoundResult], second: list[RoundResult]) -> None:
    assert all("overflow" in result.left_out[liar.peer_id] for result in first)


def has_the_share_of_one(liar: Peer, told: list[str], first: list[RoundResult], second: list[RoundResult]) -> None:
    assert {result.total_weight for result in first} == {12.0}, "three honest ones, and three times all of them"


def is_not_listened_to_again(liar: Peer, told: list[str], first: list[RoundResult], second: list[RoundResult]) -> None:
    assert any("nothing" in words for words in told) and any("before" in words for words in told)


CHECKS: dict[str, Check] = {
    "two signed lists": is_in_no_group,
    "an overflow": is_left_out_by_name,
    "weights without bound": has_the_share_of_one,
    "false accusations": is_not_listened_to_again,
}


@pytest.mark.parametrize("count", [4, *soak([5, 8])])
@pytest.mark.parametrize("name", NAMES)
@simulated
async def test_honest_peers_lose_no_round_and_ban_who_signs_two_lists_alone(name: str, count: int) -> None:
    async with Averagers(3) as swarm:
        *honest, last = await swarm.add(count, allreduce=OPTIONS, shapes=((40, 50), (300,)))
        liar = liar_of(last)
        LIES[name].tell(liar)
        results = [await round_beside(honest, last) for _ in range(2)]
        assert liar.told
        await asyncio.sleep(10)  # evidence gets around
        for peer in honest:
            banned = {event.peer for event in peer.events if isinstance(event, PeerBanned)}
            assert banned == ({last.peer_id.text} if name == "two signed lists" else set())
            assert peer.core.trust.is_banned(last.peer_id) == bool(banned)
        if name in CHECKS and count == 4:
            CHECKS[name](last, liar.told, *results)
